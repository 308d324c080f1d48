"""The surface of POST /v1/responses: one request, from its body to its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

from deployments.access.callers import Caller
from deployments.backend import Batch
from deployments.bodies import parsed
from deployments.faults import guarded, respell
from deployments.openai_format import token_object, usage_object
from deployments.openapi.responses import (
    IncompleteDetails,
    ResponseFault,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from deployments.responses.body import Given, read_body
from deployments.responses.items import shown
from deployments.responses.output import Event, Output
from deployments.responses.store import KeptResponse, ResponseStore
from deployments.responses.translation import Asked, translate
from deployments.schemas import Job
from deployments.surface import Head
from deployments.tools import reader_of
from turnout.calls import Chunk, Usage
from turnout.errors import Code, TurnoutError, invalid
from turnout.json_lines import json_line

REFUSALS = (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE)

log = logging.getLogger("ray.serve")


class ResponsesSurface:
    """POST /v1/responses, for one request.

    Args:
        store: where responses are kept; None: nowhere.
        ignored_tools: types of tools that are left out of requests.
    """

    prefix = "resp_"

    def __init__(self, store: ResponseStore | None, ignored_tools: tuple[str, ...] = ()) -> None:
        self._store = store
        self._ignored_tools = ignored_tools
        self._caller = Caller()
        self._asked: Asked | None = None
        self._id = f"{self.prefix}{uuid4().hex}"  # no caller's: it names what is kept

    async def job(self, data: bytes, caller: Caller) -> Job:
        """See `deployments.surface.Surface`; what the request follows and refers to is looked up."""
        self._caller = caller
        given = await parsed(data, lambda body: read_body(body, self._ignored_tools))
        previous, ids = given.body.previous_response_id, _references(given)
        before: list[KeptResponse] = []
        kept: dict[str, dict[str, Any]] = {}
        if previous or ids:
            store = self._required("previous_response_id" if previous else "input")
            if previous:
                before = await asyncio.to_thread(store.conversation, caller.owner, previous, "previous_response_id")
                kept = {item["id"]: item for each in before for item in each.items}
            others = [each for each in ids if each not in kept]
            kept |= await asyncio.to_thread(store.referenced, caller.owner, others) if others else {}
        self._asked = translate(given, before, kept)
        return self._asked.job

    async def whole(self, head: Head, job: Job, chunks: Sequence[Chunk], usage: Usage) -> Mapping[str, Any]:
        """See `deployments.surface.Surface`."""
        output = Output(self._id, _logprobs(job))
        reader = reader_of(job.calls[0])
        for chunk in chunks:
            output.add(chunk if reader is None else reader.whole(chunk))
        output.end()
        return await self._finished(head, output, usage)

    async def events(
        self, head: Head, job: Job, first: Batch, batches: AsyncGenerator[Batch, None]
    ) -> AsyncGenerator[str, None]:
        """See `deployments.surface.Surface`."""
        output, lines = Output(self._id, _logprobs(job)), _Lines()
        try:
            with guarded(head.id):
                begun = self._response(head, "in_progress")
                yield lines.event({"type": "response.created", "response": begun})
                yield lines.event({"type": "response.in_progress", "response": begun})
                reader, usage = reader_of(job.calls[0]), None
                async for batch in _from(first, batches):
                    for each in batch:
                        if isinstance(each, Chunk):
                            for event in output.add(each if reader is None else reader.part(each)):
                                yield lines.event(event)
                        elif isinstance(each, Usage):
                            usage = each
                assert usage is not None  # the service sees to it
                for event in output.end():
                    yield lines.event(event)
                response = await self._finished(head, output, usage)
                yield lines.event({"type": f"response.{output.ending}", "response": response})
        except TurnoutError as error:
            failed = self._response(head, "failed") | {"output": output.items, "error": _fault(error, job)}
            yield lines.event({"type": "response.failed", "response": failed})

    async def _finished(self, head: Head, output: Output, usage: Usage) -> ResponseObject:
        """The whole response; it is kept before it is shown, so that it can be followed at once."""
        response = self._response(head, output.ending)
        response["output"], response["usage"] = output.items, _usage(usage)
        response["completed_at"] = int(time.time())
        response["temperature"] = usage.sampling.get("temperature", response["temperature"])
        response["top_p"] = usage.sampling.get("top_p", response["top_p"])
        if output.ending == "incomplete":
            reason: IncompleteDetails = {"reason": "max_output_tokens"}
            response["incomplete_details"] = reason
        if self._known.job.calls[0].sampling.token_details:
            response["turnout"] = {"tokens": [token_object(token) for token in output.tokens]}
        if response["store"]:
            response["store"] = await asyncio.to_thread(self._kept, response)
        return response

    def _kept(self, response: ResponseObject) -> bool:
        """Keep a response; whether that could be done: an answer is not lost for it."""
        assert self._store is not None
        asked = self._known
        items = [shown(item, self._id, place, f"input.{place}") for place, item in enumerate(asked.items)]
        try:
            self._store.save(self._caller.owner, KeptResponse(dict(response), tuple(items), asked.history))
        except TurnoutError as error:
            log.warning("%s is not kept: %s", self._id, error)
            return False
        return True

    def _response(self, head: Head, status: ResponseStatus) -> ResponseObject:
        body, sampling = self._known.body, self._known.job.calls[0].sampling
        given = sampling.model_fields_set
        return {
            "id": self._id,
            "object": "response",
            "created_at": head.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "usage": None,
            "instructions": body.instructions or None,
            "previous_response_id": body.previous_response_id or None,
            "store": body.store and self._store is not None,
            "background": False,
            "metadata": dict(body.metadata),
            "tools": [_tool(each.model_dump(include={"type", "name", "description", "parameters", "strict"}))
                      for each in body.tools],
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "max_output_tokens": body.max_output_tokens,
            "temperature": sampling.temperature if "temperature" in given else None,
            "top_p": sampling.top_p if "top_p" in given else None,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "service_tier": "default",
            "user": body.user,
        }  # fmt: skip

    @property
    def _known(self) -> Asked:
        assert self._asked is not None
        return self._asked

    def _required(self, field: str) -> ResponseStore:
        if self._store is None:
            raise invalid(field, f"{NOT_KEPT}; send the whole conversation as input, without references")
        return self._store


NOT_KEPT = "this server keeps no responses (section responses of its configuration)"


class _Lines:
    """Numbered server-sent events."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, event: Event) -> str:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return f"event: {event['type']}\ndata: {json_line(numbered)}\n\n"


async def _from(first: Batch, batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    yield first
    async for batch in batches:
        yield batch


def _references(given: Given) -> list[str]:
    kinds = ("item_reference", None)
    return [
        str(each["id"]) for each in given.items if each.get("type") in kinds and "role" not in each and "id" in each
    ]


def _logprobs(job: Job) -> bool:
    return job.calls[0].sampling.logprobs is not None


def _tool(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"strict": values["strict"] is not False}


def _usage(usage: Usage) -> ResponseUsage:
    counted = usage_object(usage)
    details = cast("Mapping[str, int]", counted["completion_tokens_details"])
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": counted["total_tokens"],
        "turnout": counted["turnout"],
    }


def _fault(error: TurnoutError, job: Job) -> ResponseFault:
    message = respell(error, job.spelling).message
    if error.code is Code.RESOURCE_EXHAUSTED:
        return {"code": "rate_limit_exceeded", "message": message}
    return {"code": "invalid_prompt" if error.code in REFUSALS else "server_error", "message": message}
