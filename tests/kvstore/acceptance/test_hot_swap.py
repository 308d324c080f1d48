"""Acceptance test 8: a model that changed under its name finds nothing of what it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.loading import Checkpoint
from kvstore.redis.redis_store import RedisStore
from pool import local_pool as pools
from pool.member_loading import load_member
from tests.engine import conftest as engine_fixtures
from tests.engine.harness import answer, call_of, pair_config
from tests.kvstore.acceptance.workers import CHUNK, PARTS, prompt_of, store_prompt, working
from tests.kvstore.forked_calls import open_pool, settle
from tests.kvstore.forked_calls import tokens as bytes_of
from tests.kvstore.test_end_to_end import redis
from tests.kvstore.test_end_to_end import store as pool_store
from turnout.errors import TurnoutError
from turnout.kvstore_config import KVStoreConfig

pair_folder = engine_fixtures.pair_folder
__all__ = ["pair_folder", "pool_store", "redis"]

PROMPT = prompt_of(4 * CHUNK + 1)


@pytest.mark.parametrize("part", ["weights", "tokenizer", "adapter"])
async def test_other_contents_have_other_keys(store: RedisStore, part: str) -> None:
    """An adapter is a further part: the same name with another digest, or none, is another model."""
    await store_prompt(store, PROMPT)
    changed = {**PARTS, part: "another"}
    async with working(store, parts=changed, seed=5 if part == "weights" else 4) as other:
        assert (await other.answer(PROMPT)).fetched == 0
    async with working(store) as same:
        assert (await same.answer(PROMPT)).fetched == 4 * CHUNK


async def test_a_key_that_forgot_the_weights_would_be_seen(store: RedisStore) -> None:
    """Other weights under the same fingerprint: the answer is wrong, so the test above can fail."""
    await store_prompt(store, PROMPT)
    async with working(store, seed=5) as other:
        assert await other.logits_error(PROMPT) > 0.1


@pytest.mark.parametrize("change", ["weights", "settings", "tokenizer"])
async def test_files_that_are_replaced_in_place_make_another_model(
    pair_folder: Path, pool_store: dict[str, Any], tmp_path: Path, change: str
) -> None:
    """The same path and name before and after, and no restart of Redis; what is put back is found again."""
    folder = Path(shutil.copytree(pair_folder, tmp_path / "models"))
    fetched = []
    for step in range(3):
        if step == 1:
            _change(folder / "large", change)
        if step == 2:
            shutil.rmtree(folder)
            shutil.copytree(pair_folder, folder)
        pool = open_pool(folder, pool_store)
        prompt = bytes_of(4 * 16 + 1, start=3)
        got = await answer(pool, call_of(prompt, "plain", {"model": "large"}, max_tokens=4))
        fetched.append(got.usage.models["large"].fetched_tokens)
        await settle(pool)
        await pool.close()
    assert fetched == [0, 0, 4 * 16]


async def test_files_that_are_replaced_while_a_pool_loads_are_not_shared(
    pair_folder: Path, pool_store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes with what it read; what it stored would be found by any reader of what is there now."""
    folder = Path(shutil.copytree(pair_folder, tmp_path / "models"))
    load = pools.load_checkpoint

    def load_and_replace(path: Path, *rest: Any) -> Checkpoint:
        loaded = load(path, *rest)
        _change(path, "weights")
        return loaded

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(pools, "load_checkpoint", load_and_replace)
        with pytest.raises(TurnoutError, match=r"models\.\w+\.path: .* changed while they were loaded"):
            open_pool(folder, pool_store)
    await open_pool(folder, pool_store).close()


@pytest.mark.parametrize("change", ["weights", "settings", "tokenizer"])
async def test_files_that_are_replaced_while_a_member_loads_are_not_shared(
    pair_folder: Path, pool_store: dict[str, Any], tmp_path: Path, change: str
) -> None:
    folder = Path(shutil.copytree(pair_folder, tmp_path / "models"))
    config = pair_config(folder).model_copy(update={"kvstore": KVStoreConfig(**{**pool_store, "chunk_tokens": None})})
    member = load_member("large", "pair", config)
    member.begin(member.checkpoint.vocab_size)  # while they are the ones that were loaded, all is well
    assert member.stores is not None
    await member.close()
    member = load_member("large", "pair", config)
    _change(folder / "large", change)
    with pytest.raises(TurnoutError, match=r"models\.large\.path: .* changed while they were loaded"):
        member.begin(member.checkpoint.vocab_size)
    await member.close()


def _change(model: Path, what: str) -> None:
    if what == "weights":
        weights = load_file(model / "model.safetensors")
        weights["model.norm.weight"][0] += 1e-3
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        return
    # White space: the same settings, in other bytes. Contents count, never what they mean to us.
    file = model / ("config.json" if what == "settings" else "tokenizer_config.json")
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
