"""A small model watches the reasoning, and ends it when it has converged, got nowhere, or runs in circles."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from decoding.model import ModelPool, Request
from decoding.monitors._questions import ModelQuestions, NumberQuestions, Questions
from decoding.monitors.base import Injection, Monitor
from decoding.repetition import LoopFinder
from decoding.text import TextCodec, codec_of, continuation_ids, text_within
from decoding.thinking import TAIL, Marker, SpecialNames, Thinking, ThinkingWalk, start_after
from turnout.errors import Code, TurnoutError
from turnout.registry import MethodParams
from turnout.types import Segment
from turnout.utf8 import split_complete

WHERE = "method.params.monitor"
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")

PASSING = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)  # no judge can answer now

Text = Annotated[str, Field(min_length=1, max_length=2000)]


class TrimParams(MethodParams):
    """Parameters of `trim`."""

    cues: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
        Field(min_length=1, max_length=32, description="where one thought ends and the next begins"),
    ] = ("\n\nWait", "\n\nBut", "\n\nAlternatively", "\n\nHmm", "\n\nHold on", "\n\nLet me")
    sentences: Annotated[int, Field(ge=1, le=64, description="last sentences of a thought that are looked at")] = 3
    asks: Annotated[
        Literal["small", "number"],
        Field(description="who answers: the small model, or a rule for which the answer is the last number"),
    ] = "small"
    existence: Annotated[Text, Field(description="first question, with {candidate}")] = (
        "\n\nA thought on this ends with:\n{candidate}\n\nDoes it state a final answer? Reply yes or no: "
    )
    equivalence: Annotated[Text, Field(description="second question, with {candidate} and {earlier}")] = (
        "\n\nTwo thoughts on this end with:\n1. {earlier}\n2. {candidate}\n\nDo they state the same answer?"
        " Reply yes or no: "
    )
    agree: Annotated[int, Field(ge=1, le=64, description="answers in a row that equal the one before: converged")] = 2
    send_every: Annotated[int, Field(ge=1, le=4096, description="tokens between two looks")] = 50
    give_up_share: Annotated[
        FiniteFloat, Field(gt=0.0, le=1.0, description="share of the answer's tokens after which thinking gives up")
    ] = 0.75
    give_up_thoughts: Annotated[int, Field(ge=1, le=10_000, description="thoughts after which it gives up")] = 40
    loop_period: Annotated[int, Field(ge=1, le=512, description="longest repeated block looked for, tokens")] = 32
    loop_repeats: Annotated[int, Field(ge=2, le=64, description="times a block stands in a row: a loop")] = 4
    loop_tokens: Annotated[int, Field(ge=2, le=4096, description="least tokens of a whole loop")] = 48
    thinking_start: Annotated[
        str | None,
        Field(
            max_length=64,
            description="text that begins the thinking, at the prompt's end or first in the answer; until it or a cue"
            " stands there, nothing steps in; empty: all of it is thinking; absent: as the pool's `reasoning` finds it",
        ),
    ] = None
    thinking_end: Annotated[
        str | None,
        Field(
            max_length=64,
            description="text that ends the thinking: nothing is watched after it; empty: none; absent: as the pool's"
            " `reasoning` finds it",
        ),
    ] = None
    conclude: Annotated[Text, Field(description="put in once thinking has converged")] = (
        "\n\nThe answer has been confirmed. Final answer: "
    )
    force: Annotated[
        Text | None,
        Field(
            description="put in where thinking gives up or loops; absent: the end of thinking and"
            ' "The best answer so far: "'
        ),
    ] = None


class TrimMonitor(Monitor):
    """Paper #184 (TrimR): overthinking, underthinking and repetition, each ended by words put into the answer.

    Thoughts are split at cues; the last sentences of each are a candidate conclusion. Those that state an answer are
    compared with the one before: enough equal ones in a row, and the thinking has converged. Questions are asked in a
    task of their own, at most one at a time, and what they find applies to the answer as it then is: writing never
    waits. After one intervention, or the end of the thinking, nothing is watched any more. An answer without any
    thinking is left as it is, however long it gets.
    """

    Params = TrimParams
    papers = (184,)
    params: TrimParams

    def begin(self, request: Request, models: ModelPool) -> None:
        """See `Monitor.begin`."""
        params = self.params
        self._request = request
        self._codec = codec = codec_of(models, WHERE)
        self._thinking = _thinking_of(params, request, codec)
        self._conclude = continuation_ids(codec, params.conclude)
        self._force = continuation_ids(codec, _forced(self._thinking) if params.force is None else params.force)
        self._questions: Questions = NumberQuestions()
        if params.asks == "small":
            texts = (params.existence, params.equivalence)
            self._questions = ModelQuestions(models.small, codec, request, *texts)
        self._loops = LoopFinder(params.loop_period, params.loop_repeats, params.loop_tokens)
        self._most = params.give_up_share * request.sequence.sampling.max_tokens
        self._reach = max(map(len, params.cues))
        self._walk = ThinkingWalk(self._thinking, codec) if self._thinking is not None else None
        # An answer that is known to have no thinking is not watched for what might be one.
        self._cues_begin = self._thinking is not request.sequence.thinking or self._thinking is None
        # Of an end without a beginning the walk is inside from the start, and a cue says when there is thinking.
        self._has_begin = self._thinking is not None and bool(self._thinking.begin.text or params.thinking_start == "")
        self._thinks = self._has_begin and self._walk is not None and self._walk.thinks
        self._thought = ""  # text since the last cue
        self._partial = b""  # of a character
        self._thoughts = self._tokens = self._unsent = 0
        self._waiting: list[str] = []
        self._earlier: str | None = None
        self._agreed = 0
        self._found: str | None = None
        self._done = False
        self._missed = ""
        self._task: asyncio.Task[None] | None = None

    def watch(self, segment: Segment) -> None:
        """See `Monitor.watch`."""
        if self._done:
            return
        for token in segment.tokens:
            added, self._partial = split_complete(self._partial + self._codec.token_bytes(token.id))
            self._thought += added
            self._tokens += 1
            fresh = max(len(self._thought) - len(added) - self._reach, 0)
            if self._walk is not None:
                self._walk.feed(token.id)
                self._thinks = self._thinks or (self._has_begin and self._walk.thinks)
                if self._walk.ended:
                    self._done = True
                    return
            self._split(fresh)
            if self._loops.feed(token.id) is not None and self._thinks:
                self._found = self._found or "loop"
        self._unsent += len(segment.tokens)
        if self._unsent >= self.params.send_every and self._waiting and (self._task is None or self._task.done()):
            self._end_of_task()
            self._unsent = 0
            waiting, self._waiting = self._waiting, []
            self._task = asyncio.create_task(self._look(waiting))

    def _split(self, fresh: int) -> None:
        """Close a thought at a cue, which begins the next one; characters before `fresh` hold none but its own."""
        places = [self._thought.find(cue, max(fresh, 1)) for cue in self.params.cues]
        cut = min((place for place in places if place >= 0), default=None)
        if cut is None:
            return
        if self._cues_begin and not self._thinks:
            self._thinks = True
            if self._thinking is not None and self._has_begin:
                self._walk = ThinkingWalk(replace(self._thinking, start="inside"), self._codec)
        thought, self._thought = self._thought[:cut], self._thought[cut:]
        if thought.strip():
            sentences = [each for each in SENTENCE.split(thought) if each.strip()]
            self._waiting.append(" ".join(sentences[-self.params.sentences :]))
            self._thoughts += 1

    async def _look(self, candidates: list[str]) -> None:
        """Compare some thoughts. If no judge can answer now, the answer continues without a comparison."""
        try:
            await self._compare(candidates)
        except TurnoutError as error:
            if error.code not in PASSING:
                raise
            self._missed, self._earlier, self._agreed = error.message, None, 0

    async def _compare(self, candidates: list[str]) -> None:
        """Stage 1: does a thought state an answer; stage 2: is it that of the one before."""
        for candidate in candidates:
            if not await self._questions.states_answer(candidate):
                continue
            equal = self._earlier is not None and await self._questions.equivalent(candidate, self._earlier)
            self._agreed = self._agreed + 1 if equal else 0
            self._earlier = candidate
            if self._agreed >= self.params.agree:
                self._found = self._found or "converged"
                return

    def intervene(self) -> Injection | None:
        """See `Monitor.intervene`."""
        if self._done or not self._thinks:
            return None
        if self._found is None and (self._tokens >= self._most or self._thoughts >= self.params.give_up_thoughts):
            self._found = "given_up"
        return self._end(self._found) if self._found is not None else None

    def again(self, then: Callable[[tuple[int, ...]], bool], ended: bool) -> Injection | None:
        """See `Monitor.again`."""
        if self._done or ended or not self._thinks:
            return None
        if then(self._conclude):
            return self._end("converged")
        return self._end("loop" if self._found == "loop" else "given_up") if then(self._force) else None

    def _end(self, found: str) -> Injection:
        """Words that end the thinking; nothing is watched after them."""
        self._done = True
        self._request.notes.append(f"thinking was ended after {self._tokens} tokens: {found}")
        return Injection(self._conclude if found == "converged" else self._force, found)

    def _end_of_task(self) -> None:
        """Raise what a finished look failed with."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """End a look that is under way; what it was for is over."""
        if self._missed:
            self._request.notes.append(f"not all of the thinking could be looked at: {self._missed}")
        try:
            self._end_of_task()
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            self._questions.close()


def _thinking_of(params: TrimParams, request: Request, codec: TextCodec) -> Thinking | None:
    """Return how the answer's thinking is found: by the parameters' markers, else as everywhere; None: it is not."""
    known, begin, end = request.sequence.thinking, params.thinking_start, params.thinking_end
    if begin is None and end is None:
        return known
    markers = (known.begin, known.end) if known is not None else (Marker("", ()), Marker("", ()))
    first, last = (
        marker if text is None else _marker(text, codec) for marker, text in zip(markers, (begin, end), strict=True)
    )
    tail = text_within(codec, request.sequence.tokens[-TAIL:])
    start = start_after(tail, first.text, last.text) if first.text else "inside"
    return Thinking(first, last, start=start)


def _marker(text: str, codec: TextCodec) -> Marker:
    ids = continuation_ids(codec, text)
    special = len(ids) == 1 and isinstance(codec, SpecialNames) and codec.special_name(ids[0]) == text
    return Marker(text, ids, ids[0] if special else None)


def _forced(thinking: Thinking | None) -> str:
    end = "" if thinking is None else thinking.end.text
    return f"\n{end}\n\nThe best answer so far: " if end else "\n\nThe best answer so far: "


PART = TrimMonitor
