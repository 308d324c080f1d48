"""Reuse of spans (seed 222) where something goes wrong: short memory, callers that leave, forwards that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from engine.reuse.settings import ReuseSettings
from tests.engine.reusing import NEW, OLD, assert_nothing_is_left, logits, remember, reusing, sequence, text
from turnout.types import Sharing

TOLERANCE = 1e-4
SOME = ReuseSettings(recompute=0.25, threshold=0.0)


async def test_short_memory_preempts_and_starts_anew_without_leaks() -> None:
    model, plain = reusing(SOME, num_blocks=60, token_budget=32)
    await remember(model, OLD)
    exact = [sequence(text(40 + i, 60), sharing=Sharing.private("b"), most=60) for i in range(4)]
    lossy = [sequence([*NEW, i + 3], lossy=True, most=30) for i in range(3)]
    await asyncio.gather(*(model.decode(seq) for seq in (*exact, *lossy)))
    assert all(len(seq.generated) == seq.sampling.max_tokens for seq in (*exact, *lossy))
    for seq in exact:
        expected = plain.logits(seq.tokens)[59:-1]
        chosen = expected.gather(1, torch.tensor(seq.tokens[60:])[:, None])[:, 0]
        assert float((expected.max(-1).values - chosen).max()) < TOLERANCE
    for seq in (*exact, *lossy):
        model.release(seq)
    await assert_nothing_is_left(model)


@pytest.mark.parametrize("turns", [1, 3, 8, 20])
async def test_giving_up_at_any_moment_leaves_nothing(turns: int) -> None:
    model, plain = reusing(SOME, token_budget=32)
    await remember(model, OLD)
    seq = sequence(NEW, lossy=True)
    task = asyncio.create_task(model.decode(seq))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    model.release(seq)
    exact = sequence(NEW)
    torch.testing.assert_close(await logits(model, exact), plain.logits(NEW)[-1:], atol=TOLERANCE, rtol=0)
    model.release(exact)
    await assert_nothing_is_left(model)


async def test_a_forward_that_fails_fails_its_request_only() -> None:
    model, plain = reusing(SOME)
    await remember(model, OLD)
    runner = model.batcher.runner
    original = runner._settle  # type: ignore[attr-defined]

    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    runner._settle = broken  # type: ignore[attr-defined]
    lossy, exact = sequence(NEW, lossy=True), sequence(text(50, 30), sharing=Sharing.private("b"))
    results = await asyncio.gather(logits(model, lossy), logits(model, exact), return_exceptions=True)
    assert isinstance(results[0], RuntimeError)
    assert isinstance(results[1], torch.Tensor)
    torch.testing.assert_close(results[1], plain.logits(exact.tokens)[-1:], atol=TOLERANCE, rtol=0)
    runner._settle = original  # type: ignore[attr-defined]
    assert (await logits(model, lossy)).isfinite().all()
    for seq in (lossy, exact):
        model.release(seq)
    await assert_nothing_is_left(model)
