from contextlib import AsyncExitStack

import pytest

from tests.pool.endpoints.scripted import Site


@pytest.fixture
async def site():
    async with AsyncExitStack() as stack:
        yield Site(stack)
