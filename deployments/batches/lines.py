"""One line of a batch: what may stand in it, the call it asks for, and the line that is written for its answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments import fan_out as answering
from deployments.access.callers import Caller
from deployments.answer_extras import check_readable
from deployments.batches.spent import Spent
from deployments.bodies import parsed
from deployments.faults import guarded, respell
from deployments.read_surface import Asked
from deployments.schemas import read_json
from deployments.service import GenerationService
from deployments.surface import Head
from deployments.surfaces import READING, RESPONSES, WRITING, refusal
from turnout.calls import GenerateCall
from turnout.errors import TurnoutError, invalid
from turnout.json_lines import json_line
from turnout.types import MAX_SEED

MAX_ID_LENGTH = 512
MALFORMED = "invalid_line"
COMPARED = 4096  # characters


ENDPOINTS = (*WRITING, *READING)
# What a line leaves open has another value here: answers stand in the output, and thousands of them would drive the
# responses that conversations are to go on with out of what is kept of a tenant's.
LEFT_OPEN: Mapping[str, Mapping[str, Any]] = {RESPONSES: {"store": False}}
READ_FIRST = ("instructions", "system", "messages", "prompt", "input")  # of bodies, in the order they are read


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch.

    Attributes:
        number: of its line in the file, from 1.
        custom_id: what the caller knows it by.
        endpoint: which of `ENDPOINTS` it is for.
        body: as it would be posted there.
    """

    number: int
    custom_id: str
    endpoint: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What becomes of a line.

    Attributes:
        number: of the line.
        ok: whether it was answered.
        record: the JSON object that is written for it.
        spent: what the answer used; None without one.
        written: the record as a line, where it was written already.
    """

    number: int
    ok: bool
    record: dict[str, Any]
    spent: Spent | None = None
    written: str = ""


def read_line(number: int, data: bytes, endpoint: str | None = None) -> Line:
    """A line of an OpenAI batch file.

    Args:
        number: from 1.
        data: UTF-8.
        endpoint: which one all lines must be for; None: any.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and what is allowed.
    """
    values = read_json(data)
    custom_id = checked_id(values.get("custom_id"))
    method = values.get("method", "POST")
    if method != "POST":
        raise invalid("method", f"must be POST (got {str(method)[:20]!r})")
    url = values.get("url", endpoint)
    allowed = (endpoint,) if endpoint is not None else ENDPOINTS
    if url not in allowed:
        raise invalid("url", f"must be {' or '.join(allowed)} (got {str(url)[:100]!r})")
    body = values.get("body")
    if not isinstance(body, dict):
        raise invalid("body", "must be a JSON object: the request")
    if body.get("stream"):
        raise invalid("body.stream", "must be absent or false in a batch")
    return Line(number, custom_id, url, body)


def beginning(line: Line) -> str:
    """By what lines are put in order, so that those that begin alike lie next to each other: what the model reads."""
    read = [line.body.get(name) for name in READ_FIRST]
    return json.dumps(read, ensure_ascii=False)[:COMPARED]


def checked_id(value: Any) -> str:
    """A line's `custom_id`.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH:
        raise invalid("custom_id", f"must be a string of 1 to {MAX_ID_LENGTH} characters")
    return value


def id_in(data: bytes) -> str | None:
    """Return the `custom_id` of a line that is no request, if it has one."""
    try:
        return checked_id(read_json(data).get("custom_id"))
    except TurnoutError:
        return None


def seed_of(seed: int, number: int) -> int:
    """The seed of a line that names none: the same each time the job is run.

    Args:
        seed: the job's.
        number: the line's.
    """
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % MAX_SEED


def request_id_of(job: str, number: int) -> str:
    """The id under which a line is asked, each time it is."""
    return "batch_req_" + hashlib.blake2b(f"{job}/{number}".encode(), digest_size=12).hexdigest()


async def answer_line(
    service: GenerationService,
    line: Line,
    request_id: str,
    attributed: Callable[[Any], Any],
    seed: int,
    caller: Caller,
) -> Result:
    """Ask for a line's answer.

    Args:
        service: whom to ask.
        line: the request.
        request_id: its id.
        attributed: a call -> the caller's call, of its priority.
        seed: used where the body has none.
        caller: whose line it is.

    Raises:
        TurnoutError: the request was refused or has failed.
    """
    left_open = {n: value for n, value in LEFT_OPEN.get(line.endpoint, {}).items() if line.body.get(n) is None}
    data = json.dumps({**line.body, **left_open}).encode()
    with guarded(request_id):
        if line.endpoint in READING:
            return await _read(service, line, data, Asked(request_id, "", attributed), caller)
        surface = WRITING[line.endpoint](service)
        job = (await surface.job(data, caller)).named(request_id)
        job = replace(job, calls=tuple(attributed(_seeded(call, seed)) for call in job.calls))
        head = Head(request_id, int(time.time()), service.model_name(job.calls[0].model, caller.limits))
        try:
            await check_readable(service, job)
            chunks, usage = await answering.answer(service, job)
            body = await surface.whole(head, job, chunks, usage)
        except TurnoutError as error:
            raise respell(error, job.spelling) from None
    return Result(line.number, True, _record(request_id, line.custom_id, 200, body), Spent.of_usage(usage))


async def _read(service: GenerationService, line: Line, data: bytes, asked: Asked, caller: Caller) -> Result:
    """Ask for the answer to a line whose models only read."""
    surface = READING[line.endpoint]
    body = await parsed(data, surface.read)
    found = await surface.answer(service, body, replace(asked, model=service.model_name(body.model, caller.limits)))
    record = _record(asked.id, line.custom_id, 200, found.body)
    written = await asyncio.to_thread(json_line, record) if found.large else ""
    return Result(line.number, True, record, Spent(answered=1, prompt_tokens=found.prompt_tokens), written)


def failed(line: Line, request_id: str, error: TurnoutError) -> Result:
    """A line that was refused or failed, in the form of OpenAI's error files."""
    return Result(line.number, False, _record(request_id, line.custom_id, *refusal(line.endpoint, error, request_id)))


def unread(number: int, request_id: str, custom_id: str | None, error: TurnoutError) -> Result:
    """A line that is no request; its message begins with the line's number."""
    return _unanswered(number, request_id, custom_id, MALFORMED, f"line {number}: {error.message}", error.field)


def not_asked(line: Line, request_id: str, code: str, message: str) -> Result:
    """A line that was no longer asked, for a reason that has a name of its own."""
    return _unanswered(line.number, request_id, line.custom_id, code, message, None)


def _unanswered(
    number: int, request_id: str, custom_id: str | None, code: str, message: str, param: str | None
) -> Result:
    error = {"code": code, "message": message, "param": param, "line": number}
    return Result(number, False, {"id": request_id, "custom_id": custom_id, "response": None, "error": error})


def _record(request_id: str, custom_id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": request_id, "custom_id": custom_id, "response": response, "error": None}


def _seeded(call: GenerateCall, seed: int) -> GenerateCall:
    if call.sampling.seed is not None:
        return call
    return replace(call, sampling=call.sampling.model_copy(update={"seed": seed}))
