"""Public keys of an identity provider (JWKS), fetched from its address and again as they change."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar
from urllib.error import HTTPError, URLError

import jwt

from turnout.errors import TurnoutError

log = logging.getLogger("ray.serve")

T = TypeVar("T")
COOLDOWN_S = 10.0  # between two fetches, whatever tokens come
LEAST_S = 0.05  # between two that fail


class FetchedKeys(Generic[T]):
    """Key set at a URL, fetched by a thread of its own; while that fails, what it said before holds.

    A server starts without its provider: what cannot be fetched is a fault, and is tried again.

    Args:
        url: of the set.
        read: makes keys of the JSON object there; raises TurnoutError where they are of no use.
        refresh_s: time after which it is fetched again, in seconds.
        timeout_s: longest that one fetch waits for the provider, in seconds.
        cooldown_s: shortest time between two fetches, in seconds.
    """

    def __init__(
        self,
        url: str,
        read: Callable[[dict[str, Any]], T],
        refresh_s: float,
        timeout_s: float,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        self._client = jwt.PyJWKClient(url, cache_jwk_set=False, timeout=timeout_s)
        self._read = read
        self._refresh_s, self._timeout_s, self._cooldown_s = refresh_s, timeout_s, cooldown_s
        self._value: T | None = None
        self._fault: str | None = None
        self._lock = threading.Lock()
        self._asked: Future[None] | None = None  # ends with the fetch that is in progress or asked for
        self._fetched_at = -float("inf")
        self._wake, self._over = threading.Event(), False
        self._fetch()
        self._thread = threading.Thread(target=self._watch, name="fetch keys", daemon=True)
        self._thread.start()

    @property
    def value(self) -> T | None:
        """The keys; None: they were never fetched."""
        return self._value

    @property
    def fault(self) -> str | None:
        """Why the last fetch gave no keys; None: it did."""
        return self._fault

    async def look_again(self) -> None:
        """Wait for the fetch in progress, or for one that begins now; if one has just ended, do not wait."""
        with self._lock:
            if self._asked is None:
                if time.monotonic() - self._fetched_at < self._cooldown_s:
                    return
                self._asked = Future()
                self._wake.set()
            asked = self._asked
        try:
            # A fetch can take longer than one wait for the provider: to find its address, or to read it byte by byte.
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(asked)), self._timeout_s + 1.0)
        except TimeoutError:
            return

    def close(self) -> None:
        """Fetch no more."""
        self._over = True
        self._wake.set()
        self._thread.join(self._timeout_s)

    def _watch(self) -> None:
        while not self._over:
            pause_s = self._refresh_s if self._fault is None else max(min(self._cooldown_s, self._refresh_s), LEAST_S)
            self._wake.wait(pause_s)
            self._wake.clear()
            if not self._over:
                self._fetch()

    def _fetch(self) -> None:
        with self._lock:
            self._fetched_at = time.monotonic()
            self._asked = asked = self._asked or Future()
        try:
            self._value = self._read(self._client.fetch_data())
        except TurnoutError as error:
            self._failed(error.message)
        except Exception as error:
            self._failed(f"access.jwt.jwks_url: {_reason(error)}")
        else:
            if self._fault is not None:
                log.info("access.jwt.jwks_url: fetched again")
            self._fault = None
        with self._lock:
            self._asked = None
        asked.set_result(None)

    def _failed(self, fault: str) -> None:
        if fault != self._fault:
            log.warning("%s; %s", fault, "no token is accepted" if self._value is None else "the previous keys hold")
        self._fault = fault


def _reason(error: Exception) -> str:
    """Return why a fetch failed, in a clause; nothing of what was fetched is shown."""
    cause = error.__cause__ if isinstance(error, jwt.PyJWKClientConnectionError) else error
    if isinstance(cause, HTTPError):
        return f"the address answers with HTTP status {cause.code}"
    if isinstance(cause, TimeoutError) or (isinstance(cause, URLError) and isinstance(cause.reason, TimeoutError)):
        return "the address does not answer in time"
    if isinstance(cause, URLError):
        return f"the address cannot be reached ({cause.reason})"
    if isinstance(cause, (ValueError, RecursionError, jwt.PyJWTError)):
        return "the answer is no JSON object"
    return f"cannot be fetched ({type(cause).__name__})"
