"""A client of an ASGI application in this process: one request, its answer message by message, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any


async def post(app: Any, path: str, body: bytes, take: Callable[[Mapping[str, Any]], None]) -> None:
    """Post JSON and wait for the end of the answer.

    Args:
        app: the application.
        path: of the endpoint.
        body: JSON.
        take: gets each message of the answer as it is sent.
    """
    never, sent = asyncio.Event(), False
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {}, "extensions": {},
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await never.wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        take(message)

    await app(scope, receive, send)
