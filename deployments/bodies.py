"""Reading a request's body, up to a size, and parsing it without holding up everybody else."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

from turnout.errors import busy, invalid

TOO_LARGE, TOO_LATE, ENCODED = 413, 408, 415
CLOSE = {"Connection": "close"}
SLOW_S = 1.0
MOST_SLOW = 128  # of all tenants; a tenant has half of them at most
LEAST_S, SLOWEST_BYTES_S = 30.0, 128 << 10
LARGE = 256 << 10  # bytes
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # UTF-8 has no other way to write one
T = TypeVar("T")
# One at a time: they take turns with the event loop for the interpreter, and several would take most of them.
_parser = ThreadPoolExecutor(1, thread_name_prefix="large bodies")


class Bodies:
    """Reads requests' bodies. One that comes slowly holds a place of the ingress: of which there is a limited number.

    Args:
        max_bytes: the largest.
        slow_s: one that is not complete after this time, in seconds, is slow.
        most_s: one that is not whole then is given up; absent: as long as a slow line takes for the largest.
    """

    def __init__(self, max_bytes: int, slow_s: float = SLOW_S, most_s: float | None = None) -> None:
        self._max_bytes = max_bytes
        self._slow_s = slow_s
        self._most_s = most_s
        self.slow: dict[str, dict[asyncio.Timeout, None]] = {}  # by tenant, the oldest first

    async def read(self, request: Request, tenant: str, max_bytes: int | None = None) -> bytes:
        """The whole body.

        Args:
            request: whose body is read.
            tenant: who sends it.
            max_bytes: the largest; None: as for all.

        Raises:
            HTTPException: 415 where it is compressed; 413 where it is larger: at once, where its length is known, or as
                soon as too much has come; 408 where it takes too long.
            TurnoutError: RESOURCE_EXHAUSTED: it is slow, and others that came later are, too.
        """
        check_encoding(request)
        most = self._max_bytes if max_bytes is None else max_bytes
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large(most)
        parts = bytearray()
        async with self.in_time(tenant, most):
            async for part in request.stream():
                parts += part
                if len(parts) > most:
                    raise too_large(most)
        return bytes(parts)

    @asynccontextmanager
    async def in_time(self, tenant: str, max_bytes: int) -> AsyncIterator[None]:
        """Limit the time in which a body of at most `max_bytes` is read in the context.

        Raises:
            HTTPException: 408, see `read`.
            TurnoutError: RESOURCE_EXHAUSTED, see `read`.
        """
        most_s = self._most_s or LEAST_S + max_bytes / SLOWEST_BYTES_S
        limit = asyncio.timeout(most_s)
        timer = asyncio.get_running_loop().call_later(self._slow_s, self._slows, tenant, limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit in self.slow.get(tenant, ()):
                raise HTTPException(TOO_LATE, f"body: not whole after {most_s:g} s", headers=CLOSE) from None
            raise busy("body: too many come slowly just now", "body") from None
        finally:
            timer.cancel()
            self._forget(tenant, limit)

    def _slows(self, tenant: str, limit: asyncio.Timeout) -> None:
        """A body is slow: where there are too many such, the one that has been for longest is given up.

        Not this one: it may be whole already, and wait for us, where thousands have come at once.
        """
        mine = self.slow.setdefault(tenant, {})
        mine[limit] = None
        whose = tenant
        if len(mine) <= MOST_SLOW // 2:
            if sum(map(len, self.slow.values())) <= MOST_SLOW:
                return
            whose = max(self.slow, key=lambda each: len(self.slow[each]))
        oldest = next(iter(self.slow[whose]))
        self._forget(whose, oldest)
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, tenant: str, limit: asyncio.Timeout) -> None:
        held = self.slow.get(tenant, {})
        held.pop(limit, None)
        if not held:
            self.slow.pop(tenant, None)


async def parsed(data: bytes, parse: Callable[[bytes], T]) -> T:
    """What a body says; a large one is parsed in a thread."""
    if len(data) <= LARGE:
        return parse(data)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse, data)


def check_encoding(request: Request) -> None:
    """Refuse a body that is compressed or otherwise encoded, before any of it is read.

    Raises:
        HTTPException: 415, naming the first content coding that is not `identity` (RFC 9110, 8.4 and 15.5.16).
    """
    for header in request.headers.getlist("content-encoding"):
        for coding in map(str.strip, header.split(",")):
            if coding.lower() not in ("", "identity"):
                message = f"Content-Encoding: {coding[:40]!r} is not supported; send the body as it is (identity)"
                raise HTTPException(ENCODED, message, headers={**CLOSE, "Accept-Encoding": "identity"})


def too_large(max_bytes: int) -> HTTPException:
    """What is left of the body is not read: the connection ends with the answer."""
    return HTTPException(TOO_LARGE, f"body: at most {max_bytes} bytes", headers=CLOSE)


def read_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        TurnoutError: not UTF-8, not JSON, not an object, or text that has no UTF-8 form.
    """
    try:
        values = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid("body", f"is no valid UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise invalid("body", f"is malformed JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (RecursionError, ValueError):
        raise invalid("body", "is malformed JSON: nested too deeply, or a number is too long") from None
    if not isinstance(values, dict):
        raise invalid("body", "must be a JSON object")
    if ESCAPED_SURROGATE.search(data):
        _check_surrogates(values)
    return values


def _check_surrogates(values: dict[str, Any]) -> None:
    for name, value in values.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise invalid(name.encode("ascii", "replace").decode(), "holds half a surrogate pair") from None


def _refuse_constant(text: str) -> NoReturn:
    raise invalid("body", f"is malformed JSON: {text} is no JSON number")
