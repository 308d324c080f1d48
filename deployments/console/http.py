"""The console's routes: its files at /console/, and the experiment reports it plots."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from deployments.access.callers import CallerOf
from deployments.console.assets import INDEX, Assets
from deployments.console.reports import Reports
from deployments.http_paths import proxy_prefix
from turnout.console_config import ConsoleConfig


def router(config: ConsoleConfig) -> APIRouter:
    """The page, unless it is turned off, and the reports, where a folder of them is configured."""
    routes = APIRouter()
    if config.enabled:
        _add_page(routes, Assets())
    if config.experiments is not None:
        _add_reports(routes, Reports(Path(config.experiments).expanduser()))
    return routes


def _add_page(routes: APIRouter, assets: Assets) -> None:
    @routes.get("/", include_in_schema=False)
    @routes.get("/console", include_in_schema=False)
    async def to_page(request: Request) -> Response:
        # Relative where no prefix is known: that holds behind most proxies that serve us under one.
        prefix = proxy_prefix(request.scope)
        return RedirectResponse(f"{prefix}/console/" if prefix else "console/")

    @routes.get("/console/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return assets.response(INDEX, request)

    @routes.get("/console/{name}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        return assets.response(name, request)


def _add_reports(routes: APIRouter, reports: Reports) -> None:
    @routes.get("/v1/experiments")
    async def list_reports(_: CallerOf) -> Response:
        return JSONResponse({"object": "list", "data": await asyncio.to_thread(reports.listed)})

    @routes.get("/v1/experiments/{name}")
    async def report(name: str, _: CallerOf) -> Response:
        return JSONResponse(await asyncio.to_thread(reports.read, name))
