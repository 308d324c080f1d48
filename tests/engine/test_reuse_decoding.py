"""Tokens taken over that decoding computes again (seed 222): what is looked at, in place, beside the next token."""

from __future__ import annotations

from typing import Any

import torch

from decoding.model import ReadSpec, StopCondition
from engine.model import EngineModel
from engine.reuse.settings import ReuseSettings
from tests.engine.reusing import (
    NEW,
    OLD,
    B,
    assert_nothing_is_left,
    cached,
    counts,
    remember,
    reusing,
    sequence,
    text,
)
from turnout.types import Sharing

TOLERANCE = 1e-4


async def test_decoding_corrects_what_it_looks_at_in_place() -> None:
    # A run at the very beginning depends on nothing else: all of it computed again at once, it is exact.
    model, _ = reusing(ReuseSettings(recompute=0.01, threshold=100.0, decode_tokens=200))
    await remember(model, OLD)
    prompt = [*B, *text(11, 9)]
    exact, lossy = sequence(prompt, sharing=Sharing.private("b")), sequence(prompt, lossy=True)
    await model.extend(exact)
    await model.decode(lossy, StopCondition(max_tokens=1))
    before = [float((mine - theirs[:89]).abs().max()) for mine, theirs in pairs(model, exact, lossy)]
    assert max(before) > 0.1
    await model.decode(lossy, StopCondition(max_tokens=1))
    done = counts(model, lossy)
    assert (done.recomputed, done.corrected) == (0, 80)
    for mine, theirs in pairs(model, exact, lossy):
        torch.testing.assert_close(theirs[:80], mine[:80], atol=TOLERANCE, rtol=0)
    for seq in (exact, lossy):
        model.release(seq)
    await assert_nothing_is_left(model)


def pairs(model: EngineModel, exact: Any, lossy: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(cached(model, exact), cached(model, lossy), strict=True))


async def test_corrections_pick_what_the_last_token_looks_at_and_leave_shared_blocks_alone() -> None:
    model, _ = reusing(ReuseSettings(recompute=0.1, threshold=0.0, decode_tokens=3))
    await remember(model, OLD)
    lossy = sequence(NEW, lossy=True)
    await model.decode(lossy, StopCondition(max_tokens=1))
    reused = model.batcher.tables[lossy].reused
    assert reused is not None
    assert len(reused.again) == 3
    assert reused.again == sorted(reused.again)
    off = ~torch.from_numpy(reused.deviations).isnan()
    assert all(off[place] for place in reused.again)
    twin = model.fork(lossy)
    shared = [layer.clone() for layer in cached(model, twin)]
    await model.decode(lossy, StopCondition(max_tokens=3))
    assert counts(model, lossy).corrected == 0, "a block that two sequences hold was written to"
    for mine, theirs in zip(shared, cached(model, twin), strict=True):
        assert torch.equal(mine, theirs)
    model.release(twin)
    await model.decode(lossy, StopCondition(max_tokens=3))
    assert counts(model, lossy).corrected > 0
    model.release(lossy)
    await assert_nothing_is_left(model)


async def test_the_queries_that_choose_are_those_of_the_model() -> None:
    """The last layer's scores against keys it cached itself: softmax of them is what its attention used."""
    for kernels in ("plain", "torch", "auto"):
        model, plain = reusing(ReuseSettings(), kernels=kernels)
        seq = sequence(NEW)
        layer = model.num_layers - 1
        [row] = await model.extend(seq, want=ReadSpec(draw=None, hidden=frozenset({layer})))
        stack = model.batcher.runner.plan.stack
        query = stack.queries(layer, row.hidden[layer][None], torch.tensor([len(NEW) - 1]))
        assert query is not None
        keys = cached(model, seq)[layer][:, 0]
        got = torch.einsum("kgd,lkd->kgl", query[0].float().view(keys.shape[1], -1, keys.shape[2]), keys).softmax(-1)
        plain.model.config._attn_implementation = "eager"
        with torch.inference_mode():
            weights = plain.model(torch.tensor([NEW]), output_attentions=True, use_cache=False).attentions[layer]
        torch.testing.assert_close(got.flatten(0, 1), weights[0, :, -1], atol=1e-5, rtol=0)
        model.release(seq)
        await model.close()
