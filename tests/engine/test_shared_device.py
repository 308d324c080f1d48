"""Models that share a device: closing one, and one that cannot run, hold up none of the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from decoding.sequence import Sequence as Tokens
from engine.model import EngineModel
from engine.runner import Feed
from engine.scheduler.policy import Policy
from pool.local_pool import LocalPool
from tests.engine.harness import until
from turnout.types import SamplingParams


def tokens(tenant: str = "default") -> Tokens:
    return Tokens([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8), seed=0, tenant=tenant)


def held_up(model: EngineModel, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let a model's forwards wait for the second event; the first says that one has begun."""
    begun, may_end = threading.Event(), threading.Event()
    original = model.batcher.runner.run

    def run(feeds: Sequence[Feed]) -> Any:
        begun.set()
        may_end.wait(60)
        return original(feeds)

    monkeypatch.setattr(model.batcher.runner, "run", run)
    return begun, may_end


async def test_a_model_closed_during_its_forward_is_forgotten_by_its_device(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seq = pool.engines["large"], tokens()
    begun, may_end = held_up(model, monkeypatch)
    reading = asyncio.create_task(model.extend(seq))
    await until(begun.is_set)
    closing = asyncio.create_task(model.close())
    await until(lambda: not model.batcher.num_waiting)
    assert not closing.done()
    may_end.set()
    await closing
    assert reading.cancelled()
    assert pool.engines["small"].batcher.device.members == [pool.engines["small"].batcher]
    model.release(seq)


async def test_a_model_that_is_closed_waits_for_no_answer_of_another(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = pool.engines["small"], pool.engines["large"]
    taken = small.pool.allocate(small.pool.num_available)
    stuck, answered = tokens(), tokens()
    reading = asyncio.create_task(small.extend(stuck))
    await until(lambda: small.batcher.stuck)
    begun, may_end = held_up(large, monkeypatch)
    closing = asyncio.create_task(small.close())
    decoding = asyncio.create_task(large.decode(answered))
    await until(begun.is_set)
    may_end.set()
    done, _ = await asyncio.wait({closing, decoding}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {closing}
    await decoding
    assert reading.cancelled()
    small.pool.release(taken)
    small.release(stuck)
    large.release(answered)


async def test_a_model_yields_to_no_tenant_of_a_model_that_cannot_run(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "yields", lambda self, load, tenants, device: bool(device.tenants))
    small, large = pool.engines["small"], pool.engines["large"]
    taken = small.pool.allocate(small.pool.num_available)
    stuck, answered = tokens("a"), tokens("b")
    reading = asyncio.create_task(small.extend(stuck))
    await until(lambda: small.batcher.stuck)
    await large.decode(answered)  # what holds the memory of the small model may wait for this
    assert not reading.done()
    small.pool.release(taken)
    small.batcher.device.notify()
    await reading
    small.release(stuck)
    large.release(answered)
