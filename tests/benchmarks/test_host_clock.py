"""The clock of the host: what it counts while an engine decodes over layers that cost nothing."""

from __future__ import annotations

from benchmarks.bench_host import STEPS, open_engine_ways
from benchmarks.host_clock import PARTS


async def test_every_step_of_every_row_is_counted() -> None:
    async with open_engine_ways(0.0) as ways:
        for way in ways:
            found = await way.measure(3)
            assert STEPS <= found.steps < STEPS + 3  # prompts may be read in steps of their own
            assert set(found.parts_s) == set(PARTS)
            assert all(seconds > 0 for seconds in found.parts_s.values())
            assert (found.chunks > 0) == (way.name == "method")
