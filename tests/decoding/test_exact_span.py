"""Exact search of a passage's parts: the best of all of them, with one row for each beginning."""

from __future__ import annotations

import math

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.methods.exact_span import passage
from decoding.model import Request
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

TEXTS = [*"abcdefgh ", "", "?", ""]
END, QUESTION, LAST = 9, 10, 11
PASSAGE = "abac dabe fah"


def ids(text: str) -> list[int]:
    return [TEXTS.index(char) for char in text]


def model(seed: int) -> TableModel:
    """Probabilities depend on the two tokens before."""
    table = torch.randn((12, 12, 12), generator=torch.Generator().manual_seed(seed)) * 2
    return TableModel("large", lambda tokens: table[tokens[-2], tokens[-1]], 12)


def begun(value: str = PASSAGE, **sampling: object) -> Sequence:
    asked = {"max_tokens": 99, "structure": Structure(kind="span", value=value), **sampling}
    return Sequence([3, *ids(PASSAGE), QUESTION], SamplingParams.model_validate(asked), 0, (END, LAST))


def logprobs(made: TableModel, seq: Sequence, answer: list[int]) -> list[float]:
    """Of a whole answer's tokens, one by one."""
    prompt = seq.tokens[: seq.num_prompt_tokens]
    rows = (torch.log_softmax(made.next_logits([*prompt, *answer[:place]]), -1) for place in range(len(answer)))
    return [float(row[token]) for row, token in zip(rows, answer, strict=True)]


async def answer(made: TableModel, seq: Sequence, **params: object) -> Request:
    info, request = get_method("exact_span"), Request("r", seq)
    async for segment in info.run(request, pair(made, made, ListText(TEXTS)), info.parse(dict(params))):
        assert segment.tokens
    return request


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_the_answer_is_the_best_of_all_parts(seed: int, normalised: bool) -> None:
    made, seq = model(seed), begun()
    await answer(made, seq, longest=5, normalised=normalised, at_once=4)
    parts = {PASSAGE[i:j] for i in range(len(PASSAGE)) for j in range(i + 1, min(i + 5, len(PASSAGE)) + 1)}

    def score(text: list[int]) -> float:
        return math.fsum(logprobs(made, seq, text)) / (len(text) if normalised else 1)

    best = max(score([*ids(part), end]) for part in parts for end in (END, LAST))
    assert "".join(TEXTS[token] for token in seq.answer) in parts
    assert score(seq.answer) == pytest.approx(best, abs=1e-5)
    assert [token.logprob for token in seq.generated] == pytest.approx(logprobs(made, seq, seq.answer), abs=1e-5)
    assert seq.finish_reason is FinishReason.STOP


async def test_a_row_for_each_beginning_and_nothing_is_left_behind() -> None:
    made, seq = model(1), begun()
    await answer(made, seq, at_once=3)
    assert made.forwards == 1 + len(PASSAGE)
    assert set(made.cached) == {seq}


async def test_parts_fit_the_longest_answer() -> None:
    seq = begun(max_tokens=2)
    await answer(model(2), seq)
    assert len(seq.answer) == 2


def test_the_passage_is_where_the_prompt_holds_it_last() -> None:
    texts = ListText(TEXTS)
    assert passage(begun(), texts) == (1, 1 + len(PASSAGE))
    assert passage(begun("ab"), texts) == (7, 9)
    assert passage(begun("abx"), texts) == (0, 0)
    wide = ListText(["xab", "c", "dx"])
    seq = Sequence([0, 1, 2], SamplingParams(structure=Structure(kind="span", value="bcd")), 0, ())
    assert passage(seq, wide) == (1, 2)  # tokens that lie in it with a part only are left out


async def test_without_a_passage_it_is_plain_and_says_so() -> None:
    seq = begun("nowhere", max_tokens=3)
    request = await answer(model(3), seq)
    assert len(seq.answer) <= 3
    assert "as plain" in request.notes[0]
