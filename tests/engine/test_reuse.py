"""Spans of other prompts at other positions (seed 222): what is exact is exact, and apart from what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec, StopCondition
from decoding.partial_forward import LayerSelection, Sketch
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.backends.base import Kernels
from engine.model import EngineModel
from engine.reuse.reused_spans import Published
from engine.reuse.settings import ReuseSettings
from engine.runner import Feed
from tests.engine.architectures import config_of
from tests.engine.reusing import (
    NEW,
    OLD,
    SIZE,
    A,
    B,
    C,
    assert_nothing_is_left,
    cached,
    counts,
    logits,
    remember,
    reusing,
    sequence,
    text,
)
from turnout.errors import TurnoutError
from turnout.types import Namespace, Sharing

TOLERANCE = 1e-4
NOTHING = ReuseSettings(recompute=0.0)
SOME = ReuseSettings(recompute=0.25, threshold=0.0)
ALL = ReuseSettings(recompute=1.0)
REUSED = 32 + 80
PUBLIC = Namespace("public", "p")


def feeds_of(model: EngineModel) -> list[Several[Feed]]:
    """What every forward from now on is given."""
    seen: list[Several[Feed]] = []
    original = model.batcher.runner.run
    model.batcher.runner.run = lambda feeds: (seen.append(list(feeds)), original(feeds))[1]  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kernels", ["plain", "torch", "auto"])
@pytest.mark.parametrize("budget", [20, 512])
async def test_computing_everything_again_is_a_full_prefill(kernels: Kernels, budget: int) -> None:
    model, plain = reusing(ALL, kernels=kernels, token_budget=budget)
    await remember(model, OLD)
    seq = sequence(NEW, lossy=True)
    got = await logits(model, seq, (7, 8))
    assert (counts(model, seq).taken, counts(model, seq).recomputed) == (REUSED, REUSED)
    torch.testing.assert_close(got, plain.logits([*NEW, 7, 8])[-3:], atol=TOLERANCE, rtol=0)
    model.release(seq)
    await assert_nothing_is_left(model)


async def test_after_an_exact_prefix_nothing_recomputed_is_prefix_reuse() -> None:
    model, plain = reusing(NOTHING)
    shared, own = text(7, 64), text(8, 21)
    await remember(model, [*shared, *text(9, 30)], Sharing(Namespace("private", "a"), ((64, PUBLIC),)))
    adopting = sequence([*shared, *own], sharing=Sharing(Namespace("private", "c"), ((64, PUBLIC),)))
    taking = sequence([*shared, *own], lossy=True, sharing=Sharing.private("d"))
    expected, got = await logits(model, adopting), await logits(model, taking)
    assert model.batcher.tables[adopting].cached_on_arrival == counts(model, taking).taken == 64
    assert model.batcher.tables[taking].cached_on_arrival == 0
    assert torch.equal(got, expected)
    torch.testing.assert_close(got, plain.logits(taking.tokens)[-1:], atol=TOLERANCE, rtol=0)
    for seq in (adopting, taking):
        model.release(seq)
    await assert_nothing_is_left(model)


@pytest.mark.parametrize("budget", [24, 512])
async def test_layers_that_everything_goes_through_are_exact_and_those_above_are_not(budget: int) -> None:
    model, _ = reusing(SOME, token_budget=budget)
    await remember(model, OLD)
    exact, lossy = sequence(NEW, sharing=Sharing.private("b")), sequence(NEW, lossy=True)
    for seq in (exact, lossy):
        await logits(model, seq)
    for layer, (expected, got) in enumerate(zip(cached(model, exact), cached(model, lossy), strict=True)):
        apart = (expected - got).abs().amax(dim=(1, 2, 3))
        if layer < SOME.check_layers:
            assert float(apart.max()) < TOLERANCE
        else:
            assert int((apart > 0.01).sum()) > REUSED / 2
        # What stands before the first span is exact in any case.
        assert float(apart[:13].max()) < TOLERANCE
    assert REUSED // 4 <= counts(model, lossy).recomputed <= REUSED // 4 + 4
    for seq in (exact, lossy):
        model.release(seq)
    await assert_nothing_is_left(model)


async def test_less_is_computed_and_the_meter_says_so() -> None:
    model, _ = reusing(SOME)
    await remember(model, OLD)
    exact, lossy = sequence(NEW, sharing=Sharing.private("b")), sequence(NEW, lossy=True)
    for seq in (exact, lossy):
        await logits(model, seq)
    assert exact.meter.models["m"].spared_tokens == 0
    # Of 5 layers, tokens that were taken over and not computed again go through the first 2.
    left_out = (REUSED - counts(model, lossy).recomputed) * 3 / 5
    assert lossy.meter.models["m"].spared_tokens == pytest.approx(left_out)
    assert counts(model, lossy).rows == round(len(NEW) - left_out)
    for seq in (exact, lossy):
        model.release(seq)
    await model.close()


async def test_an_exact_sequence_never_finds_what_is_inexact() -> None:
    model, plain = reusing(NOTHING)
    await remember(model, OLD)
    lossy = sequence(NEW, lossy=True)
    got = await logits(model, lossy)
    expected = plain.logits(NEW)[-1:]
    assert float((got - expected).abs().max()) > 0.01, "nothing inexact to find"
    model.release(lossy)
    exact, again = sequence(NEW), sequence(NEW, lossy=True)
    torch.testing.assert_close(await logits(model, exact), expected, atol=TOLERANCE, rtol=0)
    # It shares what stands before the first span only.
    assert model.batcher.tables[exact].cached_on_arrival == 13 // SIZE * SIZE
    # Now that the prompt has been computed exactly, nothing needs to be taken over.
    torch.testing.assert_close(await logits(model, again), expected, atol=TOLERANCE, rtol=0)
    assert counts(model, again).taken == 0
    for seq in (exact, again):
        model.release(seq)
    await assert_nothing_is_left(model)


async def test_calls_that_must_be_exact_take_nothing_over() -> None:
    model, plain = reusing(SOME)
    await remember(model, OLD)
    seq = sequence(NEW)
    torch.testing.assert_close(await logits(model, seq), plain.logits(NEW)[-1:], atol=TOLERANCE, rtol=0)
    assert model.batcher.tables[seq].reused is None
    assert model.batcher.tables[seq].content.tainted_from is None
    model.release(seq)
    await model.close()


@pytest.mark.parametrize(
    ("owner", "reader", "expected"),
    [
        (Sharing.private("a"), Sharing.private("a"), REUSED),
        (Sharing.private("a"), Sharing.private("b"), 0),
        (Sharing(Namespace("group", "g")), Sharing(Namespace("group", "g")), REUSED),
        (Sharing(Namespace("group", "g")), Sharing(Namespace("group", "h")), 0),
        # Public is the first half of the prompt: of what is taken over, B stands there, C does not.
        (Sharing(Namespace("private", "a"), ((104, PUBLIC),)), Sharing.private("b"), 80),
        (Sharing(Namespace("private", "a"), ((104, PUBLIC),)), Sharing.private("a"), REUSED),
        (Sharing(Namespace("private", "a"), ((96, PUBLIC),)), Sharing.private("b"), 72),
        # A group's span before the reader's own.
        (
            Sharing(Namespace("group", "g")),
            Sharing(Namespace("private", "b"), ((8, Namespace("group", "g")),)),
            REUSED,
        ),
    ],
)
async def test_only_those_who_may_find_a_block_take_it_over(owner: Sharing, reader: Sharing, expected: int) -> None:
    model, _ = reusing(NOTHING)
    await remember(model, OLD, owner)
    seq = sequence(NEW, lossy=True, sharing=reader)
    await logits(model, seq)
    assert counts(model, seq).taken == expected
    model.release(seq)
    await model.close()


async def test_spans_come_from_several_prompts() -> None:
    model, plain = reusing(ALL)
    await remember(model, [*A, *B])
    await remember(model, [*text(10, 16), *C])
    seq = sequence(NEW, lossy=True)
    got = await logits(model, seq)
    assert counts(model, seq).taken == REUSED
    torch.testing.assert_close(got, plain.logits(NEW)[-1:], atol=TOLERANCE, rtol=0)
    model.release(seq)
    await model.close()


async def test_what_was_evicted_meanwhile_is_computed() -> None:
    model, plain = reusing(NOTHING)
    await remember(model, OLD)
    seq = sequence(NEW, lossy=True)
    await model.spans.fill(model._table(seq))  # type: ignore[union-attr]
    assert model.batcher.tables[seq].reused is not None
    model.pool.clear_cached()
    torch.testing.assert_close(await logits(model, seq), plain.logits(NEW)[-1:], atol=TOLERANCE, rtol=0)
    assert counts(model, seq).taken == 0
    model.release(seq)
    await assert_nothing_is_left(model)


async def test_nothing_is_taken_from_blocks_that_are_gone_when_it_is_looked_for() -> None:
    model, _ = reusing(NOTHING)
    await remember(model, OLD)
    model.pool.clear_cached()
    seq = sequence(NEW, lossy=True)
    await logits(model, seq)
    assert model.batcher.tables[seq].reused is None
    assert model.batcher.tables[seq].content.tainted_from is None
    model.release(seq)
    await model.close()


async def test_partial_forwards_share_steps_with_everything_else() -> None:
    model, plain = reusing(SOME, token_budget=64)
    await remember(model, OLD)
    seen = feeds_of(model)
    running = [sequence(text(20 + i, 30 + i), sharing=Sharing.private("b")) for i in range(3)]
    drafting = sequence(text(30, 25), sharing=Sharing.private("b"))
    sketching = sequence(text(31, 25), sharing=Sharing.private("b"))
    for seq in (*running, drafting, sketching):
        await model.extend(seq)
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 0, 1), "d")
    lossy = sequence(NEW, lossy=True)

    async def draft() -> None:
        for _ in range(4):
            verdict = await model.verify(drafting, tree, MatchVerifier())
            drafting.extend(verdict.tokens, {token.source: 1 for token in verdict.tokens})

    await asyncio.gather(
        *(model.decode(seq, StopCondition(max_tokens=8)) for seq in running),
        draft(),
        model.partial_forward(
            sketching, Sketch.chain(24, (sketching.tokens[-1], 9), 0, LayerSelection(last=2)), ReadSpec()
        ),
        logits(model, lossy),
    )
    mixed = [feeds for feeds in seen if any(feed.partial for feed in feeds) and len(feeds) > 2]
    assert any(any(feed.block is not None for feed in feeds) for feeds in mixed)
    assert any(sum(len(feed.tokens) == 1 for feed in feeds) >= 3 for feeds in mixed)
    for seq in (*running, drafting):
        for place in range(seq.num_prompt_tokens, len(seq)):
            expected = plain.logits(seq.tokens[:place])[-1]
            assert float(expected.max() - expected[seq.tokens[place]]) < TOLERANCE
    assert counts(model, lossy).taken == REUSED
    for seq in (*running, drafting, sketching, lossy):
        model.release(seq)
    await assert_nothing_is_left(model)


async def test_a_draft_right_behind_the_prompt_sees_the_mixture() -> None:
    """A tree fed in the same forward as the spans: its rows are those of the same path fed after them."""
    tree = DraftTree((5, 6, 7, 8), (-1, -1, 0, 1), "d")
    for settings in (NOTHING, SOME):
        model, _ = reusing(replace(settings, decode_tokens=0), token_budget=512)
        await remember(model, OLD)
        seqs = [sequence(NEW, lossy=True) for _ in range(2)]
        verdict = await model.verify(seqs[0], tree, MatchVerifier(), ReadSpec(draw=None, logits=True))
        assert counts(model, seqs[0]).taken == REUSED
        model.release(seqs[0])
        paths = [(), (5,), (6,), (5, 7), (6, 8)]
        got = [row.logits for row in verdict.rows]
        for path, row in zip(paths, got, strict=True):
            again = sequence(NEW, lossy=True)
            expected = (await logits(model, again, path))[-1]
            torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)
            model.release(again)
        await assert_nothing_is_left(model)


@pytest.mark.parametrize("kernels", ["plain", "torch", "auto"])
@pytest.mark.parametrize("budget", [48, 512])
async def test_rows_with_gaps_between_them_see_all_that_is_before_them(
    kernels: Kernels, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken over is exact here and stays where it was, but for three blocks: so all rows must be exact."""
    model, plain = reusing(NOTHING, kernels=kernels, token_budget=budget)
    prefix, middle = text(12, 320), text(13, 120)
    await remember(model, [*prefix, *middle], Sharing(Namespace("private", "a"), ((440, PUBLIC),)))
    found = Published.block
    monkeypatch.setattr(Published, "block", lambda self, index: None if index in (42, 47, 48) else found(self, index))
    seqs = [
        sequence([*prefix, *middle, *text(14 + i, 5 + i)], True, Sharing(Namespace("private", owner), ((320, PUBLIC),)))
        for i, owner in enumerate("bcde")
    ]
    answers = await asyncio.gather(*(logits(model, seq, (3, 4)) for seq in seqs))
    for seq, got in zip(seqs, answers, strict=True):
        assert model.batcher.tables[seq].cached_on_arrival == 320
        assert counts(model, seq).taken == 120 - 3 * SIZE
        torch.testing.assert_close(got, plain.logits([*seq.tokens, 3, 4])[-3:], atol=TOLERANCE, rtol=0)
        model.release(seq)
    await assert_nothing_is_left(model)


