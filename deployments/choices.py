"""The surface of /v1/completions and /v1/chat/completions: answers are choices, streams are parts of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from deployments.access.callers import Caller
from deployments.answer_extras import CountedParts, ExtendedFormat, PromptRead, read_prompts, whole_answer
from deployments.backend import Batch
from deployments.bodies import parsed
from deployments.build_info import fingerprint
from deployments.extra_fields import NO_EXTRAS
from deployments.faults import guarded, respell
from deployments.openai_format import Format, error_body, usage_object
from deployments.schemas import Job, read_json
from deployments.service import GenerationService
from deployments.surface import Head
from deployments.tools import functions_of
from turnout.calls import Chunk, Usage
from turnout.errors import TurnoutError
from turnout.json_lines import json_line

MARK = "\x00text\x00"  # stands for a text in a template


class ChoicesSurface:
    """/v1/completions and /v1/chat/completions: answers are choices.

    Args:
        service: reads prompts that the answer is to tell of.
        translate: a body's fields -> what it asks for.
        form: of the endpoint's choices.
    """

    def __init__(self, service: GenerationService, translate: Callable[[dict[str, Any]], Job], form: Format) -> None:
        self.prefix = form.prefix
        self._service = service
        self._translate = translate
        self._form = form

    async def job(self, data: bytes, caller: Caller) -> Job:
        """See `Surface`."""
        return await parsed(data, lambda body: self._translate(read_json(body)))

    async def whole(self, head: Head, job: Job, chunks: Sequence[Chunk], usage: Usage) -> Mapping[str, Any]:
        """See `Surface`."""
        prompts = await read_prompts(self._service, job)
        return whole_answer(_common(head), self._form, job, prompts, chunks, usage)

    async def events(
        self, head: Head, job: Job, first: Batch, batches: AsyncGenerator[Batch, None]
    ) -> AsyncGenerator[str, None]:
        """See `Surface`."""
        try:
            with guarded(head.id):
                written = ChoiceEvents(self._form, job, head, await read_prompts(self._service, job))
                if shown := written.of(first):
                    yield shown
                async for batch in batches:
                    if shown := written.of(batch):
                        yield shown
        except TurnoutError as error:
            yield _event(error_body(respell(error, job.spelling)))
            return
        yield "data: [DONE]\n\n"


class ChoiceEvents:
    """Writer of a stream's events.

    Most chunks bring nothing but text: an event is written once for each choice, and after that only its text changes.

    Args:
        form: of the endpoint's choices.
        job: the request.
        head: of the answer.
        prompts: of `read_prompts`.
    """

    def __init__(self, form: Format, job: Job, head: Head, prompts: Sequence[PromptRead]) -> None:
        call = job.calls[0]
        self._form, self._counted = ExtendedFormat(form, job, prompts), CountedParts(job, prompts)
        self._common = {**_common(head), "object": form.part}
        self._logprobs = call.sampling.logprobs is not None
        self._usage = job.include_usage
        more = self._logprobs or call.sampling.token_details or job.extras != NO_EXTRAS
        self._only_text = not more and functions_of(call) is None
        self._begun: set[int] = set()
        self._around: dict[int, tuple[str, str]] = {}

    def of(self, batch: Batch) -> str:
        """Return the events of a batch, one for each chunk; they are sent together."""
        events = []
        for each in batch:
            if isinstance(each, Chunk):
                events.append(self._chunk(each))
            elif isinstance(each, Usage) and self._usage:
                events.append(_event({**self._common, "choices": [], "usage": usage_object(each)}))
        return "".join(events)

    def _chunk(self, chunk: Chunk) -> str:
        index = chunk.index
        if not self._only_text or chunk.finish_reason is not None or chunk.reasoning or index not in self._begun:
            self._begun.add(index)  # the first part of a choice holds more than those after it
            return self._written(chunk)
        around = self._around.get(index)
        if around is None:
            before, after = self._written(Chunk(index, MARK, ())).split(json_line(MARK))
            around = self._around[index] = before, after
        return f"{around[0]}{json_line(chunk.text)}{around[1]}"

    def _written(self, chunk: Chunk) -> str:
        part = self._form.delta(chunk, self._logprobs)
        return _event({**self._common, "choices": [part], **self._counted.of(chunk)})


def _common(head: Head) -> dict[str, Any]:
    return {"id": head.id, "created": head.created, "model": head.model, "system_fingerprint": fingerprint()}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json_line(value)}\n\n"
