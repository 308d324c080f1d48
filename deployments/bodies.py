"""Reading a request's body, up to a size, and parsing it without holding up everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

TOO_LARGE = 413
LARGE = 256 << 10  # bytes
T = TypeVar("T")
# One at a time: they take turns with the event loop for the interpreter, and several would take most of them.
_parser = ThreadPoolExecutor(1, thread_name_prefix="large bodies")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        HTTPException: 413 where it is larger: at once, where its length is told, or as soon as too much has come.
    """
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > max_bytes:
        raise too_large(max_bytes)
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > max_bytes:
            raise too_large(max_bytes)
    return bytes(parts)


async def parsed(data: bytes, parse: Callable[[bytes], T]) -> T:
    """What a body says; a large one is parsed in a thread."""
    if len(data) <= LARGE:
        return parse(data)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, data)


def too_large(max_bytes: int) -> HTTPException:
    """What is left of the body is not read: the connection ends with the answer."""
    return HTTPException(TOO_LARGE, f"body: at most {max_bytes} bytes", headers={"Connection": "close"})