async def test_what_is_taken_over_is_kept_until_the_forward_has_read_it() -> None:
    """Whoever takes memory during a forward, as a store's fetch may, finds everything but that."""
    model, plain = reusing(NOTHING)
    shared, own = text(7, 64), text(8, 21)
    await remember(model, [*shared, *text(9, 30)], Sharing(Namespace("private", "a"), ((64, PUBLIC),)))
    original = model.batcher.runner.run

    def run(feeds: Any) -> Any:
        taken = model.pool.allocate(model.pool.num_available)
        for block in taken:
            for layer in model.store.layers:
                layer[block * SIZE : (block + 1) * SIZE] = 100.0
        model.pool.release(taken)
        return original(feeds)

    model.batcher.runner.run = torch.inference_mode()(run)  # type: ignore[method-assign]
    seq = sequence([*shared, *own], lossy=True, sharing=Sharing.private("d"))
    torch.testing.assert_close(await logits(model, seq), plain.logits(seq.tokens)[-1:], atol=TOLERANCE, rtol=0)
    assert counts(model, seq).taken == 64
    model.release(seq)
    await assert_nothing_is_left(model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt_neox", "qwen3_moe", "llama_scaled_rope"])
async def test_other_architectures(name: str) -> None:
    config = config_of(name, num_hidden_layers=4, max_position_embeddings=512, vocab_size=150)
    for chosen in (ALL, SOME):
        model, plain = reusing(chosen, config=config)
        await remember(model, OLD)
        seq = sequence(NEW, lossy=True)
        got = await logits(model, seq)
        assert counts(model, seq).taken == REUSED
        if chosen is ALL:
            torch.testing.assert_close(got, plain.logits(NEW)[-1:], atol=TOLERANCE, rtol=0)
        segment = await model.decode(seq, StopCondition(max_tokens=4))
        assert len(segment.tokens) == 4
        model.release(seq)
        await assert_nothing_is_left(model)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "mistral", "phi3"])
async def test_layers_with_a_window_are_refused(name: str) -> None:
    with pytest.raises(TurnoutError, match="full attention in every layer"):
        reusing(SOME, config=config_of(name))


def test_settings_that_mean_nothing_are_refused() -> None:
    for wrong in ({"recompute": 1.5}, {"recompute": -0.1}, {"check_layers": 0}, {"decode_tokens": -1}):
        with pytest.raises(ValueError, match="recompute is a share"):
            ReuseSettings(**wrong)  # type: ignore[arg-type]
