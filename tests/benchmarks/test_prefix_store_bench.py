"""The arithmetic of the prefix store's benchmark, the slow link, and a run of its parts on the demo model."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Turns
from benchmarks.prefix_store import decisions, outage, stampede, write_behind
from benchmarks.prefix_store.decisions import Trial, best_split, rest_s
from benchmarks.prefix_store.first_token import BLOCKS, GOAL, MEMORY, RECOMPUTE, FirstToken
from benchmarks.prefix_store.first_token import measure as measure_first_token
from benchmarks.prefix_store.link import SlowLink
from benchmarks.prefix_store.page import Results, Run, page
from benchmarks.prefix_store.workbench import Workbench
from benchmarks.prefix_store.write_behind import Rates
from experiments.stats.intervals import spread
from kvstore.base import StoreFault
from kvstore.fakes import MemoryByteStore
from kvstore.keys import write_root_key
from kvstore.redis.embedded import EmbeddedServer
from kvstore.types import ModelLayout
from turnout.config import ModelConfig, model_path
from turnout.free_ports import free_port


class Time:
    """Passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def store_of(count: int, size: int) -> tuple[MemoryByteStore, list[bytes]]:
    store = MemoryByteStore()
    keys = [b"%d" % i for i in range(count)]
    for key in keys:
        store.put(key, bytes(size))
    return store, keys


def read(link: SlowLink, keys: list[bytes], size: int, deadline: float) -> tuple[int, list[int]]:
    done: list[int] = []

    def complete(index: int) -> bool:
        done.append(index)
        return True

    count = link.read(keys, lambda _, __: memoryview(bytearray(size)), complete, 1000, deadline)
    return count, done


def test_values_arrive_at_the_speed_of_the_link() -> None:
    store, keys = store_of(4, 1000)
    clock = Time()
    link = SlowLink(store, 1e4, clock, clock.sleep)
    assert read(link, keys, 1000, 1e12) == (4, [0, 1, 2, 3])
    assert link.arrivals == pytest.approx([100.1, 100.2, 100.3, 100.4])
    free = SlowLink(store, None, clock, clock.sleep)
    assert read(free, keys, 1000, 1e12)[0] == 4
    assert free.arrivals == [clock.now] * 4


def test_what_the_link_cannot_deliver_in_time_is_not_read() -> None:
    # The store behind has a clock of its own, so the deadline must lie ahead of both.
    store, keys = store_of(4, 1000)
    clock = Time()
    clock.now = 1e12
    link = SlowLink(store, 1e4, clock, clock.sleep)
    assert read(link, keys, 1000, 1e12 + 0.25) == (2, [0, 1])
    assert clock.now == pytest.approx(1e12 + 0.25)
    with pytest.raises(StoreFault) as refused:
        read(link, keys, 1000, clock.now + 0.05)
    assert refused.value.kind == "late"


def linear(start: int, stop: int) -> float:
    return float(stop - start)


def test_the_best_split_is_that_of_every_number_of_chunks() -> None:
    # 4 chunks of 10 tokens and 5 more tokens; a token takes 1 s to compute.
    assert best_split([1, 2, 3, 4], linear, 10, 45) == 4 + 5  # all
    assert best_split([5, 10, 60, 61], linear, 10, 45) == 10 + 25  # two, then compute
    assert best_split([50, 60, 70, 80], linear, 10, 45) == 45  # none
    assert rest_s(linear, 40, 40) == 1  # one token is always computed


def test_a_decision_is_right_when_it_costs_about_as_little_as_the_best() -> None:
    trial = Trial(took=1.09, best=1.0, compute=2.0, fetch=1.0, chunks=3)
    assert trial.right
    assert not replace(trial, took=1.11).right
    assert replace(trial, took=0.003, best=0.001).right  # a thread's waking up is not a wrong decision
    found = decisions.summary(0.2, 10, True, [trial, replace(trial, took=1.5, chunks=1), replace(trial, took=0.9)], 4)
    assert found.right == pytest.approx(2 / 3)
    assert found.regret_ms == pytest.approx(1e3 * (0.09 + 0.5) / 3)  # faster than the best makes up for nothing
    assert found.fetched == pytest.approx((3 + 1 + 3) / 12)


def test_ratios_are_of_the_same_round() -> None:
    on, off = write_behind.ON, write_behind.OFF
    with_prompts = {
        on: [Rates(99, 50, 4 << 20, 1), Rates(48, 15, 2 << 20, 2)],
        off: [Rates(100, 50), Rates(50, 20)],
    }
    found = write_behind.summary(Turns(with_prompts), Turns({on: [9.0, 20.0], off: [10.0, 20.0]}))
    assert (found.with_prompts.low, found.with_prompts.high) == (0.96, 0.99)
    assert (found.prompts.low, found.prompts.high) == (0.75, 1.0)
    assert (found.unmatched.low, found.unmatched.high) == (0.9, 1.0)
    assert found.dropped == 3
    assert found.written_mib.value == 3


