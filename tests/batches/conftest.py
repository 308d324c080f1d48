"""A server with batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.batches.house import House


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with House(tmp_path, concurrency=8).open() as opened:
        yield opened
