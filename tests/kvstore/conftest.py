"""A real Redis of the tests' own, emptied before each test, and processes that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.build import SharedStore
from kvstore.redis.embedded import EmbeddedServer
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.prefixes import redis_store, shared, soon, start_server
from tests.kvstore.rights import denied


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One for the tests of a module."""
    with start_server(Path(tmp_path_factory.mktemp("redis"))) as running:
        yield running
        if running.running:
            assert denied(running) == set()


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[RedisStore]:
    """A connection to it."""
    with redis_store(server) as connected:
        connected.script("return redis.call('flushall')", [], [], soon())
        yield connected


@pytest.fixture
def opened() -> Iterator[Callable[..., SharedStore]]:
    """Opens stores of further processes, which are closed after the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(shared(*args, **kwargs))
