"""/v1/tasks: what a pool can be asked that writes no answer, and the JSON schemas of what it takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, FiniteFloat

from decoding.tasks.base import PACKAGE
from deployments.access.callers import CallerOf
from deployments.openapi.extras import Answer
from deployments.read_surface import Asked, ReadAnswer, ReadSurface, TokensRead, usage_of
from deployments.request_fields import BodyPart
from deployments.service import GenerationService
from turnout.embed_calls import TaskCall
from turnout.registry import names

PATH = "/v1/tasks"
SLOT = PACKAGE.rpartition(".")[2]


class TaskBody(BodyPart):
    """POST /v1/tasks/{name}."""

    model: str = ""
    params: Annotated[dict[str, Any], Field(description="the task's parameters; GET /v1/tasks has their schema")] = (
        Field(default_factory=dict)
    )
    deadline_s: Annotated[
        FiniteFloat | None, Field(gt=0, description="seconds the request may take; absent: the server's limit")
    ] = None


class TaskObject(Answer):
    """What a task came to; `result` is as its schema says."""

    id: str
    object: Literal["task"]
    name: str
    model: str
    result: dict[str, Any]
    usage: TokensRead


class TaskInfo(Answer):
    """A task, with the JSON schemas of its parameters and its result."""

    name: str
    summary: str
    params: dict[str, Any]
    result: dict[str, Any]


class TaskList(Answer):
    """All tasks; they are the same in every pool."""

    object: Literal["list"]
    data: list[TaskInfo]


async def answered(name: str, service: GenerationService, body: TaskBody, asked: Asked) -> ReadAnswer:
    """Ask for what a task comes to."""
    call = TaskCall(asked.id, asked.model, name, body.params, deadline_s=body.deadline_s)
    with asked.asking():
        found = await service.task(asked.attributed(call))
    made: TaskObject = {
        "id": asked.id,
        "object": "task",
        "name": name,
        "model": asked.model,
        "result": dict(found.result),
        "usage": usage_of(found.prompt_tokens),
    }
    return ReadAnswer(made, found.prompt_tokens, large=True)


def surface_of(name: str) -> ReadSurface[TaskBody]:
    """The endpoint of a task, whether there is one of the name or not: its pool knows."""
    return ReadSurface("task-", TaskBody, partial(answered, name))


SURFACES: Mapping[str, ReadSurface[TaskBody]] = {f"{PATH}/{name}": surface_of(name) for name in names(PACKAGE)}


def router(service: GenerationService) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get(PATH)
    async def list_tasks(_: CallerOf) -> Response:
        [found] = (await service.parts(frozenset({SLOT}))).values()
        data: list[TaskInfo] = [
            {"name": name, "summary": schema.pop("x-summary"), "result": schema.pop("x-result"), "params": schema}
            for name, schema in found.items()
        ]
        listed: TaskList = {"object": "list", "data": data}
        return JSONResponse(listed)

    @routes.post(PATH + "/{name}")
    async def run_task(name: str, request: Request, caller: CallerOf) -> Response:
        return await surface_of(name).respond(service, request, caller)

    return routes
