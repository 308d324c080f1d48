"""Prompts of a batch that begin alike are read once, in whatever order its file has them: on a real, small cache."""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.batches import job as job_module
from deployments.batches.job import BatchJob
from deployments.batches.lines import Line
from deployments.batches.records import BatchRecord
from deployments.batches.store import BatchStore
from deployments.local_backend import LocalBackend
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica, load_engine
from deployments.service import GenerationService
from tests.batches.house import jsonl, line, read
from tests.near_pair import save_near_pair
from turnout.config import parse_config

PREFIXES, EACH, LENGTH = 16, 5, 300  # 4,800 tokens of beginnings; the cache below has room for 2,048
LINES = PREFIXES * EACH


class Server:
    """What a server answers batches with, less its front end; each batch is of a tenant of its own, whom no other's
    cache serves."""

    def __init__(self, folder: Path) -> None:
        save_near_pair(folder)
        model = {"dtype": "float32", "kv_memory_bytes": 1 << 20}
        config = parse_config(
            {
                "models": {role: {"path": str(folder / role), **model} for role in ("small", "large")},
                "pools": {"demo": {"small": "small", "large": "large"}},
                "engine": {"threads": 1},
                "batches": {"folder": str(folder / "batches"), "concurrency": 1},
            }
        )
        assert config.batches is not None
        self.store = BatchStore(config.batches)
        self.replica = PoolReplica("demo", config, load_engine)
        self.service = GenerationService(config, {"demo": LocalBackend(self.replica)}, Metrics())

    def add(self, tenant: str, data: bytes) -> BatchRecord:
        file, now = self.store.add_file(tenant, "in.jsonl", "batch", [data]), int(time.time())
        times = {"created_at": now, "expires_at": now + 3600, "completion_window": "1h"}
        made = {"id": f"batch_{tenant.encode().hex():0>24}", "endpoint": "/v1/completions", "input_file_id": file.id}
        record = BatchRecord.model_validate({"tenant": tenant, "key_id": "", "seed": 1, **made, **times})
        self.store.add_batch(record)
        return record

    def work_on(self, record: BatchRecord) -> asyncio.Task[None]:
        kept = self.store.batch(record.tenant, record.id)  # as a process that is begun anew reads it
        self.job = BatchJob(kept, self.store, self.service, asyncio.Semaphore(1))
        return asyncio.create_task(self.job.run())

    async def answered(self, tenant: str, data: bytes) -> BatchRecord:
        await self.work_on(record := self.add(tenant, data))
        return self.store.batch(tenant, record.id)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    yield made
    await made.replica._pool.close()


def prompts() -> list[str]:
    """Of each beginning one after the other, and then again."""
    drawn = random.Random(5)
    beginnings = ["".join(drawn.choices(string.ascii_letters, k=LENGTH)) for _ in range(PREFIXES)]
    return [f"{beginning} {number}" for number in range(EACH) for beginning in beginnings]


def file_of(asked: list[str]) -> bytes:
    plain = {"decoding": {"method": "plain", "params": {"model": "large"}}, "max_tokens": 2}
    return jsonl(line(f"id-{number}", prompt, **plain) for number, prompt in enumerate(asked))


async def test_beginnings_that_take_turns_are_cached_as_those_of_a_sorted_file(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = await server.answered("mixed", file_of(prompts()))
    in_order = await server.answered("in order", file_of(sorted(prompts())))
    assert in_order.usage.cached_tokens > 0.7 * in_order.usage.input_tokens
    assert mixed.usage.cached_tokens >= 0.95 * in_order.usage.cached_tokens
    path = server.store.content("mixed", str(mixed.output_file_id))
    assert [row["custom_id"] for row in read(path.read_bytes())] == [f"id-{number}" for number in range(LINES)]
    # The same file as it is: so the cache is too small to hold them all.
    monkeypatch.setattr(job_module, "beginning", lambda _: "")
    as_it_is = await server.answered("as it is", file_of(prompts()))
    assert as_it_is.usage.cached_tokens < 0.1 * as_it_is.usage.input_tokens


async def test_a_batch_that_is_gone_on_with_asks_each_line_once_and_in_that_order(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    really = job_module.answer_line

    async def answer_line(service: object, given: Line, *more: object) -> object:
        result = await really(service, given, *more)  # type: ignore[arg-type]
        asked.append(given.custom_id)
        return result

    monkeypatch.setattr(job_module, "answer_line", answer_line)
    record = server.add("mixed", file_of(prompts()))
    first = server.work_on(record)
    async with asyncio.timeout(60):
        while len(asked) < LINES // 2:
            await asyncio.sleep(0.005)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    before = len(asked)
    await server.work_on(record)
    kept = server.store.batch("mixed", record.id)
    assert LINES // 2 <= before < LINES
    assert (kept.status, kept.request_counts.completed) == ("completed", LINES)
    assert sorted(asked, key=lambda each: int(each[3:])) == [f"id-{number}" for number in range(LINES)]
    rows = read(server.store.content("mixed", str(kept.output_file_id)).read_bytes())
    assert [row["custom_id"] for row in rows] == [f"id-{number}" for number in range(LINES)]
    used = [row["response"]["body"]["usage"] for row in rows]
    assert kept.usage.cached_tokens == sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    assert kept.usage.cached_tokens > 0.7 * kept.usage.input_tokens
