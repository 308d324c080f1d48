"""Verbatim evidence for a question in a long document: a sentence found by its first tokens, and where it ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import torch
from pydantic import Field

from decoding.candidates import charge
from decoding.methods.exact_span import cuts_in
from decoding.model import Model, ModelPool, Readout, ReadSpec, TokenText
from decoding.tasks.base import Progress, Task, TaskResult, TaskRun, Text
from turnout.errors import invalid
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.sequence import Sequence

# A blank stands before the first sentence too, as before the others and before what a model writes.
BEFORE, BETWEEN, AFTER = "Text:", "\n\nQuestion: ", "\nSentences of the text above that answer it:"
# What ends a sentence: its mark with what closes after it, before a blank; or the end of a line.
END = re.compile(r"(?:[.!?\u2026][\"'\u201d\u2019)\]]*(?=\s)|[\u3002\uff01\uff1f][\u300d\u300f]*|(?<=\S)(?=\n)|\Z)")
LOGITS = ReadSpec(draw=None, logits=True)
T = TypeVar("T")


class EvidenceParams(MethodParams):
    """Parameters of `evidence`."""

    example: ClassVar = {
        "document": "Rain fell. Then sun.\nAnd rain again!",
        "question": "Why?",
        "count": 2,
        "longest": 9,
    }

    document: Annotated[Text, Field(description="text in which evidence is looked for")]
    question: Annotated[Text, Field(description="what it is evidence for")]
    count: Annotated[int, Field(ge=1, le=32, description="most pieces of evidence, and prefixes that are kept")] = 3
    prefix_tokens: Annotated[int, Field(ge=1, le=64, description="tokens after which a prefix must be enough")] = 16
    longest: Annotated[int, Field(ge=1, le=1024, description="tokens of the longest piece")] = 256


class Evidence(TaskResult):
    """A run of whole sentences of the document."""

    text: str
    begin: Annotated[int, Field(description="of its first character in the document")]
    end: Annotated[int, Field(description="behind its last character")]
    logprob: Annotated[float, Field(description="of the prefix by which it was found, among the document's, in nats")]
    end_logprob: Annotated[float, Field(description="of an end of the answer after it, in nats")]


class EvidenceResult(TaskResult):
    """Evidence, the most probable first."""

    evidence: list[Evidence]
    sentences: Annotated[int, Field(description="of the document, as its tokens can be cut")]
    steps: Annotated[int, Field(description="forwards in which prefixes grew")]


@dataclass(frozen=True, slots=True)
class Prefix:
    """First tokens of some sentences.

    Attributes:
        tokens: they.
        sentences: whose; by number.
        logprob: of the tokens, each among those with which some sentence continues, in nats.
    """

    tokens: tuple[int, ...]
    sentences: tuple[int, ...]
    logprob: float

    def closed(self, texts: Items[tuple[int, ...]], most: int) -> bool:
        """Whether it grows no more: one sentence has it, it is long enough, or a sentence ends with it."""
        length = len(self.tokens)
        return len(self.sentences) == 1 or length >= most or any(len(texts[s]) == length for s in self.sentences)


class FindEvidence(Task):
    """Retrieval without chunks: the model says where in the document its evidence begins and ends.

    Paper #182 (Grounding Language Model in Chunking-Free In-Context Retrieval, CFIC). The document is read once, and
    stays cached for other questions on it. Constrained sentence prefix decoding: only the first tokens of the
    document's sentences are allowed, and the most probable `count` prefixes grow until each belongs to one sentence.
    Skip decoding: the document's own tokens from there on are fed in one forward, and the evidence ends at the end of
    that sentence after which an end of the answer is most probable. The paper trains its model for this; this one is as
    it is.
    """

    params: EvidenceParams
    Params = EvidenceParams
    Result = EvidenceResult
    papers = (182,)

    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> EvidenceResult:
        """See `Task.run`."""
        params = self.params
        if not run.end_ids:
            raise invalid("model", f"{run.model.name!r} has no token that ends an answer, which this task reads")
        question = BETWEEN + params.question + AFTER
        prompt = [*run.begin, *await run.encode(f"{BEFORE} {params.document}{question}")]
        run.check_room("document", len(prompt))  # first: it bounds what is looked at
        document = await asyncio.to_thread(document_in, params.document, prompt, models.tokenizer)
        if not document.starts:
            raise invalid(self.field("document"), "has no sentence that the model's tokens can be cut at")
        more = max(params.longest, params.prefix_tokens, *map(len, document.sentences))
        run.check_room("document", len(prompt), more)
        seq = run.sequence(prompt, max_tokens=more + 1)
        try:
            progress.read(len(prompt))
            reader = Reader(run.model, seq, progress)
            prefixes, steps = await grow(reader, document.sentences, params.count, params.prefix_tokens)
            firsts = [each.sentences[0] for each in prefixes]
            # One after the other: of each, a row of logits for every token is held.
            found = [await skip_to_end(reader, document, first, params.longest) for first in firsts]
        finally:
            run.model.release(seq)
        pieces = []
        for prefix, (last, end_logprob) in zip(prefixes, found, strict=True):
            begin, end = (place - 1 for place in document.characters(prefix.sentences[0], last))
            pieces.append(
                Evidence(
                    text=params.document[begin:end],
                    begin=begin,
                    end=end,
                    logprob=prefix.logprob,
                    end_logprob=end_logprob,
                )
            )
        return EvidenceResult(evidence=pieces, sentences=len(document.starts), steps=steps)


class Document:
    """A document's sentences in the tokens of a prompt: a boundary that no token begins at joins two of them.

    Args:
        text: the document, a blank before it.
        prompt: holds it.
        cuts: of `cuts_in`: by place in the prompt, the byte of the document.

    Attributes:
        starts: place of each sentence's first token.
        ends: place behind its last one.
        sentences: tokens of each.
    """

    def __init__(self, text: str, prompt: Items[int], cuts: dict[int, int]) -> None:
        self._text = text
        places = {cut: place for place, cut in cuts.items()}
        data = text.encode()
        ends = [0, *(found.end() for found in END.finditer(text))]
        bounds = list(dict.fromkeys(accumulate(len(text[a:b].encode()) for a, b in pairwise([0, *ends]))))
        bounds = [bound for bound in bounds if bound in places]
        pairs = [(a, b) for a, b in pairwise(bounds) if data[a:b].strip()]
        self._bytes = [(a, min(b, len(data))) for a, b in pairs]
        self.starts = [places[a] for a, _ in pairs]
        self.ends = [places[b] for _, b in pairs]
        self.sentences = [tuple(prompt[a:b]) for a, b in zip(self.starts, self.ends, strict=True)]
        self.prompt = prompt

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """Where the run of sentences from one to another lies in the text, without blanks around it."""
        data = self._text.encode()
        begin, end = self._bytes[first][0], self._bytes[last][1]
        part = data[begin:end].decode()
        start = len(data[:begin].decode()) + len(part) - len(part.lstrip())
        return start, start + len(part.strip())


def document_in(text: str, prompt: Items[int], texts: TokenText) -> Document:
    """The document of a prompt; takes as long as it has characters."""
    return Document(f" {text}", prompt, cuts_in(list(prompt), f" {text}{BETWEEN}", texts))


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads what may follow a prompt, which stays as it is.

    Attributes:
        model: reads.
        seq: the prompt.
        progress: counts what is read.
    """

    model: Model
    seq: Sequence
    progress: Progress

    async def row(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Logits after tokens behind the prompt."""
        if not tokens:  # not by a twin: those to come share the prompt's blocks
            return _logits(await self.model.extend(self.seq, (), LOGITS))[0]
        with self._twin() as twin:
            [row] = _logits(await self.model.extend(twin, tokens, LOGITS))
        self.progress.read(len(tokens))
        return row

    async def end_logprobs(self, tokens: tuple[int, ...], lengths: Items[int]) -> list[float]:
        """Log-probability of an end, in nats, after first tokens behind the prompt.

        Args:
            tokens: to read.
            lengths: how many of them stand before an end, each at least 1, in ascending order.
        """
        if list(lengths) == [len(tokens)]:
            return [_end_logprob(await self.row(tokens), self.seq)]
        with self._twin() as twin:
            rows = await self.model.extend(twin, tokens, LOGITS, every=True)
        self.progress.read(len(tokens))
        return [_end_logprob(_logits([rows[length]])[0], self.seq) for length in lengths]

    @contextmanager
    def _twin(self) -> Iterator[Sequence]:
        twin = self.model.fork(self.seq)
        try:
            yield twin
        finally:
            charge(self.seq, twin)
            self.model.release(twin)


def _logits(rows: Items[Readout]) -> list[torch.Tensor]:
    return [row.logits.float() for row in rows if row.logits is not None]


async def grow(reader: Reader, sentences: Items[tuple[int, ...]], count: int, most: int) -> tuple[list[Prefix], int]:
    """Let the most probable prefixes of sentences grow until each tells which sentence it is.

    Args:
        reader: of a prompt after which evidence would be written.
        sentences: tokens of each.
        count: prefixes that are kept.
        most: tokens of the longest prefix.

    Returns:
        The prefixes, the most probable first, each of other sentences; and in how many forwards they grew.
    """
    kept, steps = [Prefix((), tuple(range(len(sentences))), 0.0)], 0
    while open_ := [each for each in kept if not each.tokens or not each.closed(sentences, most)]:
        rows = await gathered(reader.row(each.tokens) for each in open_)
        steps += 1
        grown = [longer for each, row in zip(open_, rows, strict=True) for longer in _children(each, row, sentences)]
        closed = [each for each in kept if each not in open_]
        kept = sorted([*closed, *grown], key=lambda each: (-each.logprob, each.sentences))[:count]
    return kept, steps


def _children(prefix: Prefix, logits: torch.Tensor, sentences: Items[tuple[int, ...]]) -> list[Prefix]:
    """The prefix with each next token that a sentence has, their probabilities renormalised."""
    depth, found = len(prefix.tokens), dict[int, list[int]]()
    for each in prefix.sentences:
        found.setdefault(sentences[each][depth], []).append(each)
    allowed = list(found)
    logprobs = logits[allowed].log_softmax(-1).tolist()
    return [
        Prefix((*prefix.tokens, token), tuple(found[token]), prefix.logprob + logprob)
        for token, logprob in zip(allowed, logprobs, strict=True)
    ]


async def skip_to_end(reader: Reader, document: Document, first: int, longest: int) -> tuple[int, float]:
    """The sentence after which an end is most probable, of those from `first` on within `longest` tokens.

    Returns:
        Its number, and the log-probability of an end after it, in nats; the first one where that is too long by itself.
    """
    start = document.starts[first]
    within = [each for each in range(first, len(document.ends)) if document.ends[each] - start <= longest]
    if not within:
        tokens = tuple(document.prompt[start : document.ends[first]])
        return first, (await reader.end_logprobs(tokens, [len(tokens)]))[0]
    lengths = [document.ends[each] - start for each in within]
    logprobs = await reader.end_logprobs(tuple(document.prompt[start : document.ends[within[-1]]]), lengths)
    best = max(range(len(within)), key=lambda place: (logprobs[place], -place))
    return within[best], logprobs[best]


def _end_logprob(logits: torch.Tensor, seq: Sequence) -> float:
    return float(logits.log_softmax(-1)[sorted(seq.end_ids)].logsumexp(-1))


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of work that is done together; the first failure ends all of it, and all has ended when this returns."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


PART = FindEvidence
