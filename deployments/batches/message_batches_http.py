"""`/v1/messages/batches`, as Anthropic's clients use it: batches whose requests come in the body."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.access.callers import Caller, CallerOf
from deployments.batches import message_batches as objects
from deployments.batches.counted import counted
from deployments.batches.reading import numbered_lines
from deployments.batches.records import BatchRecord, Counts
from deployments.batches.store import BatchStore
from deployments.messages.http import BATCHES_PATH
from deployments.messages.http import PATH as MESSAGES
from deployments.schemas import read_json
from turnout.errors import Code, TurnoutError, invalid
from turnout.json_lines import json_line
from turnout.registry import explain
from turnout.types import MAX_SEED

if TYPE_CHECKING:
    from deployments.service import GenerationService

MAX_BODY_BYTES = 64 << 20  # held in memory; larger ones go through /v1/files and /v1/batches
WINDOW = "24h"
WINDOW_S = 86400
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
Limit = Annotated[int, Query(ge=1, le=1000)]


class BatchedMessage(BaseModel):
    """Request of a message batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    custom_id: Annotated[str, Field(description="letters, digits, `_` and `-`, at most 64; unique in the batch")]
    params: Annotated[dict[str, Any], Field(description="the body of a message's request")]


class NewMessageBatch(BaseModel):
    """POST /v1/messages/batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: Annotated[list[BatchedMessage], Field(min_length=1)]


def add_routes(routes: APIRouter, store: BatchStore, service: GenerationService) -> None:
    """Add the endpoints; batches are those of `/v1/batches` whose lines are for `/v1/messages`."""

    @routes.post(BATCHES_PATH)
    async def create(request: Request, caller: CallerOf) -> Response:
        async with counted(service, caller):
            await asyncio.to_thread(store.check_room, caller.owner)
            most = min(MAX_BODY_BYTES, store.config.max_file_bytes)
            data = await request.app.state.bodies.read(request, caller.tenant, most)
        record = await asyncio.to_thread(_add, store, service, caller, data)
        return JSONResponse(_shown(store, record, request))

    @routes.get(BATCHES_PATH)
    async def list_batches(
        request: Request,
        caller: CallerOf,
        after_id: str | None = None,
        before_id: str | None = None,
        limit: Limit = 20,
    ) -> Response:
        found = await asyncio.to_thread(store.batches, caller.owner)
        page, has_more = _page([each for each in found if each.endpoint == MESSAGES], after_id, before_id, limit)
        data = await asyncio.to_thread(lambda: [_shown(store, each, request) for each in page])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        made: objects.MessageBatchList = {"data": data, "first_id": first, "last_id": last, "has_more": has_more}
        return JSONResponse(made)

    @routes.get(f"{BATCHES_PATH}/{{batch_id}}")
    async def get_batch(batch_id: str, request: Request, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(_record, store, caller, batch_id)
        return JSONResponse(await asyncio.to_thread(_shown, store, record, request))

    @routes.post(f"{BATCHES_PATH}/{{batch_id}}/cancel")
    async def cancel(batch_id: str, request: Request, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(_record, store, caller, batch_id)
        if record.ended:
            raise invalid("batch_id", f"{batch_id} has ended")
        await asyncio.to_thread(store.cancel, record)
        record = await asyncio.to_thread(_record, store, caller, batch_id)
        return JSONResponse(await asyncio.to_thread(_shown, store, record, request))

    @routes.delete(f"{BATCHES_PATH}/{{batch_id}}")
    async def delete(batch_id: str, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(_record, store, caller, batch_id)
        await asyncio.to_thread(store.delete_batch, record)
        gone: objects.DeletedMessageBatch = {"id": batch_id, "type": "message_batch_deleted"}
        return JSONResponse(gone)

    @routes.get(f"{BATCHES_PATH}/{{batch_id}}/results")
    async def results(batch_id: str, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(_record, store, caller, batch_id)
        if not record.ended:
            raise invalid("batch_id", f"{batch_id} has no results yet: it is {record.status}")
        lines = await asyncio.to_thread(_results, store, record)
        return StreamingResponse(lines, media_type="application/x-jsonl")


def _add(store: BatchStore, service: GenerationService, caller: Caller, data: bytes) -> BatchRecord:
    """Keep the requests of a body as a file, and a batch of it."""
    lines = [_line(each) for each in _requests(data, store.config.max_requests)]
    for place, each in enumerate(lines):
        if len(each) > service.max_body_bytes:
            raise invalid(f"requests[{place}]", f"at most {service.max_body_bytes} bytes")
    now, number = int(time.time()), secrets.token_hex(12)
    file = store.add_file(caller.owner, f"msgbatch_{number}.jsonl", "batch", lines)
    record = BatchRecord(
        id=f"batch_{number}",
        tenant=caller.tenant,
        key_id=caller.key_id,
        entry=caller.entry,
        seed=secrets.randbelow(MAX_SEED),
        endpoint=MESSAGES,
        input_file_id=file.id,
        completion_window=WINDOW,
        created_at=now,
        expires_at=now + WINDOW_S,
        request_counts=Counts(total=len(lines)),
    )
    try:
        store.add_batch(record)
    except TurnoutError:
        store.delete_file(caller.owner, file.id)
        raise
    return record


def _line(request: BatchedMessage) -> bytes:
    """Return a request as a line of a file."""
    line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": request.params}
    return f"{json_line(line)}\n".encode()


def _requests(data: bytes, most: int) -> list[BatchedMessage]:
    try:
        wanted = NewMessageBatch.model_validate(read_json(data))
    except ValidationError as error:
        raise explain(error, "", NewMessageBatch) from None
    if len(wanted.requests) > most:
        raise invalid("requests", f"at most {most}")
    seen = set[str]()
    for place, each in enumerate(wanted.requests):
        field = f"requests[{place}].custom_id"
        if not CUSTOM_ID.fullmatch(each.custom_id):
            raise invalid(field, "must be 1 to 64 letters, digits, `_` and `-`")
        if each.custom_id in seen:
            raise invalid(field, f"{each.custom_id!r} is that of an earlier request")
        seen.add(each.custom_id)
    return wanted.requests


def _record(store: BatchStore, caller: Caller, batch_id: str) -> BatchRecord:
    """Return a batch of messages of the caller's.

    Raises:
        TurnoutError: NOT_FOUND.
    """
    if batch_id.startswith(objects.PREFIX):
        record = store.batch(caller.owner, batch_id.removeprefix(objects.PREFIX))
        if record.endpoint == MESSAGES:
            return record
    raise TurnoutError(Code.NOT_FOUND, f"batch_id: there is no {batch_id[:100]!r}", "batch_id")


def _shown(store: BatchStore, record: BatchRecord, request: Request) -> objects.MessageBatch:
    num_expired = 0
    if record.status == "expired":
        num_expired = sum(map(objects.is_expired, _rows(store, record, record.error_file_id)))
    url = f"{str(request.base_url).rstrip('/')}{BATCHES_PATH}/{objects.shown_id(record)}/results"
    return objects.batch_object(record, num_expired, url)


def _results(store: BatchStore, record: BatchRecord) -> Iterator[str]:
    """Lines of the results.

    Raises:
        TurnoutError: NOT_FOUND: a file of them was deleted.
    """
    for file_id in (record.output_file_id, record.error_file_id):
        if file_id is not None:
            store.content(record.owner, file_id)
    answers, failures = (_rows(store, record, each) for each in (record.output_file_id, record.error_file_id))
    asked = () if record.status == "completed" else _asked(store, record)
    return objects.results(answers, failures, asked)


def _rows(store: BatchStore, record: BatchRecord, file_id: str | None) -> Iterator[dict[str, Any]]:
    """Records of a file of answers; of one that is not there, none."""
    if file_id is not None:
        with store.content(record.owner, file_id).open("rb") as file:
            yield from map(json.loads, file)


def _asked(store: BatchStore, record: BatchRecord) -> Iterator[str]:
    """Ids of all requests; of a file that was deleted, none."""
    try:
        path = store.content(record.owner, record.input_file_id)
    except TurnoutError:
        return
    with path.open("rb") as file:
        for _, data in numbered_lines(file, store.config.max_file_bytes):
            yield json.loads(data)["custom_id"]


def _page(
    found: list[BatchRecord], after_id: str | None, before_id: str | None, limit: int
) -> tuple[list[BatchRecord], bool]:
    """Return a page of a list, the newest first, and whether there is more in its direction."""
    if after_id is not None and before_id is not None:
        raise invalid("before_id", "must be absent where there is an after_id")
    place: Callable[[str, str], int] = _place([objects.shown_id(each) for each in found])
    if before_id is not None:
        end = place("before_id", before_id)
        return found[max(end - limit, 0) : end], end > limit
    start = 0 if after_id is None else place("after_id", after_id) + 1
    return found[start : start + limit], len(found) > start + limit


def _place(ids: list[str]) -> Callable[[str, str], int]:
    def place(field: str, value: str) -> int:
        if value not in ids:
            raise invalid(field, "must be an id of the list")
        return ids.index(value)

    return place
