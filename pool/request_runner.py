"""The runner of a request: from a validated call to events, run by its method, turned into text, metered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from decoding.artifacts import Artifact
from decoding.calibration import KIND as CALIBRATION
from decoding.contrasted_model import contrasted, load_contrast
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from decoding.thinking import ThinkingWalk
from engine.tracing import spanned
from pool.answers import Answer, new_sequence, resume
from pool.detokenizer import Detokenizer
from pool.prefix_stores import Share, unconfigured
from pool.processors import open_processors
from pool.reasoning import budget_notes
from pool.resume import deliveries
from pool.routing import Routing
from pool.stop_strings import StopStrings
from pool.text import TextTokenizer
from pool.usage import usage_of, with_answer
from pool.validation import PreparedRequest, ResolvedMethod
from turnout.calls import Chunk, Decided, Event, GenerateCall, Regained, Usage
from turnout.cost import Meter
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.tracing import current, header, within
from turnout.types import Segment, Token

if TYPE_CHECKING:
    from pool.call_migration import HandOver

FIRST = 0

log = logging.getLogger(__name__)


_Events = asyncio.Queue[Chunk | Decided | Regained | BaseException | None]


def _noting_artifacts(models: ModelPool, request: Request) -> ModelPool:
    """Note each artifact that a request opens with its version, so that a replaced file shows in its usage.

    Calibrations are left out: their notes say more, see `decoding.calibrated_params`.
    """

    def opened(name: str, artifact: Artifact, version: str) -> None:
        note = f"artifact {name}, version {version}"
        if artifact.kind != CALIBRATION and note not in request.notes:
            request.notes.append(note)

    return replace(models, artifacts=models.artifacts.telling(opened))


def _request_of(prepared: PreparedRequest, answer: Answer, share: Share) -> Request:
    """What methods see of an answer's request."""
    call, contrast = prepared.call, prepared.contrast
    request = Request(call.request_id, answer.sequence, call.tenant, delivered=answer.delivery.tokens, streams=True)
    request.candidates = call.candidates
    if contrast is not None:
        request.contrast = contrast.of_call(call, share)
    return request


@asynccontextmanager
async def _running(plan: ResolvedMethod, request: Request, models: ModelPool) -> AsyncIterator[AsyncIterator[Segment]]:
    """Yield the segments of a method that runs; then all that it used is free."""
    noting = _noting_artifacts(models, request)
    if request.sequence.sampling.processors:
        open_processors(request, plan, noting)
    await load_contrast(request, noting, plan.params)
    with contrasted(request, noting, plan.params) as seen:
        async with aclosing(plan.method.run(request, seen, plan.params)) as segments:  # type: ignore[type-var]
            yield segments


async def _pack(answers: list[Answer], handover: HandOver, put: Callable[[Answer], None] | None) -> Exception | None:
    """Take along what another replica need not compute again of the answers that go on there.

    Args:
        answers: that one run writes.
        handover: takes their caches.
        put: sends the tokens that were appended last, where the answers go on from them; None: they are made again.

    Returns:
        What went wrong, if anything.
    """
    try:
        for answer in answers:
            if not (answer.delivery.finished or answer.ended):
                if put is not None:
                    put(answer)
                await handover.pack(answer.index, answer.sequence, put is not None)
    except Exception as error:
        return error
    return None


def _moved_streams(call: GenerateCall) -> Meter:
    """The work that other replicas did for streams of a call's contrast."""
    meter = Meter()
    if call.moved is not None:
        meter.merge(call.moved.stream_meter)
    return meter


def _end(answer: Answer, queue: _Events) -> None:
    """Send the end of an answer, unless the client has it."""
    if not (answer.ended or answer.delivery.finished):
        queue.put_nowait(answer.last_chunk())


def _release(sequence: Sequence, models: ModelPool) -> None:
    for model in models.models.values():
        model.release(sequence)


def _expire(deadline_s: float, queue: _Events, tasks: list[asyncio.Task[None]]) -> None:
    queue.put_nowait(TurnoutError(Code.DEADLINE_EXCEEDED, f"deadline_s: {deadline_s:g} s have passed", "deadline_s"))
    for task in tasks:
        task.cancel()


def _report(run: RequestRunner, answered: Callable[[RequestRunner], None] | None) -> None:
    """Report that a run is answered; a fault in what follows does not reach the caller."""
    try:
        if answered is not None:
            answered(run)
    except Exception:
        log.exception("request %s: what comes after its answer failed", run.request_id)