def test_added_time_is_the_difference_of_percentiles() -> None:
    off, on = [i / 1000 for i in range(1, 102)], [(i + 5) / 1000 for i in range(1, 102)]
    found = outage.summary("gone", 0.02, [0.001] * 100, off, on)
    assert (found.off_p50, found.off_p99) == pytest.approx((51, 100))
    assert (found.added_p50, found.added_p99) == pytest.approx((5, 5))
    assert (found.opening, found.look_up_p99) == pytest.approx((20, 1))


def test_a_stampede_counts_all_workers() -> None:
    answers = [{"computed": 300, "fetched": 50, "seconds": 1.0}, {"computed": 100, "fetched": 150, "seconds": 2.0}]
    found = stampede.summary("always", [answers], 200)
    assert (found.computed.value, found.fetched.value, found.seconds.value) == (2.0, 1.0, 2.0)


@pytest.fixture
def results() -> Results:
    one = spread([1.0])
    return Results(
        Run({"processor": "p"}, "220 M", 2000, 7, 20, 32, 589824),
        [
            FirstToken(RECOMPUTE, one, one, 0, 0),
            FirstToken(GOAL, spread([0.1, 0.11]), spread([0.1, 0.11, 0.12]), 1984, 36 << 20),
        ],
        write_behind.WriteBehind(one, spread([0.96]), one, one, 0, one, one),
        [stampede.Stampede("", one, one, one)],
        [outage.Outage("server gone", 20, 0.1, 0.2, 30, 31, 0.1, 6.0, 200)],
        [decisions.summary(None, 1, True, [Trial(1.0, 1.0, 2.0, 1.0, 3)], 3)],
    )


def test_the_page_says_which_goals_are_met(results: Results) -> None:
    report = page(results)
    text = report.markdown()
    assert "warm Redis, over recomputing | <= 0.2 | 0.110 [0.100, 0.120] | yes |" in text
    assert "over that without a store | >= 0.97 | 0.960 [0.960, 0.960] | no |" in text
    assert "added p99, ms | <= 5 | 6.000 | no |" in text
    assert "| no limit | 1x | yes | 100% | 0.0 | 1,000.0 | 1,000.0 | 2,000.0 | 1,000.0 | 100% |" in text
    assert "| no store |" in text
    tables = itertools.groupby(text.splitlines(), lambda line: line.startswith("|"))
    for is_table, lines in tables:
        if is_table:
            assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert json.loads(json.dumps(report.values))["run"]["prefix"] == 2000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "redis", 64 << 20, port=free_port()) as running:
        yield running


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    write_root_key(tmp_path / "root.key")
    made = Workbench(model_path(ModelConfig(path="demo:small")), tmp_path / "root.key")
    yield made
    await made.close()


async def test_every_way_finds_what_it_is_to_find(
    bench: Workbench, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The demo model computes so fast that the store need not fetch; here it believes otherwise.
    monkeypatch.setattr("engine.model.prefill_forecast", lambda *_: lambda start, stop: 10.0 * (stop - start))
    rows = await measure_first_token(bench, server.socket_url, server.url, ("int8",), 300, 1)
    found = {row.way: row for row in rows}
    assert len(found) == 6
    assert found[RECOMPUTE].found == 0
    assert found[MEMORY].bytes == 0
    assert found[MEMORY].found >= 256
    assert found[BLOCKS].found >= 288
    assert found[GOAL].found >= 256
    assert found[GOAL].bytes > found["int8 from Redis, unix socket"].bytes > 0
    assert all(row.seconds.value > 0 for row in rows)
    assert found[RECOMPUTE].ratio.value == 1.0


async def test_writing_is_measured_while_it_happens(bench: Workbench, server: EmbeddedServer) -> None:
    found = await write_behind.measure(bench, server.socket_url, 300, 1, 4, 1)
    # What decodes with_prompts the prompt fills chunks too, where it is fast.
    assert found.written_mib.value >= 256 * bench.layout.token_bytes / 2**20
    assert found.dropped == 0
    assert found.with_prompts.value > 0
    assert bench.engine.shared is None
    assert bench.pool.stats().sequences == 0


async def test_the_breaker_is_open_when_it_is_measured(bench: Workbench) -> None:
    rows = await outage.measure(bench, 300, 2, 0.2)
    assert [row.kind for row in rows] == ["server gone", "server silent"]
    assert all(row.look_up_p50 < row.opening for row in rows)


async def test_decisions_are_compared_with_a_real_read(server: EmbeddedServer) -> None:
    layout = ModelLayout({"weights": "w"}, 2, 2, 16, torch.float32, 16)
    draw = random.Random(0)
    rows = await decisions.measure(server.socket_url, draw.randbytes(32), layout, lambda a, b: (b - a) * 1e-3, 1200, 1)
    assert len(rows) == len(decisions.LINKS) * len(decisions.SPEEDS) * 2
    assert all(row.best <= min(row.compute, row.fetch) + 1e-9 for row in rows)
    assert all(row.compute == pytest.approx(1.2 / row.speed) for row in rows)
    assert any(row.fetched == 1.0 for row in rows)
