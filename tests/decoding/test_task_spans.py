"""Verbatim answers and evidence: the best part of a passage, and sentences found by their first tokens."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel
from decoding.methods.exact_span import cuts_in
from decoding.model import Request
from decoding.sequence import Sequence
from decoding.tasks import evidence as task
from decoding.tasks.base import Progress
from decoding.tasks.evidence import AFTER, BEFORE, BETWEEN, Document, EvidenceResult
from decoding.tasks.exact_span import ExactSpanResult
from tests.decoding.task_runs import BEGIN, END, TEXTS, VOCAB, byte_model, models_of, result_of
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import SamplingParams

PASSAGE = "Gr\u00fc\u00dfe. Rain fell on May 4."
DOCUMENT = "Rain fell. It was May. Two came!\nThree \u00fcber 3.5 hours. Nothing else"
SENTENCES = ["Rain fell.", "It was May.", "Two came!", "Three \u00fcber 3.5 hours.", "Nothing else"]


async def span(model: TableModel, progress: Progress | None = None, **params: Any) -> ExactSpanResult:
    found = await result_of("exact_span", model, progress, **{"passage": PASSAGE, "question": "When?", **params})
    assert isinstance(found, ExactSpanResult)
    return found


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_the_span_is_that_of_the_method(seed: int, normalised: bool) -> None:
    """The same search, so that the same prompt with the structure `span` has the same answer."""
    model = byte_model(seed)
    found = await span(model, longest=6, normalised=normalised)
    prompt = [BEGIN, *f"Passage: {PASSAGE}\nQuestion: When?\nAnswer:".encode()]
    sampling = SamplingParams(max_tokens=7, structure=Structure(kind="span", value=PASSAGE))
    seq, info = Sequence(prompt, sampling, 0, {END}), get_method("exact_span")
    params = info.parse({"longest": 6, "normalised": normalised})
    async for _ in info.run(Request("r", seq), models_of(model), params):
        pass
    assert (
        bytes(token for token in seq.answer if token != END).decode() == found.text == PASSAGE[found.begin : found.end]
    )
    assert found.tokens == len(found.text.encode())
    assert found.logprob == pytest.approx(sum(token.logprob or 0.0 for token in seq.generated))
    assert found.score == pytest.approx(found.logprob / (found.tokens + 1) if normalised else found.logprob)


async def test_read_tokens_of_a_span_are_counted() -> None:
    """The prompt once, and from each beginning the tokens of the longest part that ends with a whole character."""
    model, progress = byte_model(1), Progress()
    await span(model, progress, longest=5)
    data = PASSAGE.encode()
    cuts = [place for place in range(len(data) + 1) if not 0x80 <= (data + b".")[place] < 0xC0]
    after = sum(max(end for end in cuts if 0 <= end - begin <= 5) - begin for begin in cuts)
    assert progress.prompt_tokens == 1 + len(f"Passage: {PASSAGE}\nQuestion: When?\nAnswer:".encode()) + after


def whole_prompt(document: str, question: str) -> list[int]:
    return [BEGIN, *f"{BEFORE} {document}{BETWEEN}{question}{AFTER}".encode()]


def document_of(text: str) -> Document:
    prompt = whole_prompt(text, "Why?")
    return Document(f" {text}", prompt, cuts_in(prompt, f" {text}{BETWEEN}", TEXTS))


def test_sentences_are_cut_at_marks_before_blanks_and_at_ends_of_lines() -> None:
    found = document_of(DOCUMENT)
    assert [bytes(each).decode().strip() for each in found.sentences] == SENTENCES
    joined = b"".join(map(bytes, found.sentences)).decode()
    assert joined == f" {DOCUMENT}"
    for first in range(5):
        for last in range(first, 5):
            begin, end = found.characters(first, last)
            assert f" {DOCUMENT}"[begin:end].startswith(SENTENCES[first])
            assert f" {DOCUMENT}"[begin:end].endswith(SENTENCES[last])
    assert [bytes(each).decode() for each in document_of("\u4e00\u3002\u4e8c\uff01").sentences] == [
        " \u4e00\u3002",
        "\u4e8c\uff01",
    ]


async def evidence(model: TableModel, progress: Progress | None = None, **params: Any) -> EvidenceResult:
    asked = {"document": DOCUMENT, "question": "Why?", **params}
    found = await result_of("evidence", model, progress, **asked)
    assert isinstance(found, EvidenceResult)
    return found


@pytest.mark.parametrize("seed", range(5))
async def test_evidence_is_a_run_of_whole_sentences_and_ends_where_an_end_is_most_probable(seed: int) -> None:
    model, longest = byte_model(seed), 40
    found = await evidence(model, count=5, longest=longest)
    assert found.sentences == 5
    assert len({each.begin for each in found.evidence}) == len(found.evidence)
    document, prompt = document_of(DOCUMENT), whole_prompt(DOCUMENT, "Why?")
    for each in found.evidence:
        assert DOCUMENT[each.begin : each.end] == each.text
        first = next(n for n, sentence in enumerate(SENTENCES) if each.text.startswith(sentence))
        ends = {}
        for last in range(first, 5):
            read = [token for sentence in document.sentences[first : last + 1] for token in sentence]
            if len(read) <= longest:
                logprobs = torch.log_softmax(model.next_logits([*prompt, *read]), -1)
                ends[last] = float(logprobs[END])
        best = max(ends, key=ends.__getitem__)
        begin, end = document.characters(first, best)
        assert (each.begin, each.end) == (begin - 1, end - 1)
        assert each.end_logprob == pytest.approx(ends[best], abs=1e-5)


async def test_the_prefix_is_the_most_probable_of_those_that_the_document_has() -> None:
    """With all prefixes kept, each has the probability of its tokens among those that the trie allows."""
    model, prompt = byte_model(2), whole_prompt(DOCUMENT, "Why?")
    sentences = document_of(DOCUMENT).sentences
    expected = {}
    for number, sentence in enumerate(sentences):
        logprob, shared = 0.0, set(range(len(sentences)))
        for depth, token in enumerate(sentence):
            if len(shared) == 1 and depth:
                break
            allowed = sorted({sentences[each][depth] for each in shared})
            row = model.next_logits([*prompt, *sentence[:depth]])[allowed].log_softmax(-1)
            logprob += float(row[allowed.index(token)])
            shared = {each for each in shared if sentences[each][depth] == token}
        expected[SENTENCES[number]] = logprob
    found = await evidence(model, count=32, longest=12)
    by_text = {each.text: each.logprob for each in found.evidence if each.text in expected}
    assert by_text == {text: pytest.approx(expected[text], abs=1e-5) for text in by_text}
    assert math.fsum(math.exp(each.logprob) for each in found.evidence) == pytest.approx(1.0, abs=1e-5)
    assert [each.logprob for each in found.evidence] == sorted((e.logprob for e in found.evidence), reverse=True)


async def test_where_first_tokens_differ_a_sentence_is_found_in_one_step() -> None:
    """The first one begins with the blank before the document, the others with their letters."""
    table = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(0))
    model = TableModel("large", lambda tokens: table[tokens[-1]], VOCAB)
    progress = Progress()
    found = await evidence(model, progress, document="a.\u3002b.\u3002c.\u3002", count=1, longest=4)
    assert found.steps == 1
    assert len(found.evidence) == 1
    # One forward for the prompt and the prefix, one for the end.
    assert model.forwards == 2
    assert progress.prompt_tokens == model.fed_tokens


async def test_a_sentence_longer_than_the_longest_piece_is_evidence_by_itself() -> None:
    found = await evidence(byte_model(0), document="A sentence that is rather long.", longest=5, count=1)
    assert [each.text for each in found.evidence] == ["A sentence that is rather long."]


async def test_sentences_that_begin_alike_are_told_apart_or_the_first_is_taken() -> None:
    found = await evidence(byte_model(0), document="One two. One two. One ten.", count=3, prefix_tokens=6)
    assert {each.begin for each in found.evidence} <= {0, 9, 18}


@pytest.mark.parametrize(
    ("task", "params", "field", "code"),
    [
        ("evidence", {"document": ""}, "params.document", Code.INVALID_ARGUMENT),
        ("evidence", {"document": " \n "}, "params.document", Code.INVALID_ARGUMENT),
        ("evidence", {"question": ""}, "params.question", Code.INVALID_ARGUMENT),
        ("evidence", {"count": 0}, "params.count", Code.INVALID_ARGUMENT),
        ("evidence", {"longest": 10**9}, "params.longest", Code.INVALID_ARGUMENT),
        ("evidence", {"document": "a" * 300}, "params.document", Code.OUT_OF_RANGE),
        ("exact_span", {"passage": ""}, "params.passage", Code.INVALID_ARGUMENT),
        ("exact_span", {"at_once": -1}, "params.at_once", Code.INVALID_ARGUMENT),
        ("exact_span", {"passage": "a" * 300}, "params.passage", Code.OUT_OF_RANGE),
    ],
)
async def test_parameters_are_refused_by_name(task: str, params: dict[str, Any], field: str, code: Code) -> None:
    model = byte_model(0)
    model.max_length = 300
    asked = {"evidence": {"document": "a", "question": "b"}, "exact_span": {"passage": "a", "question": "b"}}[task]
    with pytest.raises(TurnoutError) as refused:
        await result_of(task, model, **{**asked, **params})
    assert (refused.value.code, refused.value.field) == (code, field)


async def test_a_document_that_is_too_long_is_refused_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "document_in", lambda *args: pytest.fail("it was cut"))
    model = byte_model(1)
    model.max_length = 200
    with pytest.raises(TurnoutError) as refused:
        await result_of("evidence", model, document="Rain. " * 50, question="Why?")
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "params.document")


async def test_rows_of_one_piece_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits after every token of a piece are many: 32 pieces of 1024 tokens would take gigabytes."""
    model, held = byte_model(1), list[bool]()
    extend = model.extend

    async def counted(seq: Any, tokens: Any = (), want: Any = None, every: bool = False) -> Any:
        held.append(every)
        try:
            await asyncio.sleep(0)
            assert sum(held) <= 1
            return await extend(seq, tokens, want, every)
        finally:
            held.remove(every)

    monkeypatch.setattr(model, "extend", counted)
    found = await result_of("evidence", model, document=DOCUMENT, question="Why?", count=3)
    assert isinstance(found, EvidenceResult)
    assert len(found.evidence) == 3
