"""Models as methods over texts see them: each answers a call alone, with chunks and its own usage."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from decoding.noise import derive_seed
from pool.endpoints.answer_reader import AnswerReader
from pool.endpoints.client import AttemptError, EndpointClient
from pool.endpoints.request_body import request_body
from pool.endpoints.streams import together
from pool.pool import Pool
from pool.request_defaults import NO_DEFAULTS, RequestDefaults
from turnout.calls import CandidateSet, Chunk, GenerateCall, Usage
from turnout.cost import Meter, ModelMeter
from turnout.errors import Code, TurnoutError
from turnout.pool_stats import EndpointStats

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
CHARS_PER_TOKEN = 4
STEP_WEIGHT = 0.2  # of the newest answer in the time of a token
BATCH_RANK = 1 << 64  # calls of batches wait behind all others


@dataclass(slots=True)
class Work:
    """Work that was done for a call, by one model or by several.

    Attributes:
        meter: of all models.
        notes: for the person who reads the answer.
        prompt_tokens: of the prompt, as the last model that answered counted it.
        cached_tokens: those of them that its cache held.
        switches: changes to another model.
        reasoning_tokens: of the answers that stayed, those that are thinking, where models say how many.
        measured: what was measured of each answer, by name.
        candidates: that answers were chosen from, where the call asks for them.
    """

    meter: Meter = field(default_factory=Meter)
    notes: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    switches: int = 0
    reasoning_tokens: int = 0
    measured: dict[str, list[float]] = field(default_factory=dict)
    candidates: list[CandidateSet] = field(default_factory=list)

    def measure(self, values: Mapping[str, float]) -> None:
        """Add what was measured of an answer."""
        for name, value in values.items():
            self.measured.setdefault(name, []).append(value)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Work) -> None:
        """Add what was done for a part of the call."""
        self.meter.merge(other.meter)
        self.prompt_tokens, self.cached_tokens = other.prompt_tokens, other.cached_tokens
        self.switches += other.switches
        self.reasoning_tokens += other.reasoning_tokens
        for name, values in other.measured.items():
            self.measured.setdefault(name, []).extend(values)
        self.candidates += other.candidates
        for note in other.notes:
            self.note(note)


class TextModel(Protocol):
    """A model that answers whole calls."""

    name: str
    num_parameters: int

    def answer(self, call: GenerateCall, work: Work, shadow: bool = False) -> AsyncIterator[Chunk]:
        """Answer a call alone: chunks of `sampling.n` answers; what it took is added to `work` at the end.

        Closing the iterator frees everything. A shadow is not worth a second try.

        Raises:
            TurnoutError: UNAVAILABLE or RESOURCE_EXHAUSTED: another model may answer instead.
        """
        ...

    def step_seconds(self) -> float:
        """Recent time of a token, in seconds; 0.0 before the first answer."""
        ...


class LocalModel:
    """Text model that is computed here.

    Args:
        pool: has the model alone.
        name: the model's.
    """

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool = pool
        self.name = name
        self.num_parameters = pool.members[name].num_parameters

    async def answer(self, call: GenerateCall, work: Work, shadow: bool = False) -> AsyncIterator[Chunk]:
        """See `TextModel.answer`."""
        asked = replace(call, model=self.name, method=None, params={}, include_prompt_len=False)
        async with aclosing(self.pool.generate(asked)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Chunk):
                    yield event
                elif isinstance(event, Usage):
                    work.meter.merge(Meter(event.models, event.speculation))
                    work.prompt_tokens, work.cached_tokens = event.prompt_tokens, event.cached_tokens
                    work.reasoning_tokens += event.reasoning_tokens
                    for note in event.notes:
                        work.note(note)

    def step_seconds(self) -> float:
        """See `TextModel.step_seconds`."""
        return self.pool.members[self.name].step_seconds()


class EndpointModel:
    """Text model that a server elsewhere computes.

    Args:
        client: asks the server.
        defaults: the pool's, for what a request leaves open.
        pause: waits, given seconds.
    """

    def __init__(
        self,
        client: EndpointClient,
        defaults: RequestDefaults = NO_DEFAULTS,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.client = client
        self._defaults = replace(defaults, template={}) if client.config.dialect == "openai" else defaults
        self.name = client.name
        self.num_parameters = client.config.num_parameters
        self._step_s = 0.0
        self._pause = pause

    async def answer(self, call: GenerateCall, work: Work, shadow: bool = False) -> AsyncIterator[Chunk]:
        """See `TextModel.answer`."""
        if call.sampling.n > 1 and self.client.config.dialect == "llama.cpp":  # whose servers know no n
            singles = [self._once(one_of(call, index), work, shadow) for index in range(call.sampling.n)]
            async with aclosing(together(singles)) as chunks:  # type: ignore[type-var]
                async for index, chunk in chunks:
                    yield replace(chunk, index=index)
            return
        async with aclosing(self._once(call, work, shadow)) as own:  # type: ignore[type-var]
            async for chunk in own:
                yield chunk

    def step_seconds(self) -> float:
        """See `TextModel.step_seconds`."""
        return self._step_s

    async def _once(self, call: GenerateCall, work: Work, shadow: bool) -> AsyncIterator[Chunk]:
        """One request, made again while nothing of its answer has been passed on."""
        path, body = request_body(self._filled(call), self.name, self.client.config)
        if call.sampling.thinking_token_budget is not None and self.client.config.dialect != "vllm":
            work.note(f"thinking_token_budget: endpoint {self.name!r} has no field for it")
        rank = call.rank + (BATCH_RANK if call.priority == "batch" else 0)
        tries = 0
        while True:
            reader = AnswerReader(self.name, call.sampling.n, alternatives=bool(call.sampling.logprobs))
            passed_on, first_s = False, 0.0
            try:
                async with aclosing(self.client.events(path, body, call.tenant, rank, shadow)) as values:  # type: ignore[type-var]
                    async for value in values:
                        for chunk in _as_wanted(self._read(reader, value), call):
                            first_s = first_s or time.perf_counter()
                            passed_on = True
                            yield chunk
                if not reader.whole:
                    raise AttemptError(self._broken("its answer ended before it was whole"), again=True)
                self._done(call, reader, first_s, work)
                return
            except AttemptError as failed:
                if reader.whole:  # only its usage has not come: it is estimated
                    self._done(call, reader, first_s, work)
                    return
                if passed_on:
                    self._add(call, reader, work)
                    raise TurnoutError(failed.error.code, f"{failed.error.message}; the answer broke off") from None
                if not failed.again or shadow or tries == self.client.config.retries:
                    raise failed.error from None
                wait_s = _pause_s(tries, failed.error)
                if wait_s is None:
                    raise failed.error from None
            tries += 1
            self.client.counts.retries += 1
            await self._pause(wait_s)

    def _filled(self, call: GenerateCall) -> GenerateCall:
        """The call with the pool's defaults; an effort that the pool has no variables for stays what it is."""
        effort = "" if self._defaults.efforts else call.template.effort
        filled = self._defaults.applied(replace(call, template=replace(call.template, effort="")) if effort else call)
        return replace(filled, template=replace(filled.template, effort=effort)) if effort else filled

    def _read(self, reader: AnswerReader, value: object) -> list[Chunk]:
        try:
            return reader.read(value)
        except ValueError as error:
            raise AttemptError(self._broken(str(error)), again=True) from None

    def _broken(self, reason: str) -> TurnoutError:
        return TurnoutError(Code.UNAVAILABLE, f"endpoint {self.name!r}: {reason}")

    def _done(self, call: GenerateCall, reader: AnswerReader, first_s: float, work: Work) -> None:
        meter = self._add(call, reader, work)
        work.prompt_tokens = meter.prompt_tokens + meter.cached_tokens
        work.cached_tokens = meter.cached_tokens
        work.reasoning_tokens += reader.reasoning_tokens
        if meter.generated_tokens > 1:
            step_s = (time.perf_counter() - first_s) / (meter.generated_tokens / call.sampling.n)
            self._step_s += (step_s - self._step_s) * (STEP_WEIGHT if self._step_s else 1.0)

    def _add(self, call: GenerateCall, reader: AnswerReader, work: Work) -> ModelMeter:
        """Count what it read and wrote, also for an answer that broke off."""
        meter = reader.meter(self.num_parameters, estimated_tokens(call))
        work.meter.merge(Meter({self.name: meter}))
        for note in reader.notes:
            work.note(note)
        return meter

    def stats(self) -> EndpointStats:
        """What it was asked, and how it is."""
        counts, places = self.client.counts, self.client.places
        return EndpointStats(
            model=self.name,
            breaker=self.client.breaker.state,
            opened=self.client.breaker.opened,
            running=places.num_held,
            waiting=places.num_waiting,
            requests=dict(counts.requests),
            retries=counts.retries,
            seconds=counts.seconds,
            first_s=counts.first_s,
        )


