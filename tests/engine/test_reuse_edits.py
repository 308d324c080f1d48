"""Edits of a cached sequence (seed 230, Positional Integrity Encoding): what moved, what was computed, what it says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch

from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.reuse.edits import Edit
from engine.reuse.rotation import Rotation
from engine.reuse.settings import MOVED_ONLY
from tests.engine.harness import Reference
from tests.engine.reusing import (
    SIZE,
    assert_nothing_is_left,
    cached,
    counts,
    divergence,
    logits,
    reusing,
    sequence,
    text,
)
from tests.kvstore.fake_prefixes import FakePrefixes
from turnout.errors import Code, TurnoutError
from turnout.types import Namespace, Sharing, Token

TOLERANCE = 1e-4
LINE = text(1, 150)


@dataclass(frozen=True)
class Case:
    """Edits, and the tokens that have to be computed: the new ones, and the last."""

    edits: list[Edit]
    computed: int


CASES = {
    "replacement": Case([Edit(30, 34, (5, 6, 7, 8, 9, 10))], 7),
    "same length": Case([Edit(30, 33, (5, 6, 7))], 4),
    "insertion": Case([Edit(50, 50, (5, 6, 7))], 4),
    "deletion": Case([Edit(50, 61, ())], 1),
    "at the start": Case([Edit(0, 0, (5, 6))], 3),
    "first token gone": Case([Edit(0, 1, ())], 1),
    "at the end": Case([Edit(150, 150, (5, 6, 7))], 3),
    "the last token": Case([Edit(149, 150, (5,))], 1),
    "several": Case([Edit(100, 103, (9,)), Edit(20, 20, (5, 6)), Edit(60, 70, ()), Edit(0, 0, (4,))], 5),
    "side by side": Case([Edit(40, 42, (5,)), Edit(42, 42, (6, 7)), Edit(42, 44, (8,))], 5),
}


def after(edits: list[Edit]) -> list[int]:
    """By definition: from the last edit to the first."""
    line = list(LINE)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        line[edit.start : edit.end] = edit.tokens
    return line


async def before(model: EngineModel) -> Sequence:
    """A sequence whose cache is complete."""
    seq = sequence(LINE)
    await model.extend(seq)
    return seq


@pytest.mark.parametrize("name", sorted(CASES))
async def test_only_new_tokens_and_the_last_are_computed_and_the_first_layer_is_exact(name: str) -> None:
    case = CASES[name]
    model, plain = reusing(MOVED_ONLY)
    seq = await before(model)
    twin = model.edit(seq, case.edits)
    assert twin.tokens == after(case.edits)
    rows = model.batcher.runner.counts.rows  # type: ignore[attr-defined]
    got = await logits(model, twin)
    moved = model.batcher.tables[twin].reused
    if moved is not None:
        assert model.batcher.runner.counts.rows - rows == case.computed  # type: ignore[attr-defined]
        assert twin.meter.models["m"].processed_tokens - twin.meter.models["m"].spared_tokens == case.computed
    else:
        assert twin.meter.models["m"].processed_tokens == case.computed
        torch.testing.assert_close(got, plain.logits(twin.tokens)[-1:], atol=TOLERANCE, rtol=0)
    exact = sequence(twin.tokens, sharing=Sharing.private("b"))
    await model.extend(exact)
    torch.testing.assert_close(cached(model, twin)[0], cached(model, exact)[0], atol=2e-5, rtol=0)
    first = min(edit.start + len(edit.tokens) for edit in case.edits)
    for mine, theirs in zip(cached(model, twin), cached(model, exact), strict=True):
        torch.testing.assert_close(mine[:first], theirs[:first], atol=TOLERANCE, rtol=0)
    for each in (seq, twin, exact):
        model.release(each)
    await assert_nothing_is_left(model)


async def test_without_rotation_the_answer_is_much_further_from_a_full_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain = reusing(MOVED_ONLY)
    seq = await before(model)
    edits = [Edit(20, 24, tuple(text(2, 31)))]
    expected = plain.logits([*after(edits), 9, 8, 7])[-4:]
    twin = model.edit(seq, edits)
    turned = divergence(expected, await logits(model, twin, (9, 8, 7)))
    zero = Rotation([torch.zeros(1, dtype=torch.float64)] * model.num_layers)
    monkeypatch.setattr(model.batcher.runner, "rotation", zero)
    conflicting = model.edit(seq, edits)
    conflict = divergence(expected, await logits(model, conflicting, (9, 8, 7)))
    assert conflict > 5 * turned
    for each in (seq, twin, conflicting):
        model.release(each)
    await assert_nothing_is_left(model)


async def test_a_suffix_that_is_computed_again_gives_no_divergence() -> None:
    model, plain = reusing(MOVED_ONLY)
    seq = await before(model)
    twin = model.edit(seq, [Edit(20, 24, (5,))])
    # Whatever the old sequence no longer has is computed.
    model.release(seq)
    got = await logits(model, twin)
    assert counts(model, twin).taken == 0
    torch.testing.assert_close(got, plain.logits(twin.tokens)[-1:], atol=TOLERANCE, rtol=0)
    model.release(twin)
    await assert_nothing_is_left(model)


async def test_an_answer_is_edited_edited_again_and_continued() -> None:
    model, _ = reusing(MOVED_ONLY, token_budget=40)
    seq = sequence(LINE)
    await model.decode(seq, StopCondition(max_tokens=12))
    once = model.edit(seq, [Edit(10, 12, (7,)), Edit(150, 152, (3, 4, 5))])
    assert len(once) == 162
    await model.extend(once)
    twice = model.edit(once, [Edit(80, 80, (9, 9))])
    await model.extend(twice)
    # 79 - 10 tokens of the first run stay in the prefix, as inexact as they were.
    assert model.batcher.tables[twice].content.tainted_from == 8
    assert counts(model, twice).taken == 164 - 82 - 1
    segment = await model.decode(twice, StopCondition(max_tokens=5))
    assert len(segment.tokens) == 5
    for each in (seq, once, twice):
        model.release(each)
    await assert_nothing_is_left(model)


@pytest.mark.parametrize("tried", ["score", "extend"])
async def test_what_was_only_tried_is_computed(tried: str) -> None:
    model, plain = reusing(MOVED_ONLY)
    seq = await before(model)
    await (model.score(seq, [(5, 6, 7, 8)]) if tried == "score" else model.extend(seq, (5, 6, 7, 8)))
    for token in (9, 10, 11, 12):
        seq.append(Token(token, "m"))
    # Nothing changes and nothing moves: what is taken over is exact.
    twin = model.edit(seq, [Edit(30, 33, tuple(LINE[30:33]))])
    got = await logits(model, twin)
    torch.testing.assert_close(got, plain.logits([*LINE, 9, 10, 11, 12])[-1:], atol=TOLERANCE, rtol=0)
    assert counts(model, twin).taken == 150 - 33
    for each in (seq, twin):
        model.release(each)
    await assert_nothing_is_left(model)


async def test_an_edit_while_the_store_is_asked_is_kept_from_everybody() -> None:
    model, plain = reusing(MOVED_ONLY)
    store = FakePrefixes(2 * SIZE)
    store.gate = asyncio.Event()
    model.share(store)  # type: ignore[arg-type]
    seq = sequence(LINE, lossy=True)
    reading = asyncio.create_task(model.extend(seq))
    while not store.asked:
        await asyncio.sleep(0)
    twin = model.edit(seq, [Edit(20, 24, (5,))])
    store.gate.set()
    await reading
    wanted = list(store.wanted)
    assert len(wanted) == 150 // 16
    await logits(model, twin)
    assert counts(model, twin).taken == 147 - 21 - 1
    assert model.batcher.tables[twin].content.tainted_from == 16
    assert (len(store.asked), store.wanted) == (1, wanted)
    exact = sequence([*twin.tokens, 3])
    torch.testing.assert_close(await logits(model, exact), plain.logits(exact.tokens)[-1:], atol=TOLERANCE, rtol=0)
    assert model.batcher.tables[exact].cached_on_arrival == 16
    for each in (seq, twin, exact):
        model.release(each)
    while model.shared is not None and model.shared.kept:
        await asyncio.sleep(0)
    await assert_nothing_is_left(model)


async def test_nobody_finds_the_inexact_part_and_the_old_sequence_goes_on_unharmed() -> None:
    model, plain = reusing(MOVED_ONLY)
    seq = await before(model)
    twin = model.edit(seq, [Edit(20, 24, (5,))])
    segments = await asyncio.gather(model.decode(seq, StopCondition(max_tokens=6)), model.extend(twin))
    for place, token in enumerate(segments[0].tokens):
        expected = plain.logits(seq.tokens[: 150 + place])[-1]
        assert float(expected.max() - expected[token.id]) < TOLERANCE
    exact = sequence([*twin.tokens, 3])
    torch.testing.assert_close(await logits(model, exact), plain.logits(exact.tokens)[-1:], atol=TOLERANCE, rtol=0)
    # The new token in place 20 is exact, and in a block with what moved.
    assert model.batcher.tables[exact].cached_on_arrival == 16
    for each in (seq, twin, exact):
        model.release(each)
    await assert_nothing_is_left(model)


async def test_registered_spans_end_where_the_text_is_no_longer_theirs() -> None:
    model, _ = reusing(MOVED_ONLY)
    public, own = Namespace("public", "p"), Namespace("private", "a")
    seq = sequence(LINE, sharing=Sharing(own, ((64, public),)))
    twin = model.edit(seq, [Edit(30, 30, (5,))])
    assert [twin.sharing.namespace(end) for end in (24, 30, 31, 64)] == [
        public,
        public,
        *[Namespace("private", "a")] * 2,
    ]
    await model.close()


async def test_impossible_edits_are_refused() -> None:
    model, _ = reusing(MOVED_ONLY)
    seq = await before(model)
    for edits, code in (
        ([], Code.INVALID_ARGUMENT),
        ([Edit(3, 5, ()), Edit(4, 6, ())], Code.INVALID_ARGUMENT),
        ([Edit(0, 150, ())], Code.INVALID_ARGUMENT),
        ([Edit(5, 3, ())], Code.OUT_OF_RANGE),
        ([Edit(-1, 3, ())], Code.OUT_OF_RANGE),
        ([Edit(149, 151, ())], Code.OUT_OF_RANGE),
    ):
        with pytest.raises(TurnoutError, match="edits") as refusal:
            model.edit(seq, edits)
        assert refusal.value.code is code
    model.release(seq)
    await assert_nothing_is_left(model)


async def test_a_model_that_was_not_prepared_for_it_refuses(loaded: tuple[EngineModel, Reference]) -> None:
    model, _ = loaded
    with pytest.raises(TurnoutError, match="is off for 'm'"):
        model.edit(sequence(LINE), [Edit(0, 0, (5,))])


@pytest.fixture
def loaded() -> tuple[EngineModel, Reference]:
    from tests.engine.harness import twins
    from tests.engine.reusing import LLAMA

    return twins(LLAMA, seed=4)
