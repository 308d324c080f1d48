"""One call from prompt to events: validated, run by its method, turned into text, metered, cleaned up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from decoding.calibration import RAN
from decoding.drift import DRIFT
from decoding.model import ModelPool, Request
from decoding.noise import derive_seed
from decoding.sequence import Sequence
from engine.prepare import Prepared
from engine.routing import Routing
from engine.sharing import Share, private
from engine.text import Detokenizer, StopStrings, TextTokenizer
from turnout.calls import Chunk, Event, TokenOut, Usage
from turnout.cost import Meter, report
from turnout.errors import Code, TurnoutError
from turnout.types import FinishReason, SamplingParams, Segment, Token

FIRST = 0


@dataclass(slots=True)
class Answer:
    """One of a call's `n` answers."""

    index: int
    sequence: Sequence
    text: StopStrings
    started: asyncio.Event = field(default_factory=asyncio.Event)


_Events = asyncio.Queue[Chunk | BaseException | None]


def _expire(deadline_s: float, queue: _Events, tasks: list[asyncio.Task[None]]) -> None:
    queue.put_nowait(TurnoutError(Code.DEADLINE_EXCEEDED, f"deadline_s: {deadline_s:g} s have passed", "deadline_s"))
    for task in tasks:
        task.cancel()


class AnswerRun:
    """Runs a prepared call; iterate `events` once. Leaving the iteration early frees everything.

    Args:
        prepared: the checked call.
        models: the pool.
        tokenizer: the pool's.
        large: name of the model the cost is compared with.
        routing: decides where the call has no plan yet.
        share: says whose cache the prompt belongs to.
    """

    def __init__(
        self,
        prepared: Prepared,
        models: ModelPool,
        tokenizer: TextTokenizer,
        large: str,
        routing: Routing | None = None,
        share: Share = private,
    ) -> None:
        self._prepared = prepared
        self._routing = routing
        self._share = share
        self._models = models
        self._tokenizer = tokenizer
        self._large = large
        self._started = time.perf_counter()
        self._first_token_s = 0.0
        self._notes: list[str] = []
        self._extra: dict[str, Any] = {}
        self.answers = [Answer(index, *self._begin(index)) for index in range(prepared.call.sampling.n)]

    def _begin(self, index: int) -> tuple[Sequence, StopStrings]:
        prepared = self._prepared
        text = StopStrings(Detokenizer(self._tokenizer, prepared.prompt), prepared.call.sampling.stop)
        seed = derive_seed(prepared.seed, index)
        eos = self._tokenizer.eos_ids
        tenant = prepared.call.tenant
        sharing, lossy = self._share(tenant, prepared.prompt), prepared.call.cache == "lossy"
        sequence = Sequence(prepared.prompt, self._sampling, seed, eos, text, sharing, tenant, lossy)
        return sequence, text

    @property
    def _sampling(self) -> SamplingParams:
        """The call's, with the room there is."""
        return self._prepared.call.sampling.model_copy(update={"max_tokens": self._prepared.max_tokens})

    async def events(self) -> AsyncIterator[Event]:
        """Chunks as they come, then the usage.

        The deadline counts from when the run was made, and holds however slowly the events are taken: work ends and
        memory is given back when it passes.

        Raises:
            TurnoutError: DEADLINE_EXCEEDED; CANCELLED when the pool is closed meanwhile.
        """
        queue: _Events = asyncio.Queue()
        tasks = [asyncio.create_task(self._drive(answer, queue)) for answer in self.answers]
        deadline_s = self._prepared.call.deadline_s
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
            if timer is not None:
                timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        yield self._usage()

    async def _drive(self, answer: Answer, queue: _Events) -> None:
        """Run one answer's method; its chunks go into the queue, then None (or the error). Frees its memory."""
        call = self._prepared.call
        request = Request(call.request_id, answer.sequence, call.tenant)
        try:
            if answer.index != FIRST:
                # The first answer computes the prompt; the others find its blocks in the pool.
                await self.answers[FIRST].started.wait()
            await self._run(answer, request, queue)
            queue.put_nowait(self._last_chunk(answer))
            queue.put_nowait(None)
        except asyncio.CancelledError:
            # Read only if it was not the caller who gave up.
            queue.put_nowait(TurnoutError(Code.CANCELLED, "the pool was closed while it answered"))
            raise
        except BaseException as error:
            queue.put_nowait(error)
        finally:
            answer.started.set()
            plan = self._prepared.plan
            if plan is not None and plan.method.lossless and not plan.method.keeps_law(plan.params):
                request.notes.append(f"not lossless: {plan.method.name} with these parameters has a law of its own")
            self._notes += [note for note in request.notes if note not in self._notes]
            self._extra.update(request.extra)
            self._release(answer.sequence)

    async def _run(self, answer: Answer, request: Request, queue: _Events) -> None:
        models = self._models
        if self._prepared.plan is None:
            if answer.index != FIRST:
                return  # routing has failed, and the whole call with it
            models = await self._route(answer)
        request.sequence = answer.sequence
        plan = self._prepared.plan
        assert plan is not None
        async with aclosing(plan.method.run(request, models, plan.params)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                if segment.tokens:
                    queue.put_nowait(self._chunk(answer, segment))
                    answer.started.set()

    async def _route(self, first: Answer) -> ModelPool:
        """Let the router choose for all answers: it reads the prompt of the first one.

        Returns:
            The models for the first answer.
        """
        assert self._routing is not None
        asked, before = self._prepared, first.sequence
        self._prepared, models = await self._routing.route(asked, before, self._models)
        self._notes += self._routing.notes
        if self._prepared.prompt == asked.prompt:
            for answer in self.answers:
                answer.sequence.sampling = self._sampling
            return models
        for answer in self.answers:
            answer.sequence, answer.text = self._begin(answer.index)
        first.sequence.meter = before.meter
        self._release(before)
        return self._models

    def _release(self, sequence: Sequence) -> None:
        for model in self._models.models.values():
            model.release(sequence)

    def _chunk(self, answer: Answer, segment: Segment) -> Chunk:
        if not self._first_token_s:
            self._first_token_s = time.perf_counter() - self._started
        return Chunk(answer.index, answer.text.take(), tuple(self._token_out(token) for token in segment.tokens))

    def _last_chunk(self, answer: Answer) -> Chunk:
        reason = answer.sequence.finish_reason or FinishReason.LENGTH
        return Chunk(answer.index, answer.text.take(final=True), (), reason)

    def _token_out(self, token: Token) -> TokenOut:
        text = self._tokenizer.text
        top = tuple((other, text(other), logprob) for other, logprob in token.top)
        return TokenOut(token.id, text(token.id), token.source, token.kind, token.logprob, token.entropy_bits, top)

    def _usage(self) -> Usage:
        prepared, plan, meter = self._prepared, self._prepared.plan, Meter()
        assert plan is not None
        for answer in self.answers:
            meter.merge(answer.sequence.meter)
        wall_s = time.perf_counter() - self._started
        large = self._models.models[self._large]
        return Usage(
            prompt_tokens=len(prepared.prompt),
            completion_tokens=sum(len(answer.sequence.generated) for answer in self.answers),
            cached_tokens=max((m.cached_tokens for m in self.answers[FIRST].sequence.meter.models.values()), default=0),
            models=meter.models,
            speculation=meter.speculation,
            switches=meter.switches,
            cost=report(meter, self._large, large.num_parameters, len(prepared.prompt), wall_s, large.step_seconds()),
            method=plan.method.name,
            params={**plan.params.model_dump(mode="json"), **self._extra.get(RAN, {})},
            seed=prepared.seed,
            ttft_s=self._first_token_s,
            wall_s=wall_s,
            notes=tuple(self._notes),
            drift=self._extra.get(DRIFT),
            route=self._routing.shown(prepared.call.explain) if self._routing is not None else None,
        )
