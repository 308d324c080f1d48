"""Calls that move between pools whose models are behind the wire: their caches come along."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from actors.remote import RemoteModel
from decoding.sequence import Sequence
from pool.call_migration import HandOver
from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool, close_in_process, open_in_process, open_local
from tests.engine.harness import answer, call_of
from tests.pool.resuming import Client, run
from turnout.config import TurnoutConfig
from turnout.types import SamplingParams

PROMPT = [*b"ab ab. ab ab, ab 7.5 ab ab"] * 2
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
async def local(actors_config: TurnoutConfig) -> AsyncIterator[LocalPool]:
    """The pool in one piece."""
    pool = open_local(actors_config)
    yield pool
    await pool.close()


@pytest.fixture
async def other(actors_config: TurnoutConfig) -> AsyncIterator[RemotePool]:
    """Another replica of the same pool."""
    pool = await open_in_process(actors_config)
    yield pool
    await pool.settle()
    pool.assert_idle()
    await close_in_process(pool)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("plain", {}),
        ("speculative", {"length": "fixed", "draft_length": 3}),
        ("entropy_adaptive", {"threshold": 2.0, "min_stay": 2}),
    ],
)
async def test_a_call_moves_with_its_caches(
    local: LocalPool, own_remote: RemotePool, other: RemotePool, name: str, params: dict[str, Any]
) -> None:
    call = call_of(PROMPT, name, params, **SAMPLED)
    whole = await answer(local, call)
    client, moved, moves = Client.of(call), None, 0
    while client.usage is None:
        moved = await run((own_remote, other)[moves % 2], replace(call, moved=moved), client, 3, again=True)
        moves += 1
        if moved is not None:
            kept = len(PROMPT) if name == "entropy_adaptive" else len(PROMPT) + len(client.ids[0])
            assert moved.caches
            assert all(kept - 8 <= len(cache.ids) <= kept for cache in moved.caches if cache.model == "large")
    assert moves > 2
    assert (client.ids, client.texts) == ([whole.ids], [whole.text])
    found = [note for note in client.usage.notes if note.startswith("moved here with the cache of ")]
    assert found
    assert found != ["moved here with the cache of 0 tokens"]


async def test_several_answers_and_a_prompt(local: LocalPool, own_remote: RemotePool, other: RemotePool) -> None:
    call = call_of(PROMPT, "plain", n=3, **SAMPLED)
    whole = await answer(local, call)
    client = Client.of(call)
    moved = await run(own_remote, call, client, 9)
    assert moved is not None
    assert await run(other, replace(call, moved=moved), client, None) is None
    assert client.ids == [[token.id for token in tokens] for tokens in whole.answers]
    assert client.usage is not None
    assert client.usage.models["large"].generated_tokens == 3 * SAMPLED["max_tokens"]


async def test_a_cache_that_was_computed_otherwise_is_left_behind(
    local: LocalPool, own_remote: RemotePool, other: RemotePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(PROMPT, "plain", **SAMPLED)
    whole, client = await answer(local, call), Client.of(call)
    moved = await run(own_remote, call, client, 3, again=True)
    assert moved is not None
    assert moved.caches
    monkeypatch.setattr(other.members["large"], "numerics", "another class")
    assert await run(other, replace(call, moved=moved), client, None) is None
    assert client.ids == [whole.ids]
    assert client.usage is not None
    assert "moved here with the cache of 0 tokens" in client.usage.notes


async def test_no_more_is_asked_for_than_may_be_moved(own_remote: RemotePool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_remote.members["large"]
    assert isinstance(model, RemoteModel)
    seq = Sequence(PROMPT, SamplingParams(max_tokens=4), 3)
    await model.prefill_ahead(seq)
    asked: list[tuple[int, int]] = []
    do, faults = model.do, [OSError("planted")]

    async def counted(seq: Sequence, op: Any) -> Any:
        asked.append((op.start, op.stop))
        if faults:
            raise faults.pop()
        return await do(seq, op)

    monkeypatch.setattr(model, "do", counted)
    packing = HandOver({"large": model}, 10 * model.token_bytes + 3)
    for number in range(3):
        await packing.pack(number, seq, True)
    model.release(seq)
    assert asked == [(0, 10), (0, 10)]  # what failed is free again, and took no prompt along
    [cache] = packing.moved([]).caches
    assert (cache.answer, cache.start, len(cache.ids)) == (1, 0, 10)
    assert cache.nbytes == 10 * model.token_bytes


async def test_a_prompt_is_taken_along_once(own_remote: RemotePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.call_migration.WHOLE", 8)
    model = own_remote.members["large"]
    assert isinstance(model, RemoteModel)
    seq = Sequence(PROMPT, SamplingParams(max_tokens=4), 3)
    await model.decode(seq)
    packing = HandOver({"large": model})
    for number in range(2):
        await packing.pack(number, seq, True)
    model.release(seq)
    assert [cache.start for cache in packing.moved([]).caches] == [0, len(PROMPT) // 8 * 8]
