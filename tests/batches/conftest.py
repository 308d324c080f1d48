"""A server with batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.batches.answerer import Answerer
from tests.batches.house import House


@pytest.fixture(autouse=True)
def answerers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every answerer that a test has made: its thread and its open file else end with its process."""
    made, make = list[Answerer](), Answerer.__init__

    def noted(self: Answerer, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Answerer, "__init__", noted)
    yield
    for each in made:
        each.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with House(tmp_path, concurrency=8).open() as opened:
        yield opened
