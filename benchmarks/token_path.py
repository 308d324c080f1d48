"""The way of a token: source files that run for it, and nested generators between its method and its socket.

`python -m benchmarks.token_path` streams one answer of the demo pair over HTTP, with the models in the replica's
process and everything in this one: ASGI application, service, backend with a handle that skips Ray Serve, replica,
pool, method, engine. It counts, for the whole request and for a token in the middle of it, files of this repository in
which a function ran, and the generators through which a piece of text was handed up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from inspect import CO_ASYNC_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.asgi_client import post
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica, load_engine
from deployments.remote import RemoteBackend
from deployments.service import GenerationService
from turnout.config import TurnoutConfig

ROOT = Path(__file__).resolve().parent.parent
BODY = {"model": "demo", "prompt": "What is 69*9-32*6+44?", "max_tokens": 60, "temperature": 0, "stream": True}


class Seen:
    """Code that ran in any thread since the last `clear`."""

    def __init__(self) -> None:
        self.code: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of a call; installed with `sys.setprofile`."""
        if event == "call":
            self.code.add(frame.f_code)

    def files(self) -> list[str]:
        """Files of this repository in which a function ran."""
        paths = {Path(code.co_filename) for code in self.code if code.co_name != "<module>"}
        own = {path.relative_to(ROOT).as_posix() for path in paths if path.is_relative_to(ROOT)}
        return sorted(name for name in own if not name.startswith((".", "benchmarks/")))

    def generators(self) -> list[str]:
        """Asynchronous generators of this repository that ran."""
        own = [c for c in self.code if c.co_flags & CO_ASYNC_GENERATOR and Path(c.co_filename).is_relative_to(ROOT)]
        places = {f"{Path(code.co_filename).relative_to(ROOT)}: {code.co_qualname}" for code in own}
        return sorted(place for place in places if not place.startswith((".", "benchmarks/")))


class LocalHandle:
    """A handle of a deployment that calls one replica in this process."""

    def __init__(self, replica: PoolReplica) -> None:
        self.stream = self.complete = self
        self._replica = replica

    def options(self, **_: Any) -> LocalHandle:
        """Streams only."""
        return self

    def remote(self, call: Any) -> LocalResponse:
        """Call the replica."""
        return LocalResponse(self._replica.stream(call))


class LocalResponse:
    """What a handle answers: batches of events, and a way to stop them."""

    def __init__(self, batches: AsyncIterator[Any]) -> None:
        self._batches = batches

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._batches

    def cancel(self) -> None:
        """Nothing to do: the generator is closed by its reader."""


async def stream(app: Any, seen: Seen) -> tuple[Seen, Seen]:
    """Ask once; returns what ran for the whole request, and between two pieces of text in the middle of it."""
    whole, token, pieces = Seen(), Seen(), 0

    def take(message: Mapping[str, Any]) -> None:
        nonlocal pieces
        whole.code |= seen.code
        if b'"text"' in message.get("body", b""):
            pieces += 1
            if pieces == 6:  # from one piece of text to the next, in the middle of the answer
                token.code |= seen.code
        seen.code.clear()

    await post(app, "/v1/completions", json.dumps(BODY).encode(), take)
    whole.code |= seen.code
    assert pieces >= 8, pieces
    return whole, token


async def measure() -> dict[str, Any]:
    """Counts, after one request that is not counted."""
    config = TurnoutConfig.demo()
    config = config.model_copy(update={"kvstore": config.kvstore.model_copy(update={"url": "off"})})
    seen = Seen()
    threading.setprofile(seen)
    replica = PoolReplica("demo", config, load_engine)
    service = GenerationService(config, {"demo": RemoteBackend("demo", LocalHandle(replica))}, Metrics())
    app = build_http(service)
    sys.setprofile(seen)
    try:
        await stream(app, seen)
        whole, token = await stream(app, seen)
    finally:
        sys.setprofile(None)
    return {
        "files of a request": whole.files(),
        "files of a token": token.files(),
        "generators of a token": token.generators(),
    }


def main() -> None:
    """Print counts, and with `--list` what was counted."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--list", action="store_true", help="print files and generators too")
    asked = options.parse_args()
    for what, found in asyncio.run(measure()).items():
        print(f"{what}: {len(found)}")  # noqa: T201
        if asked.list:
            print("".join(f"  {name}\n" for name in found), end="")  # noqa: T201


if __name__ == "__main__":
    main()