def one_of(call: GenerateCall, index: int) -> GenerateCall:
    """The call for one of its answers alone, with the seed that this one has."""
    seed = call.sampling.seed
    own = None if seed is None else derive_seed(seed, index)
    return replace(call, sampling=call.sampling.model_copy(update={"n": 1, "seed": own}))


def estimated_tokens(call: GenerateCall) -> int:
    """About how many tokens a prompt has, where no tokenizer is known: four characters each."""
    if call.messages is None:
        chars = len(call.prompt or "")
    else:
        chars = sum(len(turn.content) + sum(len(each.arguments) for each in turn.tool_calls) for turn in call.messages)
        chars += sum(len(tool.parameters) + len(tool.description) for tool in call.tools)
    return max(1, -(-chars // CHARS_PER_TOKEN))


def _pause_s(tries: int, error: TurnoutError) -> float | None:
    """How long to wait before the next try, with jitter; None: longer than it is worth."""
    backoff_s: float = min(FIRST_PAUSE_S * 2.0**tries, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
    if error.retry_after_s is None:
        return backoff_s
    if error.retry_after_s > LONGEST_PAUSE_S:
        return None
    return error.retry_after_s * random.uniform(1.0, 1.25)


def _as_wanted(chunks: Iterable[Chunk], call: GenerateCall) -> Iterator[Chunk]:
    """What a caller sees of an answer: its thinking apart, in the text, or left out."""
    for chunk in chunks:
        if call.reasoning == "split" or not chunk.reasoning:
            yield chunk
        elif call.reasoning == "raw":
            yield replace(chunk, text=chunk.reasoning + chunk.text, reasoning="")
        else:
            yield replace(chunk, reasoning="")
