"""One call from prompt to events: validated, run by its method, turned into text, metered, cleaned up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from engine.tracing import spanned
from pool.beginning import begin
from pool.detokenizer import Detokenizer
from pool.named_artifacts import naming
from pool.prefix_stores import Share, unconfigured
from pool.resume import Delivery, deliveries, notes_of
from pool.routing import Routing
from pool.stop_strings import StopStrings
from pool.structures import check_answer
from pool.text import TextTokenizer
from pool.usage import token_out, usage_of
from pool.validation import Prepared
from turnout.calls import Chunk, Decided, Event, Regained, Usage
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.tracing import current, header, within
from turnout.types import FinishReason, Token

if TYPE_CHECKING:
    from pool.call_migration import HandOver

FIRST = 0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """One of a call's `n` answers.

    Attributes:
        index: which one.
        sequence: its tokens.
        text: its text, up to a stop string.
        spans: gives each of its tokens its part of the text.
        delivery: what of it is still to be sent.
        started: set once it has a token, or has ended.
        taken: tokens that its method has given.
    """

    index: int
    sequence: Sequence
    text: StopStrings
    spans: Detokenizer
    delivery: Delivery
    started: asyncio.Event = field(default_factory=asyncio.Event)
    taken: int = 0

    def skip(self, token_ids: Iterable[int]) -> None:
        """Take tokens that the client has."""
        for token_id in token_ids:
            self.spans.feed(token_id)

    def take(self, given: tuple[Token, ...]) -> tuple[Token, ...]:
        """Take the next tokens from the method; those that the client does not have."""
        self.taken += len(given)
        tokens = self.delivery.new(given)
        self.skip(token.id for token in given[: len(given) - len(tokens)])
        return tokens

    def chunk(self, tokens: tuple[Token, ...]) -> Chunk:
        """The next tokens, and the text there is by now."""
        text = self.delivery.text(self.text.take())
        return Chunk(self.index, text, tuple(token_out(token, self.spans) for token in tokens))

    def last_chunk(self) -> Chunk:
        """The rest of its text, and why it ended."""
        check_answer(self.sequence)
        reason = self.sequence.finish_reason or FinishReason.LENGTH
        text = self.delivery.text(self.text.take(final=True))
        self.delivery.end()
        return Chunk(self.index, text, (), reason)


_Events = asyncio.Queue[Chunk | Decided | Regained | BaseException | None]


def _release(sequence: Sequence, models: ModelPool) -> None:
    for model in models.models.values():
        model.release(sequence)


def _expire(deadline_s: float, queue: _Events, tasks: list[asyncio.Task[None]]) -> None:
    queue.put_nowait(TurnoutError(Code.DEADLINE_EXCEEDED, f"deadline_s: {deadline_s:g} s have passed", "deadline_s"))
    for task in tasks:
        task.cancel()


def _tell(run: AnswerRun, answered: Callable[[AnswerRun], None] | None) -> None:
    """The caller has its answer, and is told of nothing that comes after it."""
    try:
        if answered is not None:
            answered(run)
    except Exception:
        log.exception("request %s: what comes after its answer failed", run.request_id)


class AnswerRun:
    """Runs a prepared call; iterate `events` once. Leaving the iteration early frees everything.

    What was delivered before is not sent again: the answer goes on from it where the method can, else it is made again.

    Args:
        prepared: the checked call.
        models: the pool.
        tokenizer: the pool's.
        large: name of the model the cost is compared with.
        routing: decides where the call has no plan yet.
        share: says whose cache the prompt belongs to.
        running: the runs of the pool; this one is among them while it runs.
        answered: told of the run when all of it has been answered.

    Attributes:
        prepared: the call as it runs: as its router decided, where it has one.
        answers: its answers.
    """

    def __init__(
        self,
        prepared: Prepared,
        models: ModelPool,
        tokenizer: TextTokenizer,
        large: str,
        routing: Routing | None = None,
        share: Share = unconfigured,
        running: set[AnswerRun] | None = None,
        answered: Callable[[AnswerRun], None] | None = None,
    ) -> None:
        self.request_id = prepared.call.request_id
        self.prepared = prepared
        self._routing = routing
        self._share = share
        self._models = models
        self._tokenizer = tokenizer
        self._large = large
        self._started = time.perf_counter()
        self._first_token_s = 0.0
        self._regained = False
        self._notes: list[str] = []
        self._extra: dict[str, Any] = {}
        self._running = running if running is not None else set()
        self._answered = answered
        self._tasks: list[asyncio.Task[None]] = []
        self._handover: HandOver | None = None
        self.answers = [Answer(each, *self.fresh(each), left) for each, left in enumerate(deliveries(prepared.call))]

    def fresh(self, index: int) -> tuple[Sequence, StopStrings, Detokenizer]:
        """An answer as it is before its first token."""
        return begin(self.prepared, self._tokenizer, self._share, index)

    async def events(self) -> AsyncIterator[Event]:
        """Chunks as they come, then the usage.

        The deadline counts from when the run was made, and holds however slowly the events are taken: work ends and
        memory is given back when it passes.

        Raises:
            TurnoutError: DEADLINE_EXCEEDED; CANCELLED when the pool is closed meanwhile; INTERNAL when an answer is not
                the one that was delivered in part; Interrupted after `leave`.
        """
        queue: _Events = asyncio.Queue()
        tasks = self._tasks = [asyncio.create_task(self._drive(answer, queue)) for answer in self.answers]
        self._running.add(self)
        deadline_s = self.prepared.call.deadline_s
        loop = asyncio.get_running_loop()
        timer = None
        if deadline_s is not None:
            left_s = deadline_s - (time.perf_counter() - self._started)
            timer = loop.call_later(left_s, _expire, deadline_s, queue, tasks)
        open_answers = len(tasks)
        try:
            while open_answers:
                item = await queue.get()
                if item is None:
                    open_answers -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self._running.discard(self)
            if timer is not None:
                timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._handover is not None and self._handover.packed:
            moved = self._handover.moved([answer.sequence.meter for answer in self.answers])
            raise Interrupted("the replica has handed the call over", moved)
        usage = self._usage()
        _tell(self, self._answered)
        yield usage

    def leave(self, again: bool = False) -> bool:
        """Stop between two tokens: what is there is sent, then `events` raises Interrupted with what to take along.

        Args:
            again: also where the answer would be made again from its start, and not gone on with.

        Returns:
            Whether it does: a call that has no method yet, and an answer that would be made again, stay.
        """
        plan = self.prepared.plan
        if self._handover is not None or plan is None or not (again or self._continues):
            return False
        from pool.call_migration import HandOver

        self._handover = HandOver(self._models.models)
        for task in self._tasks:
            # Not at once: a task that is cancelled before it began would end without a word.
            asyncio.get_running_loop().call_soon(task.cancel)
        return True

    @property
    def _continues(self) -> bool:
        """Whether answers go on from their first tokens."""
        plan = self.prepared.plan
        return plan is not None and plan.method.continues(plan.params, self.prepared.sampling.greedy)

    async def _drive(self, answer: Answer, queue: _Events) -> None:
        """Run one answer's method; its chunks go into the queue, then None (or the error). Frees its memory."""
        call = self.prepared.call
        request = Request(call.request_id, answer.sequence, call.tenant, delivered=answer.delivery.tokens)
        try:
            if answer.index != FIRST:
                # The first answer computes the prompt; the others find its blocks in the pool.
                await self.answers[FIRST].started.wait()
            with within("answer", call.trace, index=answer.index):
                await self._run(answer, request, queue)
            if not answer.delivery.finished:
                queue.put_nowait(answer.last_chunk())
            queue.put_nowait(None)
        except asyncio.CancelledError:
            if self._handover is not None:
                queue.put_nowait(await self._pack(answer, self._handover, queue))
                return
            # Read only if it was not the caller who gave up.
            queue.put_nowait(TurnoutError(Code.CANCELLED, "the pool was closed while it answered"))
            raise
        except BaseException as error:
            queue.put_nowait(error)
        finally:
            answer.started.set()
            if self.prepared.plan is not None:
                request.notes += self.prepared.plan.notes
            self._notes += [note for note in request.notes if note not in self._notes]
            self._extra.update(request.extra)
            _release(answer.sequence, self._models)

    async def _run(self, answer: Answer, request: Request, queue: _Events) -> None:
        models = self._models
        if self.prepared.plan is None:
            if answer.index != FIRST:
                return  # routing has failed, and the whole call with it
            with within("route", header()):
                models = await self._route(answer, queue)
        if answer.index == FIRST:
            await self._resume()
        request.sequence = answer.sequence
        plan = self.prepared.plan
        assert plan is not None
        if answer.sequence.finished or answer.delivery.finished:
            return
        if (span := current()) is not None:
            span.update_name(f"method {plan.method.name}")
            models = spanned(models)
        models = naming(models, request)
        async with aclosing(plan.method.run(request, models, plan.params)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                if segment.tokens:
                    self._put(answer, segment.tokens, queue)
                    answer.started.set()

    async def _resume(self) -> None:
        """Let the answers begin with what was delivered, where their method goes on from there; take over what came."""
        call = self.prepared.call
        begun = [answer for answer in self.answers if answer.delivery]
        for answer in begun:
            if self._continues or answer.delivery.finished:
                answer.delivery.resume(answer.sequence)
                answer.skip(answer.delivery.tokens)
                answer.taken = answer.delivery.count
        self._notes += notes_of([answer.delivery for answer in begun], self._continues)
        if call.moved is not None:
            from pool.call_migration import unpack

            found = await unpack(call.moved, self._models.models, [answer.sequence for answer in self.answers])
            self._notes.append(f"moved here with the cache of {found} tokens")

    async def _pack(self, answer: Answer, handover: HandOver, queue: _Events) -> Exception | None:
        """Send the tokens that were appended last, and take along what another replica need not do again.

        Returns:
            What went wrong, if anything.
        """
        if answer.delivery.finished:
            return None
        continues = self._continues
        try:
            if continues:
                self._put(answer, answer.sequence.generated[answer.taken :], queue)
            await handover.pack(answer.index, answer.sequence, continues)
        except Exception as error:
            return error
        return None

    async def _route(self, first: Answer, queue: _Events) -> ModelPool:
        """Let the router choose for all answers: it reads the prompt of the first one.

        Returns:
            The models for the first answer.
        """
        assert self._routing is not None
        asked, before = self.prepared, first.sequence
        self.prepared, models = await self._routing.route(asked, before, self._models)
        if asked.call.tells_decision and self._routing.decision is not None:
            queue.put_nowait(Decided(self._routing.decision.as_json()))
        self._notes += self._routing.notes
        if self.prepared.prompt == asked.prompt:
            for answer in self.answers:
                answer.sequence.sampling = self.prepared.sampling
            return models
        for answer in self.answers:
            answer.sequence, answer.text, answer.spans = self.fresh(answer.index)
        first.sequence.meter = before.meter
        _release(before, self._models)
        return self._models

    def _put(self, answer: Answer, given: Iterable[Token], queue: _Events) -> None:
        """Send the next tokens of an answer, those left out that the client has; of these, only that there are some."""
        given = tuple(given)
        tokens = answer.take(given)
        if not tokens:
            if given and not self._regained:
                self._regained = True
                queue.put_nowait(Regained())
            return
        if not self._first_token_s:
            self._first_token_s = time.perf_counter() - self._started
        queue.put_nowait(answer.chunk(tokens))

    def _usage(self) -> Usage:
        seconds = (self._first_token_s, time.perf_counter() - self._started)
        sequences = [answer.sequence for answer in self.answers]
        large = self._models.models[self._large]
        return usage_of(self.prepared, sequences, large, seconds, self._extra, tuple(self._notes), self._routing)
