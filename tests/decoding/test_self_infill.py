"""Self-infilling on a toy language: the order of the phases, what joins them, and where it is plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.model import MEASURES, Request
from decoding.sequence import Sequence
from decoding.thinking import Marker, Thinking
from tests.constrained import char_compiler
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

TEXTS = ["<end>", "<pre>", "<suf>", "<mid>", "a", "b", "return", "x", "y", "\n", "ask "]
END, PRE, SUF, MID, A, B, RETURN, X, Y, LINE, ASK = range(len(TEXTS))
MARKS: dict[str, Any] = {"prefix_mark": "<pre>", "suffix_mark": "<suf>", "middle_mark": "<mid>"}
MARKER = Marker("think", (X,))
Next = Callable[[list[int]], int | None]


class Codec(ListText):
    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [TEXTS.index(text)] if text in TEXTS else [] if not text else [A] * 2


def large(follows: Next, seen: list[list[int]] | None = None) -> TableModel:
    """Writes what a rule says with probability of nearly 1; where it says nothing, each token is as probable."""

    def logits(tokens: list[int]) -> torch.Tensor:
        if seen is not None:
            seen.append(list(tokens))
        token = follows(tokens)
        return (
            torch.zeros(len(TEXTS))
            if token is None
            else torch.full((len(TEXTS),), -20.0).index_fill(0, torch.tensor(token), 0.0)
        )

    return TableModel("large", logits, len(TEXTS), num_parameters=10)


def scripted(tokens: list[int]) -> int | None:
    """`a`, then unsure; after the suffix's mark `return x`; in the middle `b b`."""
    if MID in tokens:
        return (B, B, END)[len(tokens) - tokens.index(MID) - 1]
    if SUF in tokens:
        return X if tokens[-1] == RETURN else MID
    if RETURN in tokens:
        return END if tokens[-1] == Y else Y
    return {ASK: A}.get(tokens[-1], RETURN if PRE not in tokens else None)


async def write(
    model: TableModel, method: str = "self_infill", prompt: tuple[int, ...] = (ASK,),
    sampling: dict[str, Any] | None = None, seq: Sequence | None = None, **params: Any,
) -> Request:  # fmt: skip
    info = get_method(method)
    seq = seq or Sequence(
        prompt, SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **(sampling or {})}), 5, (END,)
    )
    request = Request("r", seq)
    async for _ in info.run(request, pair(model, model, Codec(TEXTS)), info.parse(params)):
        pass
    model.release(seq)
    assert not model.cached, "a context was not released"
    return request


def measured(request: Request) -> tuple[int, int, int]:
    """Middles that joined, and that were tried; loops."""
    joined, tried, loops = (
        int(request.extra[MEASURES][f"self_infill_{name}"]) for name in ("joined", "tried", "loops")
    )
    return joined, tried, loops


async def test_beginning_end_and_middle_are_written_in_this_order_and_joined() -> None:
    seen: list[list[int]] = []
    found = await write(large(scripted, seen), **MARKS, loops=0)
    assert found.sequence.answer == [A, B, B, RETURN, X, END]
    assert measured(found) == (1, 1, 0)
    assert found.sequence.finish_reason is FinishReason.STOP
    orders = [[token for token in each if token in (PRE, SUF, MID)] for each in seen]
    assert orders == sorted(orders)
    assert set(map(tuple, orders)) == {(PRE,), (PRE, SUF), (PRE, SUF, MID)}


