"""Requests to one endpoint: connections, places, breaker, key, and what its failures mean."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pool.concurrency import ConcurrencyLimiter
from pool.endpoints.breaker import Attempt, Breaker
from pool.endpoints.shadow_places import ShadowPlaces
from pool.endpoints.sse import EventReader, TooLongEventError
from turnout.config import PoolConfig, TurnoutConfig
from turnout.endpoint_config import EndpointConfig
from turnout.errors import Code, TurnoutError, invalid

LONGEST_MESSAGE = 500  # characters of an endpoint's message that are passed on
MOST_REFUSAL = 64 << 10  # bytes of a refusal that are read
MOST_ANSWER = 64 << 20  # bytes of an answer that comes in one piece
MOST_WAITING = 100_000  # the pool's own places bound what waits
DONE = "[DONE]"
END_S = 0.05  # between the last event of a stream and its end
LIMITED, TIMED_OUT, UNAUTHORISED, FORBIDDEN, NO_SUCH = 429, 408, 401, 403, 404

log = logging.getLogger(__name__)


class AttemptError(Exception):
    """Failure of one attempt.

    Args:
        error: what the caller gets if it is the last one.
        again: whether another attempt may succeed.
    """

    def __init__(self, error: TurnoutError, again: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.again = again


@dataclass(slots=True)
class Counts:
    """What was asked of an endpoint since it was opened.

    Attributes:
        requests: attempts by outcome: ok, refused (4xx), limited (429), failed, cancelled.
        seconds: time of all attempts, from the place to the end.
        first_s: time of those that answered to the first event.
        retries: attempts after the first one of a call.
    """

    requests: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    first_s: float = 0.0
    retries: int = 0

    def ended(self, outcome: str, seconds: float) -> None:
        """Count an attempt."""
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        self.seconds += seconds


class Key:
    """API key in a file, read again when the file changes.

    Args:
        path: the file; None: there is no key.
        where: field of the configuration that names it.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be read, or holds no key.
    """

    def __init__(self, path: str | None, where: str) -> None:
        self._path = Path(path).expanduser() if path is not None else None
        self._where = where
        self._state: tuple[int, int] | None = None
        self._value = ""
        self.value()

    def value(self) -> str:
        """The key as the file has it now; as it was, where the file cannot be read any more. "": none."""
        if self._path is None:
            return ""
        try:
            stat = self._path.stat()
            state = (stat.st_mtime_ns, stat.st_size)
            if state != self._state:
                value = self._path.read_text(encoding="utf-8").strip()
                if not value or not value.isascii() or not value.isprintable() or " " in value:
                    raise invalid(self._where, f"{self._path} holds no API key: one line without blanks")
                self._value, self._state = value, state
        except (OSError, UnicodeDecodeError, TurnoutError) as error:
            if self._value:
                log.warning("%s cannot be used; the key it held is used", self._where)
            elif isinstance(error, TurnoutError):
                raise
            else:
                raise invalid(
                    self._where, f"cannot read {self._path}: {getattr(error, 'strerror', None) or error}"
                ) from None
        return self._value


class EndpointClient:
    """Client of one endpoint. All calls from one event loop.

    Args:
        name: the model's in the configuration, for messages.
        config: the endpoint's.
        clock: seconds.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the key cannot be read.
    """

    def __init__(self, name: str, config: EndpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.config = config
        self.breaker = Breaker(name, config.breaker_failures, config.breaker_open_s, clock)
        self.places = ConcurrencyLimiter(name, config.max_concurrency, MOST_WAITING, strict=True, kind="endpoint")
        self._shadow_places = ShadowPlaces(name, self.places, config.max_concurrency)
        self.counts = Counts()
        self._key = Key(config.key_file, f"models.{name}.endpoint.key_file")
        self._base = config.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def events(
        self, path: str, body: Mapping[str, Any], tenant: str, rank: int = 0, shadow: bool = False
    ) -> AsyncIterator[Any]:
        """One attempt: the JSON values of an answer as they come, of a stream or of one piece.

        Closing the iterator closes the connection, so that the server stops.

        Args:
            path: below the base of the API.
            body: of the request.
            tenant: whose it is: places are shared fairly.
            rank: of the tenant's requests that wait, the lowest goes first.
            shadow: it is a shadow, which takes no place, and no try of the breaker, from a request.

        Raises:
            AttemptError: the endpoint refuses, fails, or the answer breaks off.
            TurnoutError: UNAVAILABLE: its breaker is open; CANCELLED: no place is free for a shadow.
        """
        self.breaker.check()
        async with self._place(tenant, rank, shadow):
            with nullcontext(Attempt(lambda _: None)) if shadow else self.breaker.attempt() as attempt:
                async with self._counted() as began, aclosing(self._answer(path, body, attempt)) as values:  # type: ignore[type-var]
                    first = True
                    async for value in values:
                        if first:
                            first = False
                            if self.breaker.state != "closed":  # others need not wait for the end of the try
                                attempt.succeeded()
                            self.counts.first_s += time.perf_counter() - began
                        yield value
                attempt.succeeded()

    @asynccontextmanager
    async def _place(self, tenant: str, rank: int, shadow: bool) -> AsyncIterator[None]:
        if shadow:
            with self._shadow_places.hold():
                yield
            return
        self._shadow_places.make_room()
        async with self.places.hold(tenant, rank=rank):
            yield

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[float]:
        began, outcome = time.perf_counter(), "failed"
        try:
            yield began
            outcome = "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except AttemptError as error:
            limited = error.error.code is Code.RESOURCE_EXHAUSTED
            outcome = "limited" if limited else "refused" if error.error.code is Code.INVALID_ARGUMENT else "failed"
            raise
        finally:
            self.counts.ended(outcome, time.perf_counter() - began)

    async def _answer(self, path: str, body: Mapping[str, Any], attempt: Attempt) -> AsyncIterator[Any]:
        headers = {**self.config.headers, "Content-Type": "application/json", "Accept": "text/event-stream, */*"}
        if key := self._key.value():
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps(body).encode()
        url = f"{self._base}{path}"
        try:
            async with self._open().post(url, data=data, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    raise await self._refusal(response, attempt)
                if response.content_type == "application/json":
                    yield self._value((await _read(response, MOST_ANSWER)).decode("utf-8", "replace"), attempt)
                    return
                async for value in self._streamed(response, attempt):
                    yield value
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            attempt.failed()
            raise AttemptError(self._down(_reason(error, self.config.timeout_s)), again=True) from None
        except ValueError as error:
            attempt.failed()
            raise AttemptError(self._down(str(error)), again=True) from None

    async def _streamed(self, response: aiohttp.ClientResponse, attempt: Attempt) -> AsyncIterator[Any]:
        reader = EventReader()
        try:
            async for piece in response.content.iter_any():
                for event in reader.feed(piece):
                    if event.strip() == DONE:
                        await _finish(response)
                        return
                    yield self._value(event, attempt)
        except TooLongEventError:
            raise ValueError("it sent an event that does not end") from None
        for event in reader.end():
            if event.strip() != DONE:
                yield self._value(event, attempt)

    def _value(self, text: str, attempt: Attempt) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it sent what is no JSON") from None
        if isinstance(value, dict) and (fault := value.get("error")):
            error, again = self._fault(200, fault, None)
            if error.code is Code.UNAVAILABLE:
                attempt.failed()
            raise AttemptError(error, again)
        return value

    async def _refusal(self, response: aiohttp.ClientResponse, attempt: Attempt) -> AttemptError:
        """What a status other than 200 means."""
        try:
            text = (await _read(response, MOST_REFUSAL)).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, ValueError):  # the last: it is longer than anybody would read
            text = ""
        try:
            body = json.loads(text)
            fault = body.get("error", body) if isinstance(body, dict) else text
        except (ValueError, RecursionError):
            fault = text
        status = response.status
        if status >= 500 or status == TIMED_OUT:
            attempt.failed()
        elif status not in (LIMITED, UNAUTHORISED, FORBIDDEN, NO_SUCH) and status >= 400:
            attempt.succeeded()  # it is up, and reads requests
        return AttemptError(*self._fault(status, fault, _retry_after(response.headers)))

    def _fault(self, status: int, fault: Any, retry_after_s: float | None) -> tuple[TurnoutError, bool]:
        """The error that a refusal becomes, and whether another attempt may succeed.

        Args:
            status: of HTTP; 200: it came in a stream, and says itself what it is.
            fault: the error object, or text.
            retry_after_s: when the server wants to be asked again, in seconds.
        """
        said = fault.get("message") or fault.get("detail") if isinstance(fault, dict) else fault
        message = " ".join(str(said or "").split())
        if key := self._key.value():
            message = message.replace(key, "***")
        message = message[:LONGEST_MESSAGE]
        code = fault.get("code") if isinstance(fault, dict) else None
        if status == 200 and isinstance(code, int) and 400 <= code < 600:
            status = code
        about = f"endpoint {self.name!r}: " + (f"HTTP {status}" if status != 200 else "an error in its answer")
        if status == LIMITED:
            wait_s = 1.0 if retry_after_s is None else retry_after_s
            text = f"{about}: {message or 'too many requests'}; try again in {wait_s:.1f} s"
            return TurnoutError(Code.RESOURCE_EXHAUSTED, text, retry_after_s=wait_s), True
        if status in (UNAUTHORISED, FORBIDDEN, NO_SUCH) or 300 <= status < 400:
            log.error("%s: %s", about, message)  # the caller cannot mend it
            fields = "url, model and key_file" if status >= 400 else "url"
            text = f"{about}: see {fields} of models.{self.name}.endpoint"
            return TurnoutError(Code.UNAVAILABLE, text), False
        if 400 <= status < 500 and status != TIMED_OUT:
            param = fault.get("param") if isinstance(fault, dict) else None
            named = param[:100] if isinstance(param, str) and param and not (key and key in param) else None
            return TurnoutError(Code.INVALID_ARGUMENT, f"{about}: {message or 'it refuses the request'}", named), False
        text = f"{about}: {message}" if message else about
        return TurnoutError(Code.UNAVAILABLE, text, retry_after_s=retry_after_s), True

    def _down(self, reason: str) -> TurnoutError:
        return TurnoutError(Code.UNAVAILABLE, f"endpoint {self.name!r}: {reason}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            wait_s = self.config.timeout_s
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),  # the places are the limit
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=wait_s, sock_read=wait_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "turnout"},
            )
        return self._session


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read the end of a stream whose last event has come: only then its connection can be used again."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(END_S):
            while await response.content.readany():
                pass


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """A body of limited size.

    Raises:
        ValueError: it is longer.
    """
    parts, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > most:
            raise ValueError(f"its answer is longer than {most} bytes")
        parts.append(piece)
    return b"".join(parts)


def _reason(error: BaseException, timeout_s: float) -> str:
    """What went wrong with a connection, without addresses: callers need not know them."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # its own text names the address
        return f"cannot be reached ({os.strerror(number) if number else type(error.os_error).__name__})"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "the connection was closed before the answer was whole"
    return f"the connection failed ({type(error).__name__})"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server wants to be left alone; a date is not read."""
    try:
        seconds = float(headers.get("retry-after-ms", "")) / 1000
    except ValueError:
        try:
            seconds = float(headers.get("Retry-After", ""))
        except ValueError:
            return None
    return seconds if 0 <= seconds < 86400 else None


def check_keys(config: TurnoutConfig, pool: PoolConfig) -> None:
    """Read the keys of a pool's endpoints.

    Raises:
        TurnoutError: INVALID_ARGUMENT: one of them cannot be read.
    """
    for name in pool.members:
        if (endpoint := config.models[name].endpoint) is not None:
            Key(endpoint.key_file, f"models.{name}.endpoint.key_file")
