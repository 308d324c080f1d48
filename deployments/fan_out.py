"""Running the calls of one HTTP request together: several prompts, echo, one numbering of choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from deployments.backend import Batch, merge
from deployments.schemas import Job
from deployments.service import GenerationService
from turnout.calls import Chunk, Event, GenerateCall, ScoreCall, ScoredTokens, TokenOut, Usage
from turnout.candidate_sets import bounded
from turnout.cost import Cost, CostReport, Meter, SpeculationMeter
from turnout.types import FinishReason, TokenKind

T = TypeVar("T")


async def answer(service: GenerationService, job: Job) -> tuple[list[Chunk], Usage]:
    """All choices of all prompts, numbered in order, and what they used together."""
    await service.check(job.calls)
    one = partial(_answer_one, service, echo=job.echo) if job.writes else partial(_read_one, service)
    answers = await together([one(call) for call in job.calls])
    chunks = [
        replace(chunk, index=place * call.sampling.n + chunk.index)
        for place, (call, (choices, _)) in enumerate(zip(job.calls, answers, strict=True))
        for chunk in choices
    ]
    numbers = range(0, len(answers) * job.calls[0].sampling.n, job.calls[0].sampling.n)
    return chunks, combine([_numbered(usage, first) for first, (_, usage) in zip(numbers, answers, strict=True)])


async def _answer_one(service: GenerationService, call: GenerateCall, echo: bool) -> tuple[tuple[Chunk, ...], Usage]:
    finished = await service.generate(call)
    if not echo:
        return finished.choices, finished.usage
    echoed = await _echo(service, call)
    choices = [merge([replace(echoed, index=choice.index), choice]) for choice in finished.choices]
    return tuple(chunk for choice in choices for chunk in choice if isinstance(chunk, Chunk)), finished.usage


async def _read_one(service: GenerationService, call: GenerateCall) -> tuple[tuple[Chunk, ...], Usage]:
    """The prompt itself as each of the answers, nothing of them written; it is read by a model only to be scored."""
    started = time.perf_counter()
    echoed = replace(await _echo(service, call, billed=True), finish_reason=FinishReason.LENGTH)
    if not echoed.tokens:  # what was not read must still be allowed, and counted in tokens
        num_tokens = len((await service.tokens(call))[0])
    nothing = Cost(0.0, 0.0, 0.0)
    usage = Usage(
        prompt_tokens=len(echoed.tokens) or num_tokens,
        completion_tokens=0,
        cached_tokens=0,
        models={},
        speculation=SpeculationMeter(),
        switches=0,
        cost=CostReport(nothing, nothing, 0.0),
        method="score",
        params={},
        seed=0,
        ttft_s=0.0,
        wall_s=time.perf_counter() - started,
    )
    return tuple(replace(echoed, index=index) for index in range(call.sampling.n)), usage


async def _read_all(service: GenerationService, job: Job) -> AsyncGenerator[Batch, None]:
    chunks, usage = await answer(service, job)
    yield (*chunks, usage)


def stream(service: GenerationService, job: Job) -> AsyncGenerator[Batch, None]:
    """Return batches as they are written, choices numbered over all prompts; the last ends in their common Usage."""
    if not job.writes:
        return _read_all(service, job)
    if len(job.calls) > 1:
        return _stream_all(service, job)
    return _stream_one(service, job.calls[0], 0, job.echo) if job.echo else service.stream(job.calls[0])


async def _stream_all(service: GenerationService, job: Job) -> AsyncGenerator[Batch, None]:
    await service.check(job.calls)
    queue: asyncio.Queue[Batch | None] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_pump(_stream_one(service, call, place * call.sampling.n, job.echo), queue))
        for place, call in enumerate(job.calls)
    ]
    usages = []
    try:
        running = len(tasks)
        while running:
            batch = await queue.get()
            if batch is None:
                running -= 1
                for task in tasks:
                    if task.done():
                        task.result()
                continue
            if isinstance(batch[-1], Usage):
                usages.append(batch[-1])
                batch = batch[:-1]
            if batch:
                yield batch
        yield (combine(usages),)
    finally:
        await _cancel(tasks)


async def _stream_one(
    service: GenerationService, call: GenerateCall, first_index: int, echo: bool
) -> AsyncGenerator[Batch, None]:
    async with aclosing(service.stream(call)) as batches:
        async for batch in batches:
            if echo:
                # Not before the call has been let in.
                echo, echoed = False, await _echo(service, call)
                yield tuple(replace(echoed, index=first_index + index) for index in range(call.sampling.n))
            yield tuple(_renumbered(event, first_index) for event in batch)


def _renumbered(event: Event, first: int) -> Event:
    """An event of a call whose answers are numbered from `first`."""
    if isinstance(event, Chunk):
        return replace(event, index=first + event.index)
    return _numbered(event, first) if isinstance(event, Usage) else event


async def _echo(service: GenerationService, call: GenerateCall, billed: bool = False) -> Chunk:
    """The prompt as if it had been written, with its log-probabilities where they are asked for."""
    prompt = call.prompt if call.prompt is not None else ""
    if call.sampling.logprobs is None:
        if isinstance(prompt, str) and call.sampling.truncate_prompt_tokens is None and not call.context:
            return Chunk(0, prompt, ())
        return Chunk(0, (await service.tokens(call))[1], ())
    ids, text, scored = await score_prompt(service, call, call.sampling.logprobs, billed)
    return Chunk(0, text, (first_token(ids[0], text, scored.tokens), *scored.tokens))


async def check_prompt(service: GenerationService, call: GenerateCall) -> None:
    """Refuse a call whose answer is to hold its prompt's tokens, where they are not known; counted as a refusal.

    Raises:
        TurnoutError: as `GenerationService.tokens`.
    """
    with service.tracer.refusing(call.tenant, call.request_id, call.key_id):
        await service.tokens(call)


async def score_prompt(
    service: GenerationService, call: GenerateCall, top: int, billed: bool = False
) -> tuple[tuple[int, ...], str, ScoredTokens]:
    """Return the ids and the text of a call's prompt, and its tokens behind the first one, scored.

    Args:
        service: whom to ask.
        call: whose prompt it is.
        top: alternatives to each token.
        billed: the call does not read its prompt, and is not billed for it, otherwise.
    """
    ids, text = await service.tokens(call)
    if len(ids) < 2:
        return ids, text, ScoredTokens((), ())
    reading = ScoreCall(
        call.request_id,
        call.model,
        ids[:1],
        (ids[1:],),
        call.tenant,
        top,
        call.key_id,
        billed=billed,
        cache_salt=call.cache_salt,
        priority=call.priority,
        batch_id=call.batch_id,
        deadline_s=call.deadline_s,
    )
    [scored] = await service.score(reading)
    return ids, text, scored


def first_token(token_id: int, text: str, rest: tuple[TokenOut, ...]) -> TokenOut:
    """Return the first token of a text: its part is what those after it leave of the text."""
    alone = text.removesuffix("".join(token.text for token in rest))
    data = text.encode()
    held = data[: len(data) - sum(len(token.data) for token in rest)]
    broken = ((token_id, held),) if held != alone.encode() else ()
    return TokenOut(token_id, alone, "prompt", TokenKind.DECODED, broken=broken)


async def _pump(batches: AsyncGenerator[Batch, None], queue: asyncio.Queue[Batch | None]) -> None:
    try:
        async with aclosing(batches):
            async for batch in batches:
                queue.put_nowait(batch)
    finally:
        # The reader looks for failed tasks on each None, so this task must be done by then.
        asyncio.get_running_loop().call_soon(queue.put_nowait, None)


async def together(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of these; where one fails, the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def combine(usages: Sequence[Usage]) -> Usage:
    """One Usage for all: counts, FLOPs and seconds of work add up, times as seen by the client do not."""
    first = usages[0]
    if len(usages) == 1:
        return first
    total = Meter()
    for usage in usages:
        total.merge(
            Meter(
                models=usage.models,
                speculation=usage.speculation,
                switches=usage.switches,
            )
        )
    weights = [usage.completion_tokens for usage in usages]
    return replace(
        first,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(weights),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        models=total.models,
        speculation=total.speculation,
        switches=total.switches,
        cost=CostReport(
            spent=_add([usage.cost.spent for usage in usages], weights),
            large_only=_add([usage.cost.large_only for usage in usages], weights),
            large_share=_mean([usage.cost.large_share for usage in usages], weights),
            large_kept_share=_mean([usage.cost.large_kept_share for usage in usages], weights),
        ),
        ttft_s=min(usage.ttft_s for usage in usages),
        wall_s=max(usage.wall_s for usage in usages),
        queue_s=max(usage.queue_s for usage in usages),
        drift=next((usage.drift for usage in reversed(usages) if usage.drift is not None), None),
        measures=_mean_measures([usage.measures for usage in usages]),
        candidates=bounded(sorted((each for usage in usages for each in usage.candidates), key=lambda of: of.answers)),
        doubts=tuple(sorted((each for usage in usages for each in usage.doubts), key=lambda of: of.answer)),
        notes=tuple(dict.fromkeys(note for usage in usages for note in usage.notes)),
    )


def _numbered(usage: Usage, first: int) -> Usage:
    """The usage of a call whose answers are numbered from `first`."""
    if not first or not (usage.candidates or usage.doubts):
        return usage
    candidates, doubts = usage.candidates, usage.doubts
    numbered = tuple(each.numbered(first) for each in candidates), tuple(each.numbered(first) for each in doubts)
    return replace(usage, candidates=numbered[0], doubts=numbered[1])


def _mean_measures(measured: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in measured for name in each)
    return {name: fmean(each[name] for each in measured if name in each) for name in names}


def _add(costs: list[Cost], weights: list[int]) -> Cost:
    return Cost(
        paper=_mean([cost.paper for cost in costs], weights),
        flops=sum(cost.flops for cost in costs),
        wall_s=sum(cost.wall_s for cost in costs),
        usd=sum(cost.usd for cost in costs),
    )


def _mean(values: list[float], weights: list[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
