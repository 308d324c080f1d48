"""`/v1/responses/{response_id}`: responses that are kept, and their items; and what a request would read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from fastapi.responses import JSONResponse, Response

from deployments.access.callers import CallerOf
from deployments.responses.store import ResponseStore
from deployments.responses.surface import NOT_KEPT
from turnout.errors import Code, TurnoutError, invalid

if TYPE_CHECKING:
    from deployments.openapi import responses as answers

SWEEP_S = 3600.0


def router(store: ResponseStore | None) -> APIRouter:
    """The endpoints over a store; its lifespan forgets what is too old.

    Args:
        store: None: nothing is kept, and every response is said to be absent.
    """

    @asynccontextmanager
    async def sweeping(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_sweep(store)) if store is not None else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    routes = APIRouter(lifespan=sweeping)

    @routes.get("/v1/responses/{response_id}")
    async def get(response_id: str, caller: CallerOf, stream: bool = False) -> Response:
        if stream:
            raise invalid("stream", "must be false: events are sent once, while the response is written")
        kept = await asyncio.to_thread(_kept(store).load, caller.owner, response_id)
        return JSONResponse(kept.response)

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        caller: CallerOf,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        kept = await asyncio.to_thread(_kept(store).load, caller.owner, response_id)
        found = list(kept.input) if order == "asc" else list(kept.input[::-1])
        return JSONResponse(_page(found, after, limit))

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, caller: CallerOf) -> Response:
        await asyncio.to_thread(_kept(store).delete, caller.owner, response_id)
        gone: answers.DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(gone)

    return routes


def _kept(store: ResponseStore | None) -> ResponseStore:
    if store is None:
        raise TurnoutError(Code.NOT_FOUND, f"response_id: {NOT_KEPT}", "response_id")
    return store


def _page(found: list[dict[str, Any]], after: str | None, limit: int) -> answers.InputItemList:
    ids = [each["id"] for each in found]
    if after is not None:
        if after not in ids:
            raise invalid("after", "must be an id of the list")
        found = found[ids.index(after) + 1 :]
    data = found[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}


async def _sweep(store: ResponseStore) -> None:
    while True:
        with suppress(TurnoutError):  # the folder is away: it is looked at again
            await asyncio.to_thread(store.place.sweep)
        await asyncio.sleep(SWEEP_S)
