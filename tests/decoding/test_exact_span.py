"""Exact search of a passage's parts: the best of all of them, with one row for each beginning."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch

from decoding.fakes import ListText, TableModel, pair
from decoding.methods import exact_span
from decoding.methods.exact_span import most_probable, passage
from decoding.model import Request
from decoding.sequence import Sequence
from decoding.thinking import Marker, Start, Thinking
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


@pytest.mark.parametrize("at_once", [1, 13])
@pytest.mark.parametrize("rounding", [-1e-4, 1e-4])
async def test_of_the_same_text_in_several_places_the_first_is_found(rounding: float, at_once: int) -> None:
    """Whatever the rows of each say of it: they are read in different company, and rounded differently."""
    logits, read = torch.arange(12) / 4, count()
    made = TableModel("large", lambda _: logits * (1 + rounding * next(read)), 12)
    seq = begun()
    best = await most_probable(made, seq, passage(seq, ListText(TEXTS)), 1, False, at_once)
    assert best is not None
    assert best.text(seq) == ids(" ")
    assert best.begin == 1 + PASSAGE.index(" ")


async def test_parts_fit_the_longest_answer() -> None:
    seq = begun(max_tokens=2)
    await answer(model(2), seq)
    assert len(seq.answer) == 2


def test_the_passage_is_where_the_prompt_holds_it_last() -> None:
    texts = ListText(TEXTS)
    assert passage(begun(), texts) == tuple(range(1, 2 + len(PASSAGE)))
    assert passage(begun("ab"), texts) == (7, 8, 9)
    assert passage(begun("abx"), texts) == ()
    wide = ListText(["xab", "c", "dx"])
    seq = Sequence([0, 1, 2], SamplingParams(structure=Structure(kind="span", value="bcd")), 0, ())
    assert passage(seq, wide) == (1, 2)  # tokens that lie in it with a part only are left out


class ByteText(ListText):
    """Tokens may be parts of characters; the first one is special, and has its name for bytes."""

    def __init__(self, texts: list[bytes]) -> None:
        super().__init__(["", *(text.decode(errors="replace") for text in texts[1:])])
        self.data = texts

    def token_bytes(self, token_id: int) -> bytes:
        return self.data[token_id]


def test_parts_are_of_whole_characters_and_of_text() -> None:
    texts = ByteText([b"<x>", b"a", b"\xc3", b"\xa4", b"\xa4b"])

    def places(value: str, *prompt: int) -> tuple[int, ...]:
        return passage(
            Sequence(list(prompt), SamplingParams(structure=Structure(kind="span", value=value)), 0, ()), texts
        )

    assert places("a\u00e4a", 1, 2, 3, 1) == (0, 1, 3, 4)
    assert places("\u00e4b", 1, 2, 4, 1) == (1, 3)
    assert places("a\u00e4", 1, 2, 4) == (0, 1)  # its last token reaches beyond it
    assert places("a<x>", 1, 0) == ()


async def test_the_work_is_counted_and_few_rows_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seq = model(1), begun()
    monkeypatch.setattr(exact_span, "MOST_ROWS", 12)
    batches: list[int] = []
    fork_many = made.fork_many
    made.fork_many = lambda seqs: batches.append(len(seqs)) or fork_many(seqs)  # type: ignore[func-returns-value, method-assign]
    await answer(made, seq, longest=3, at_once=16)
    assert seq.meter.models["large"].forwards == made.forwards == 1 + len(PASSAGE)
    assert set(batches[:-1]) == {3}
    assert sum(batches) == len(PASSAGE)


async def test_what_a_request_reports_of_tokens_is_there() -> None:
    made, seq, other = model(4), begun(logprobs=2, token_details=True), begun()
    await answer(made, seq)
    await answer(made, other)
    assert seq.answer == other.answer
    assert [token.logprob for token in seq.generated] == pytest.approx([token.logprob for token in other.generated])
    assert all(len(token.top) == 2 and token.entropy_bits is not None for token in seq.generated)


async def test_a_stop_ends_the_answer_and_what_is_sent() -> None:
    made, whole, cut = model(1), begun(), begun(max_tokens=99)
    await answer(made, whole)

    class First:
        def feed(self, token: int) -> bool:
            return True

        def clone(self) -> First:
            return self

    cut.stop = First()  # type: ignore[assignment]
    info, sent = get_method("exact_span"), []
    async for segment in info.run(Request("r", cut), pair(made, made, ListText(TEXTS)), info.parse({})):
        sent += [token.id for token in segment.tokens]
    assert sent == cut.answer == whole.answer[:1]


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"min_tokens": 2}])
async def test_what_it_cannot_heed_is_plain_and_says_so(sampling: dict[str, object]) -> None:
    request = await answer(model(3), begun(**{"max_tokens": 3, **sampling}))
    assert "as plain" in request.notes[0]


@pytest.mark.parametrize(("start", "noted"), [("inside", True), ("open", False), ("closed", False)])
async def test_an_answer_that_has_to_think_first_is_plain(start: Start, noted: bool) -> None:
    seq = begun(max_tokens=3)
    seq.thinking = Thinking(Marker("<", (4,)), Marker(">", (5,)), start=start)
    request = await answer(model(3), seq)
    assert any("think" in note for note in request.notes) == noted


async def test_without_a_passage_it_is_plain_and_says_so() -> None:
    seq = begun("nowhere", max_tokens=3)
    request = await answer(model(3), seq)
    assert len(seq.answer) <= 3
    assert "as plain" in request.notes[0]