async def test_a_loop_writes_the_end_anew_and_then_the_rest() -> None:
    seen: list[list[int]] = []
    found = await write(large(scripted, seen), **MARKS, loops=1)
    assert [ASK, A, B, B, RETURN] in seen, "the end is written after beginning and middle, without marks"
    assert [ASK, A, B, B, RETURN, Y] in seen
    assert [PRE, ASK, SUF, RETURN] in seen, "and then all that is before it"
    assert found.sequence.answer == [B, B, RETURN, X, END]
    assert measured(found) == (2, 2, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_with_tau_0_it_is_plain_decoding_without_marks(temperature: float) -> None:
    table = torch.randn((len(TEXTS), len(TEXTS)), generator=torch.Generator().manual_seed(3))
    model = TableModel("large", lambda tokens: table[tokens[-1]], len(TEXTS), num_parameters=10)
    asked = {"temperature": temperature}
    barred = {**asked, "bad_word_ids": ((PRE,), (SUF,), (MID,))}
    found = await write(model, sampling=asked, **MARKS, tau=0.0, loops=0)
    plain = await write(model, "plain", (PRE, ASK), barred)
    assert found.sequence.answer == plain.sequence.answer
    assert measured(found)[:2] == (0, 0)


async def test_a_middle_that_does_not_join_is_left_out() -> None:
    def follows(tokens: list[int]) -> int | None:
        if MID in tokens:
            return B  # for ever
        return (
            END
            if MID not in tokens and tokens[-1] == Y
            else Y
            if tokens[-1] == A and tokens.count(A) > 1
            else (scripted(tokens) if tokens[-1] != A or SUF in tokens else None)
        )

    found = await write(large(follows), **MARKS, loops=0)
    assert measured(found)[:2] == (0, 1)
    assert found.sequence.answer[0] == A
    assert RETURN not in found.sequence.answer, "it was continued from left to right"


async def test_an_end_that_has_begun_is_not_interrupted() -> None:
    """After `return` on the same line the model is unsure of everything, and yet continues."""

    def follows(tokens: list[int]) -> int | None:
        return {ASK: RETURN}.get(tokens[-1])

    found = await write(large(follows), sampling={"max_tokens": 3}, **MARKS, loops=0)
    assert measured(found)[:2] == (0, 0)
    assert found.sequence.answer[0] == RETURN


async def test_marks_are_in_no_answer_and_lengths_are_kept() -> None:
    table = torch.randn((len(TEXTS), len(TEXTS)), generator=torch.Generator().manual_seed(4)) * 2
    table[:, [PRE, SUF, MID]] += 3.0
    model = TableModel("large", lambda tokens: table[tokens[-1]], len(TEXTS), num_parameters=10)
    for most in (1, 2, 3, 5, 12):
        asked = {"temperature": 1.0, "max_tokens": most}
        found = await write(model, sampling=asked, **MARKS, tau=0.9, loops=2, suffix_tokens=3)
        assert not {PRE, SUF, MID} & set(found.sequence.answer)
        assert 1 <= len(found.sequence.answer) <= most
        [meter] = found.sequence.meter.models.values()
        assert meter.generated_tokens == len(found.sequence.answer)


async def test_interrupts_at_random_are_fewer() -> None:
    """At a probability of tau half of the places count; below it more."""

    def tried(request: Request) -> int:
        return measured(request)[1]

    def even(tokens: list[int]) -> int | None:
        return END if len(tokens) > 12 else None

    always = [tried(await write(large(even), **MARKS, loops=0, tau=0.1, sampling={"temperature": 1.0}))]
    never = [tried(await write(large(even), **MARKS, loops=0, tau=0.05, sampling={"temperature": 1.0}, at_random=True))]
    assert (always, never) == ([1], [0])


async def test_a_tokenizer_without_a_mark_is_refused() -> None:
    with pytest.raises(TurnoutError, match=r"method\.params\.prefix_mark: must be one token"):
        await write(large(scripted))


async def test_an_answer_without_an_end_or_with_a_structure_is_plain_and_says_so() -> None:
    found = await write(large(scripted), sampling={"ignore_eos": True, "max_tokens": 3}, **MARKS)
    assert found.notes == ["self_infill: as plain, for no token ends the answer"]
    compiler = char_compiler()
    info, seq = get_method("self_infill"), Sequence([2], SamplingParams(max_tokens=3), 5, (1,))
    seq.constraint = compiler.compile(Structure(kind="regex", value="ab"))
    request, model = Request("r", seq), TableModel("large", lambda tokens: torch.zeros(40), 40)
    async for _ in info.run(request, pair(model, model), info.parse({})):
        pass
    assert seq.answer == [2, 3, 1]
    assert request.notes == ["self_infill: as plain, for a structure is written from left to right"]


@pytest.mark.parametrize(
    ("sampling", "thinking", "why"),
    [
        ({"min_tokens": 2}, None, "min_tokens is of an answer in one part"),
        ({"logprobs": 1}, None, "tokens that are put in have no log-probability"),
        ({}, "open", "the model may think before it answers"),
        ({}, "inside", "the model may think before it answers"),
    ],
)
async def test_what_parts_cannot_keep_is_answered_as_plain(sampling: dict[str, Any], thinking: Any, why: str) -> None:
    def asked() -> Sequence:
        made = Sequence((ASK,), SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **sampling}), 5, (END,))
        made.thinking = Thinking(MARKER, MARKER, start=thinking) if thinking else None
        return made

    found = await write(large(scripted), seq=asked(), **MARKS)
    plain = await write(large(scripted), "plain", seq=asked())
    assert found.notes == [f"self_infill: as plain, for {why}"]
    assert found.sequence.generated == plain.sequence.generated


async def test_an_answer_after_thinking_is_written_in_parts() -> None:
    seq = Sequence((ASK,), SamplingParams(max_tokens=20, temperature=0.0), 5, (END,))
    seq.thinking = Thinking(MARKER, MARKER, start="closed")
    assert (await write(large(scripted), seq=seq, **MARKS, loops=0)).sequence.answer == [A, B, B, RETURN, X, END]


BAD: list[dict[str, Any]] = [
    {"tau": 1.5}, {"tau": float("nan")}, {"loops": -1}, {"loops": 99}, {"suffix_prompt": ""}, {"suffix_tokens": 0},
    {"prefix_mark": ""},
]  # fmt: skip


@pytest.mark.parametrize("params", BAD)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(TurnoutError, match=next(iter(params))):
        get_method("self_infill").parse(params)
