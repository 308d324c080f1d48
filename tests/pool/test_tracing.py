"""A traced request in the engine: its operations and forward passes are spans; one that is not leaves none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from pool.local_pool import LocalPool
from tests.engine.harness import answer, call_of
from tests.spans import traced_process

PROMPT = [65, 66, 67, 68, 69]


def header(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


async def test_every_operation_and_forward_of_a_traced_request_is_a_span(pool: LocalPool, tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.0) as spans:
        reply = await answer(pool, replace(call_of(PROMPT, "speculative", {"length": "fixed"}, n=2), trace=header(1)))
        await answer(pool, call_of(PROMPT, "speculative"))
        paths = spans.paths(f"{1:032x}")
        assert len(paths) == len(spans.all()), "the request that is not traced left a span"
    forwards = [path[-1] for path in paths if path[-1].endswith(" forward")]
    begin = ("pool pair", "method speculative")
    assert {path[: len(begin)] for path in paths if len(path) > 2} == {begin}
    assert ("pool pair", "queue") in paths
    assert (*begin, "large verify", "large forward") in paths
    # Both answers take part in most forwards: each stands in the trace once.
    counted = {name: meter.forwards for name, meter in reply.usage.models.items()}
    for name, count in counted.items():
        assert 0 < forwards.count(f"{name} forward") <= count


async def test_requests_in_one_batch_are_linked(pool: LocalPool, tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.0) as spans:
        calls = [replace(call_of([*PROMPT, n], "plain", ignore_eos=True), trace=header(n)) for n in (1, 2)]
        await asyncio.gather(*(answer(pool, call) for call in calls))
        found = spans.all()
    assert "large decode" in {span["name"] for span in found}
    shared = [span for span in found if span["name"] == "large forward" and span["links"]]
    assert shared
    by_id = {span["context"]["span_id"]: span for span in found}
    for span in shared:
        assert span["attributes"]["sequences"] == 2
        for link in span["links"]:
            linked = by_id[link["context"]["span_id"]]
            assert span["context"]["span_id"] in [each["context"]["span_id"] for each in linked["links"]]
            assert linked["context"]["trace_id"] != span["context"]["trace_id"]


async def test_a_request_that_fails_says_so_in_its_span(pool: LocalPool, tmp_path: Path) -> None:
    with traced_process(tmp_path, share=0.0) as spans:
        events = pool.generate(replace(call_of(PROMPT, "plain", max_tokens=200, ignore_eos=True), trace=header(3)))
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        (span,) = [span for span in spans.all() if span["name"] == "pool pair"]
    assert span["status"]["description"] == "GeneratorExit"
