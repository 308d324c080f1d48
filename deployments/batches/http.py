"""`/v1/files` and `/v1/batches`, as OpenAI's clients use them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.types import Message

from deployments.access.callers import CallerOf
from deployments.batches import message_batches_http
from deployments.batches.counted import counted
from deployments.batches.disk import named
from deployments.batches.lines import ENDPOINTS
from deployments.batches.records import BatchRecord
from deployments.batches.runner import BatchRunner
from deployments.batches.store import BatchStore
from deployments.bodies import check_encoding
from deployments.messages.http import BATCHES_PATH
from deployments.schemas import read_json
from turnout.batches_config import BatchesConfig
from turnout.errors import Code, TurnoutError, invalid
from turnout.registry import explain
from turnout.types import MAX_SEED

if TYPE_CHECKING:
    from deployments.openapi import answers
    from deployments.service import GenerationService

UNITS_S = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400
FORM_BYTES = 64 << 10  # of a form, without its file
PIECE = 1 << 20
MAX_BODY_BYTES = 64 << 10
Limit = Annotated[int, Query(ge=1, le=10_000)]


class NewBatch(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Field(pattern=r"^[1-9]\d{0,4}[mhd]$")] = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[dict[str, Any] | None, Field(description="accepted and ignored")] = None


def router(service: GenerationService, config: BatchesConfig | None) -> APIRouter:
    """The endpoints over a service; its lifespan works on the batches.

    Args:
        service: answers the requests of batches.
        config: where batches are kept; None: the endpoints are there and say that none are.
    """
    if config is None:
        return _absent()
    store = BatchStore(config)

    @asynccontextmanager
    async def working(_: FastAPI) -> AsyncIterator[None]:
        async with BatchRunner(store, service).running():
            yield

    routes = APIRouter(lifespan=working)
    _add_files(routes, store, service)
    _add_batches(routes, store, service)
    message_batches_http.add_routes(routes, store, service)
    return routes


def _absent() -> APIRouter:
    routes = APIRouter()

    @routes.api_route("/v1/files{rest:path}", methods=["GET", "POST", "DELETE"])
    @routes.api_route("/v1/batches{rest:path}", methods=["GET", "POST"])
    @routes.api_route(f"{BATCHES_PATH}{{rest:path}}", methods=["GET", "POST", "DELETE"])
    async def refuse(rest: str) -> Response:
        raise TurnoutError(Code.NOT_FOUND, "this server takes no batches: its configuration has no section batches")

    return routes


def _add_files(routes: APIRouter, store: BatchStore, service: GenerationService) -> None:
    retention_s = store.config.retention_s

    @routes.post("/v1/files")
    async def upload(request: Request, caller: CallerOf) -> Response:
        async with counted(service, caller):
            await asyncio.to_thread(store.check_room, caller.owner)
            form = await _form(request, caller.tenant, store.config.max_file_bytes)
        try:
            purpose, file = form.get("purpose"), form.get("file")
            if purpose != "batch":
                raise invalid("purpose", f"must be batch (got {str(purpose)[:40]!r})")
            if not isinstance(file, UploadFile):
                raise invalid("file", "is needed: a part of the form with a file name")
            name = file.filename or "upload.jsonl"
            record = await asyncio.to_thread(store.add_file, caller.owner, name, "batch", _pieces(file.file))
        finally:
            await form.close()
        return JSONResponse(record.shown(retention_s))

    @routes.get("/v1/files")
    async def list_files(
        caller: CallerOf,
        purpose: str | None = None,
        after: str | None = None,
        limit: Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        found = await asyncio.to_thread(store.files, caller.owner)
        found = [each for each in found if purpose in (None, each.purpose)]
        found = found if order == "desc" else found[::-1]
        return JSONResponse(_page(found, after, limit, lambda each: each.shown(retention_s)))

    @routes.get("/v1/files/{file_id}")
    async def get_file(file_id: str, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(store.file, caller.owner, file_id)
        return JSONResponse(record.shown(retention_s))

    @routes.get("/v1/files/{file_id}/content")
    async def content(file_id: str, caller: CallerOf) -> Response:
        path = await asyncio.to_thread(store.content, caller.owner, file_id)
        return FileResponse(path, media_type="application/jsonl")

    @routes.delete("/v1/files/{file_id}")
    async def delete(file_id: str, caller: CallerOf) -> Response:
        await asyncio.to_thread(store.delete_file, caller.owner, file_id)
        gone: answers.DeletedFile = {"id": file_id, "object": "file", "deleted": True}
        return JSONResponse(gone)


def _add_batches(routes: APIRouter, store: BatchStore, service: GenerationService) -> None:
    @routes.post("/v1/batches")
    async def create(request: Request, caller: CallerOf) -> Response:
        async with counted(service, caller):
            wanted = _new_batch(await _body(request, caller.tenant))
        await asyncio.to_thread(store.file, caller.owner, wanted.input_file_id)
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=caller.tenant,
            key_id=caller.key_id,
            entry=caller.entry,
            seed=secrets.randbelow(MAX_SEED),
            created_at=now,
            expires_at=now + _seconds(wanted.completion_window),
            **wanted.model_dump(exclude={"output_expires_after"}),
        )
        await asyncio.to_thread(store.add_batch, record)
        return JSONResponse(record.shown())

    @routes.get("/v1/batches")
    async def list_batches(caller: CallerOf, after: str | None = None, limit: Limit = 20) -> Response:
        found = await asyncio.to_thread(store.batches, caller.owner)
        return JSONResponse(_page(found, after, limit, lambda each: each.shown()))

    @routes.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(store.batch, caller.owner, batch_id)
        return JSONResponse(record.shown())

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, caller: CallerOf) -> Response:
        record = await asyncio.to_thread(store.batch, caller.owner, batch_id)
        if record.ended:
            raise invalid("batch_id", f"{batch_id} has ended: it is {record.status}")
        await asyncio.to_thread(store.cancel, record)
        return JSONResponse((await asyncio.to_thread(store.batch, caller.owner, batch_id)).shown())


def _new_batch(values: dict[str, Any]) -> NewBatch:
    try:
        wanted = NewBatch.model_validate(values)
    except ValidationError as error:
        raise explain(error, "", NewBatch) from None
    if wanted.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"must be {' or '.join(ENDPOINTS)} (got {wanted.endpoint[:100]!r})")
    if _seconds(wanted.completion_window) > MAX_WINDOW_S:
        raise invalid("completion_window", f"must be at most {MAX_WINDOW_S // 86400}d")
    return wanted


def _seconds(window: str) -> int:
    return int(window[:-1]) * UNITS_S[window[-1]]


def _page(found: Sequence[Any], after: str | None, limit: int, shown: Any) -> answers.FileList:
    """Return a page of a list, in OpenAI's form; `after` is the last id of the page before."""
    ids = [each.id for each in found]
    if after is not None:
        if after not in ids:
            raise invalid("after", "must be an id of the list")
        found = found[ids.index(after) + 1 :]
    data = [shown(each) for each in found[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}


async def _form(request: Request, tenant: str, max_file_bytes: int) -> Any:
    """The parts of a form; files lie on disk, and no more is read than may come.

    Raises:
        HTTPException, TurnoutError: see `Bodies.in_time`; HTTPException: 415; INVALID_ARGUMENT: too large;
            UNAVAILABLE: the disk is full.
    """
    check_encoding(request)
    left = max_file_bytes + FORM_BYTES
    too_large = invalid("file", f"must have at most {max_file_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > left:
        raise too_large

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise too_large
        return message

    # A file of more than a megabyte lies in a temporary folder until all of it has come.
    async with request.app.state.bodies.in_time(tenant, left):
        with named("the temporary folder for uploads"):
            return await Request(request.scope, receive).form(max_files=1, max_fields=16)


async def _body(request: Request, tenant: str) -> dict[str, Any]:
    check_encoding(request)
    data = bytearray()
    async with request.app.state.bodies.in_time(tenant, MAX_BODY_BYTES):
        async for piece in request.stream():
            data += piece
            if len(data) > MAX_BODY_BYTES:
                raise invalid("body", f"at most {MAX_BODY_BYTES} bytes")
    values = read_json(bytes(data))
    # Elsewhere it changes nothing and is dropped; here it is kept and shown.
    return values | {name: given for name, given in json.loads(data).items() if name == "metadata"}


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(file.read, PIECE), b"")