class RequestRunner:
    """Runner of a prepared call; iterate `events` once. Leaving the iteration early frees everything.

    What was delivered before is not sent again: the answer continues from it where the method can, else it is made
    again.

    Args:
        prepared: the checked call.
        models: the pool.
        tokenizer: the pool's.
        large: name of the model the cost is compared with.
        routing: decides where the call has no plan yet.
        share: says whose cache the prompt belongs to.
        running: the runs of the pool; this one is among them while it runs.
        answered: called with the run when all of it has been answered.

    Attributes:
        prepared: the call as it runs: as its router decided, where it has one.
        answers: its answers.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        models: ModelPool,
        tokenizer: TextTokenizer,
        large: str,
        routing: Routing | None = None,
        share: Share = unconfigured,
        running: set[RequestRunner] | None = None,
        answered: Callable[[RequestRunner], None] | None = None,
    ) -> None:
        self.request_id = prepared.call.request_id
        self.prepared = prepared
        self._routing = routing
        self._share = share
        self._models = models
        self._tokenizer = tokenizer
        self._large = large
        self._started = time.perf_counter()
        self._first_token_s, self._regained = 0.0, False
        self._notes = budget_notes(prepared.call, prepared.thinking)
        self._extra: dict[str, Any] = {}
        self._stream_meter = _moved_streams(prepared.call)
        self._running = running if running is not None else set()
        self._answered = answered
        self._tasks: list[asyncio.Task[None]] = []
        self._handover: HandOver | None = None
        self.answers = [
            Answer(each, *self.fresh(each), left, tool_format=prepared.tool_format)
            for each, left in enumerate(deliveries(prepared.call))
        ]

    def fresh(self, index: int) -> tuple[Sequence, StopStrings, Detokenizer, ThinkingWalk | None]:
        """An answer as it is before its first token."""
        return new_sequence(self.prepared, self._tokenizer, self._share, index)

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
            moved = self._handover.moved([answer.sequence.meter for answer in self.answers], self._stream_meter)
            raise Interrupted("the replica has handed the call over", moved)
        usage = self._usage()
        _report(self, self._answered)
        yield usage

    def leave(self, again: bool = False) -> bool:
        """Stop between two tokens: what is there is sent, then `events` raises Interrupted with what to take along.

        Args:
            again: also where the answer would be made again from its start, and not gone on with.

        Returns:
            Whether it does: a call that has no method yet, and an answer that would be made again, stay; so do the
            answers of a joint method that cannot go on from its tokens.
        """
        stays = self.prepared.plan is None or not (self.prepared.continues or (again and not self.prepared.joint))
        if stays or self._handover is not None:
            return False
        from pool.call_migration import HandOver

        self._handover = HandOver(self._models.models)
        for task in self._tasks:
            # Not at once: a task that is cancelled before it began would end without a word.
            asyncio.get_running_loop().call_soon(task.cancel)
        return True

    def _written_with(self, answer: Answer) -> list[Answer]:
        """The answers that the run of one of them writes: a joint method writes all in the run of the first."""
        if not self.prepared.joint:
            return [answer]
        return self.answers if answer.index == FIRST else []

    async def _drive(self, answer: Answer, queue: _Events) -> None:
        """Run the method for one answer, or for all of them where it is joint, and free their memory.

        Puts the chunks into the queue, then None or the error.
        """
        call = self.prepared.call
        request = _request_of(self.prepared, answer, self._share)
        try:
            if answer.index != FIRST:
                # The first answer computes the prompt; the others find its blocks in the pool.
                await self.answers[FIRST].started.wait()
            if self._written_with(answer):
                with within("answer", call.trace, index=answer.index):
                    await self._run(answer, request, queue)
            for each in (written := self._written_with(answer)):
                if len(written) > 1 and not each.delivery.finished:
                    self._put_rest(each, queue)
                _end(each, queue)
            queue.put_nowait(None)
        except asyncio.CancelledError:
            if self._handover is not None:
                put = partial(self._put_rest, queue=queue) if self.prepared.continues else None
                queue.put_nowait(await _pack(self._written_with(answer), self._handover, put))
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
            self._extra = with_answer(self._extra, request.extra, answer.index)
            self._stream_meter.merge(request.stream_meter)
            for each in self._written_with(answer):
                _release(each.sequence, self._models)

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
        written = self._written_with(answer)
        request.answers = tuple(each.sequence for each in written)
        if all(each.sequence.finished or each.delivery.finished for each in written):
            return
        if (span := current()) is not None:
            span.update_name(f"method {plan.method.name}")
            models = spanned(models)
        async with _running(plan, request, models) as segments:
            async for segment in segments:
                into = written[segment.answer]
                if segment.tokens:
                    self._put(into, segment.tokens, queue)
                    answer.started.set()
                if plan.method.joint and into.sequence.finished and into.taken == len(into.sequence.generated):
                    _end(into, queue)

    def _put_rest(self, answer: Answer, queue: _Events) -> None:
        """Send what an answer has beyond its segments."""
        self._put(answer, answer.sequence.generated[answer.taken :], queue)

    async def _resume(self) -> None:
        """Let the answers begin with what was delivered, where their method continues; unpack what was moved."""
        call, plan = self.prepared.call, self.prepared.plan
        assert plan is not None
        self._notes += resume(self.answers, plan.method, self.prepared.continues)
        if call.moved is not None:
            from pool.call_migration import unpack

            found = await unpack(call.moved, self._models.models, [answer.sequence for answer in self.answers])
            self._notes.append(f"moved here with the cache of {found} tokens")

    async def _route(self, first: Answer, queue: _Events) -> ModelPool:
        """Let the router choose for all answers: it reads the prompt of the first one.

        Returns:
            The models for the first answer.
        """
        assert self._routing is not None
        asked, before = self.prepared, first.sequence
        self.prepared, models = await self._routing.route(asked, before, self._models)
        if asked.call.include_decision and self._routing.decision is not None:
            queue.put_nowait(Decided(self._routing.decision.as_json()))
        self._notes += self._routing.notes
        if self.prepared.prompt == asked.prompt:
            for answer in self.answers:
                answer.sequence.sampling = self.prepared.sampling
            return models
        for answer in self.answers:
            answer.sequence, answer.text, answer.spans, answer.walk = self.fresh(answer.index)
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
        left = (self._extra, tuple(self._notes), self._routing, self._stream_meter)
        written = [answer.sequence for answer in self.answers]
        usage = usage_of(self.prepared, written, self._models.models[self._large], seconds, *left)
        return replace(usage, reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers))
