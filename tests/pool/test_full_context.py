"""Answers that fill a context as long as the whole cache: drafts shrink towards its end, and nothing fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pool.local_pool import LocalPool
from tests.conformance.parts import drafter_choice
from tests.engine.harness import ask, pair_config
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.types import FinishReason

CONTEXT, LAST = 256, 40
DEEP = 12
TREES = ["sequoia", "lookahead", "token_recycling", "dyspec", "rsd_s", "rsd_c", "staged", "model_tree", "vocab_trim"]
OTHERS = ["model_sequences", "rasd", "aded", "swift", "jacobi", "easyspec", "clasp", "model_chain", "input_copy"]
# What tries layers does so for every token here, with as many alternatives as there can be.
LAYER_SKIPPERS = [{"name": "clasp", "interval": 1, "skipped": 0.9}, {"name": "swift", "skipped": 0.9, "context": 16}]


def load_full(folder: Path, layers: dict[str, int]) -> LocalPool:
    """Every member's cache holds exactly one sequence of the longest kind, and nothing beside it."""
    config = pair_config(folder, block_size=8, token_budget=512)
    for name, count in layers.items():
        slot = 2 * count * 2 * 16 * 4
        config.models[name] = config.models[name].model_copy(update={"kv_memory_bytes": CONTEXT * slot})
    pool = LocalPool.load("pair", config)
    for model in pool.engines.values():
        assert model.max_length == model.pool.num_blocks * model.pool.block_size == CONTEXT
    return pool


@pytest.fixture
async def full(pair_folder: Path) -> AsyncIterator[LocalPool]:
    pool = load_full(pair_folder, {"small": 2, "large": 3})
    yield pool
    await pool.close()


@pytest.fixture
async def deep(tmp_path: Path) -> AsyncIterator[LocalPool]:
    for name in ("small", "large"):
        random_model(llama_config(num_hidden_layers=DEEP), seed=2).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    pool = load_full(tmp_path, {"small": DEEP, "large": DEEP})
    yield pool
    await pool.close()


async def assert_drafted_to_the_end(pool: LocalPool, params: dict[str, Any], temperature: float) -> None:
    prompt = [65 + i % 7 for i in range(CONTEXT - LAST)]
    options = {"max_tokens": 100, "ignore_eos": True, "temperature": temperature}
    plain = await ask(pool, prompt, **options)
    assert (len(plain.ids), plain.reasons) == (LAST, [FinishReason.LENGTH])
    drafted = await ask(pool, prompt, "speculative", params, **options)
    assert (drafted.ids, drafted.reasons) == (plain.ids, plain.reasons)


@pytest.mark.parametrize(
    ("drafter", "temperature"), [*((each, 0.8) for each in TREES + OTHERS), ("model_tree", 0.0), ("model_chain", 0.0)]
)
async def test_a_drafted_answer_goes_on_to_the_last_place(full: LocalPool, drafter: str, temperature: float) -> None:
    await assert_drafted_to_the_end(full, {"drafter": drafter_choice(drafter), "length": "fixed"}, temperature)


@pytest.mark.parametrize("drafter", LAYER_SKIPPERS, ids=lambda each: each["name"])
async def test_layers_are_tried_to_the_last_place(deep: LocalPool, drafter: dict[str, Any]) -> None:
    await assert_drafted_to_the_end(deep, {"drafter": drafter, "length": "fixed"}, 0.8)
