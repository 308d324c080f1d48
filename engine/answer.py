"""One call from prompt to events: validated, run by its method, turned into text, metered, cleaned up."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from decoding.model import ModelPool, Request
from decoding.noise import derive_seed
from decoding.sequence import Sequence
from engine.text import Detokenizer, StopStrings, TextTokenizer
from turnout.calls import Chunk, Event, GenerateCall, TokenOut, Usage
from turnout.cost import Meter, report
from turnout.errors import Code, TurnoutError, invalid, not_found, out_of_range
from turnout.registry import MethodInfo, MethodParams, get_method
from turnout.types import MAX_SEED, FinishReason, Segment, Token

FIRST = 0


@dataclass(slots=True)
class Prepared:
    """A call that passed every check."""

    call: GenerateCall
    method: MethodInfo
    params: MethodParams
    prompt: list[int]
    seed: int
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """One of a call's `n` answers."""

    index: int
    sequence: Sequence
    text: StopStrings
    started: asyncio.Event = field(default_factory=asyncio.Event)


def prepare_call(
    call: GenerateCall,
    tokenizer: TextTokenizer,
    max_length: int,
    vocab_size: int,
    pool_name: str,
    members: dict[str, str],
    default_method: str,
    default_params: dict[str, object],
) -> Prepared:
    """Check everything that can be checked before work starts.

    Args:
        call: as the front end built it.
        tokenizer: the pool's.
        max_length: most tokens of prompt and answer.
        vocab_size: ids allowed are below this.
        pool_name: the pool's own name in `call.model`.
        members: member model name -> role.
        default_method: used when the call names none.
        default_params: its parameters.

    Raises:
        TurnoutError: INVALID_ARGUMENT, NOT_FOUND or OUT_OF_RANGE, naming the field and what is allowed.
    """
    method, params = _method(call, pool_name, members, default_method, default_params)
    prompt = encode_prompt(call, tokenizer, vocab_size)
    if len(prompt) >= max_length:
        name = "messages" if call.messages is not None else "prompt"
        raise out_of_range(name, f"{len(prompt)} tokens; at most {max_length - 1} fit the context of {max_length}")
    sampling = call.sampling
    for token in (*sampling.stop_token_ids, *sampling.logit_bias):
        if not 0 <= token < vocab_size:
            name = "stop_token_ids" if token in sampling.stop_token_ids else "logit_bias"
            raise out_of_range(name, f"token id {token}; allowed: 0 to {vocab_size - 1}")
    seed = sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED)
    return Prepared(call, method, params, prompt, seed, min(sampling.max_tokens, max_length - len(prompt)))


def _method(
    call: GenerateCall, pool_name: str, members: dict[str, str], default: str, default_params: dict[str, object]
) -> tuple[MethodInfo, MethodParams]:
    if call.model not in (pool_name, *members):
        raise not_found("model", call.model, [pool_name, *members])
    if call.model in members:
        if call.method not in (None, "plain"):
            raise invalid("method", f"{call.model!r} is one model and answers alone (plain); ask {pool_name!r}")
        method = get_method("plain")
        return method, method.parse({**call.params, "model": members[call.model]})
    method = get_method(call.method or default)
    # What the pool sets for its default method is calibrated for its models: it holds for everyone who uses it.
    chosen = default_params if method.name == default else {}
    return method, method.parse({**chosen, **call.params})


def encode_prompt(call: GenerateCall, tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    """Token ids of a call's prompt or conversation.

    Raises:
        TurnoutError: empty, both or none given, or ids outside the vocabulary.
    """
    if (call.prompt is None) == (call.messages is None):
        raise invalid("prompt", "give either a prompt or messages")
    if call.messages is not None:
        if not call.messages:
            raise invalid("messages", "is empty; at least one message is needed")
        return encode_tokens("messages", tuple(tokenizer.encode_chat(call.messages)), tokenizer, vocab_size)
    assert call.prompt is not None
    return encode_tokens("prompt", call.prompt, tokenizer, vocab_size)


def encode_tokens(name: str, value: str | tuple[int, ...], tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    """Text or token ids as token ids; refused when empty or outside the vocabulary."""
    ids = tokenizer.encode(value) if isinstance(value, str) else list(value)
    if not ids:
        raise invalid(name, "is empty; at least one token is needed")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise out_of_range(name, f"token id {wrong}; allowed: 0 to {vocab_size - 1}")
    return ids


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
    """

    def __init__(self, prepared: Prepared, models: ModelPool, tokenizer: TextTokenizer, large: str) -> None:
        self._prepared = prepared
        self._models = models
        self._tokenizer = tokenizer
        self._large = large
        self._started = time.perf_counter()
        self._first_token_s = 0.0
        self._notes: list[str] = []
        self.answers = [self._answer(index) for index in range(prepared.call.sampling.n)]

    def _answer(self, index: int) -> Answer:
        prepared = self._prepared
        sampling = prepared.call.sampling.model_copy(update={"max_tokens": prepared.max_tokens})
        text = StopStrings(Detokenizer(self._tokenizer, prepared.prompt), sampling.stop)
        seed = derive_seed(prepared.seed, index)
        eos = self._tokenizer.eos_ids
        tenant = prepared.call.tenant
        sequence = Sequence(prepared.prompt, sampling, seed, eos, text, cache_salt=tenant, tenant=tenant)
        return Answer(index, sequence, text)

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
        prepared = self._prepared
        request = Request(prepared.call.request_id, answer.sequence, prepared.call.tenant)
        try:
            if answer.index != FIRST:
                # The first answer computes the prompt; the others find its blocks in the pool.
                await self.answers[FIRST].started.wait()
            async with aclosing(prepared.method.run(request, self._models, prepared.params)) as segments:  # type: ignore[type-var]
                async for segment in segments:
                    if segment.tokens:
                        queue.put_nowait(self._chunk(answer, segment))
                        answer.started.set()
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
            if prepared.method.lossless and not prepared.method.keeps_law(prepared.params):
                request.notes.append(f"not lossless: {prepared.method.name} with these parameters has a law of its own")
            self._notes += [note for note in request.notes if note not in self._notes]
            for model in self._models.models.values():
                model.release(answer.sequence)

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
        prepared, meter = self._prepared, Meter()
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
            method=prepared.method.name,
            params=prepared.params.model_dump(mode="json"),
            seed=prepared.seed,
            ttft_s=self._first_token_s,
            wall_s=wall_s,
            notes=tuple(self._notes),
        )
