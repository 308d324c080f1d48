"""Whatever Redis or the way to it does: nothing wrong is used, every request is answered, and service comes back."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.faulty_server import FaultyServer, Spoil, Trouble
from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.acceptance.figures import compared, p99
from tests.kvstore.acceptance.fleet import BUDGET_S, Fleet, Record
from tests.kvstore.acceptance.workers import CHUNK, prompt_of, working
from tests.kvstore.servers import RedisProcess, redis_server, until
from tests.telling import tell

RECOVERY_S = 40.0
# A request may take its budget, and what a busy machine adds to it.
ANSWER_S = BUDGET_S + 8.0
# Twenty workers with all their threads take turns in one interpreter, whatever they wait for.
CROWDED_S = 10.0
ADDED_P99_S = 0.005
Plant = Callable[[RedisProcess, FaultyServer], Callable[[], None]]


def spoiled(trouble: Trouble, **settings: Any) -> Plant:
    def plant(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
        front.spoil = Spoil(trouble, **settings)

        def mend() -> None:
            front.spoil = Spoil()

        return mend

    return plant


def killed(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
    process.kill()
    return process.start


def paused(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
    process.pause()
    return process.resume


def restarted_empty(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
    process.kill()
    process.start()
    return lambda: None


def full_memory(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
    """Redis takes no value any more, and evicts none."""
    client = process.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)

    def mend() -> None:
        client.config_set("maxmemory", 0)
        client.close()

    return mend


def full_disk(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
    """A server that keeps its values on a disk, and cannot: it refuses whatever writes."""
    client = process.client()
    client.config_set("save", "1 1")
    assert process._process is not None
    number = process._process.pid
    limits = resource.prlimit(number, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    client.set("to1:some", "thing")
    until(lambda: _failed_to_save(client))

    def mend() -> None:
        resource.prlimit(number, resource.RLIMIT_FSIZE, limits)
        client.config_set("save", "")
        until(lambda: _saved(client))
        client.close()

    return mend


def _failed_to_save(client: Any) -> bool:
    return bool(client.info("persistence")["rdb_last_bgsave_status"] == "err")


def _saved(client: Any) -> bool:
    with suppress(Exception):  # another one is on its way
        client.bgsave()
    return not _failed_to_save(client)


def nothing(process: RedisProcess, front: FaultyServer) -> Callable[[], None]:
    """To compare with."""
    return lambda: None


PLANTS: dict[str, Plant] = {
    "nothing": nothing,
    "truncated": spoiled("truncate", after_bytes=3000),
    "dribbled": spoiled("dribble", seconds=0.02),
    "delayed": spoiled("delay", seconds=0.6),
    "flipped": spoiled("flip", after_bytes=1500),
    "flipped often": spoiled("flip", after_bytes=40),
    "swapped": spoiled("swap"),
    "desynchronised": spoiled("desync"),
    "cut": spoiled("cut"),
    "silent": spoiled("stall"),
    "killed": killed,
    "paused": paused,
    "restarted empty": restarted_empty,
    "full memory": full_memory,
    "full disk": full_disk,
}
# With these, no request can be served, so that every breaker opens and stays open.
DEAD = {"cut", "silent", "killed", "paused"}
# With these too, answers come too late.
ILL = DEAD | {"dribbled", "delayed"}
# What stands in front is not to add its own: it would wait for a stopped server's queue of new connections.
AT_THE_SERVER = {"nothing", "killed", "paused", "restarted empty", "full memory", "full disk"}
# With one worker, much like another one of them.
LIKE_OTHERS = {"nothing", "delayed", "flipped", "silent", "killed"}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    # Its log does not grow, so that the limit of file sizes is that of what it saves.
    with redis_server(Path(tmp_path_factory.mktemp("redis")), 'logfile ""', restricted=True) as running:
        yield running


@contextmanager
def planted(plant: Plant, process: RedisProcess, front: FaultyServer) -> Iterator[None]:
    mend = plant(process, front)
    try:
        yield
    finally:
        mend()


def flush(process: RedisProcess) -> None:
    client = process.client()
    client.flushall()
    client.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.chaos if name in LIKE_OTHERS else ()) for name in PLANTS]
)
async def test_answers_are_right_and_service_comes_back(process: RedisProcess, name: str) -> None:
    """One worker with a real model, from an empty pool each time."""
    flush(process)
    prompts = [prompt_of(4 * CHUNK + 1, start) for start in range(3)]
    with FaultyServer(parse_url(process.url).endpoints[0]) as front:
        store = RedisStore(parse_url(front.url), breaker_cooldown_s=0.2)
        async with working(store, fetch_timeout_s=BUDGET_S) as worker:
            for prompt in prompts:
                await worker.answer(prompt)
            await worker.settle()
            with planted(PLANTS[name], process, front):
                for prompt in [*prompts, *prompts[:2], prompt_of(4 * CHUNK + 1, 3)]:
                    await worker.forget()
                    began = time.monotonic()
                    got = await worker.answer(prompt)
                    assert time.monotonic() - began < ANSWER_S + 2.0
                    assert got.computed + got.cached == len(prompt)
                await worker.settle()
            mended = time.monotonic()
            while True:
                await worker.forget()
                got = await worker.answer(prompts[0])
                if got.fetched == 4 * CHUNK and worker.store.health() == "ok":
                    break
                await worker.settle()
                assert time.monotonic() - mended < RECOVERY_S
        store.close()


def serve_through(process: RedisProcess, name: str, workers: int, seconds: float, cooldown_s: float) -> None:
    """A fleet before, during and after one kind of trouble."""
    flush(process)
    with (
        FaultyServer(parse_url(process.url).endpoints[0]) as front,
        Fleet(process.url if name in AT_THE_SERVER else front.url, workers, cooldown_s).at_work() as fleet,
    ):
        begun = time.monotonic()
        until(lambda: fleet.served_in_full(begun), 60.0)
        before = fleet.faults()
        started = time.monotonic()
        with planted(PLANTS[name], process, front):
            fleet.ask_for(1)  # which also have to be written
            planted_at = time.monotonic()
            until(lambda: time.monotonic() - started >= seconds, seconds + 60.0)
            if name in ILL:
                until(lambda: any(each.health != "ok" for each in fleet.since(started)), 40.0)
            during = fleet.since(planted_at)
        mended = time.monotonic()
        until(lambda: fleet.served_in_full(mended), RECOVERY_S)
        recovered = time.monotonic() - mended
        fleet.check()
        slowest = max(each.with_store for each in during)
        assert {each.number for each in fleet.members if each.records[-1].at > mended} == set(range(workers))
        assert slowest < (ANSWER_S if workers < 10 else CROWDED_S)
        if name not in {"nothing", "restarted empty"}:
            assert fleet.faults() != before
        _tell(name, workers, len(during), slowest, recovered, fleet.faults())
        if name in DEAD and seconds > 5.0:
            resting = sorted((each for each in during if each.health == "off"), key=lambda each: each.at)
            assert len(resting) > 600
            assert _added(name, resting) < ADDED_P99_S


def _added(name: str, resting: list[Record]) -> float:
    """What others do to the machine comes in bursts, what a store does always: the quietest third counts."""
    third = len(resting) // 3
    thirds = [resting[start : start + third] for start in range(0, 3 * third, third)]
    return min(
        compared(
            f"{name}, look-ups with the breaker open",
            [each.with_store for each in records],
            [each.without for each in records],
        )
        for records in thirds
    )


def _tell(name: str, workers: int, requests: int, slowest: float, recovered: float, faults: dict[str, int]) -> None:
    tell(
        f"{name}: {workers} workers, {requests} look-ups, slowest {1e3 * slowest:.0f} ms,"
        f" full service after {recovered:.2f} s; faults {faults}"
    )


@pytest.mark.parametrize("name", ["killed", "desynchronised", "full memory"])
def test_four_workers_go_on(process: RedisProcess, name: str) -> None:
    serve_through(process, name, 4, 0.5, 0.2)


@pytest.mark.chaos
@pytest.mark.parametrize("name", PLANTS)
def test_twenty_workers_go_on(process: RedisProcess, name: str) -> None:
    serve_through(process, name, 20, 60.0 if name == "paused" else 15.0, 1.0)


def test_the_percentile_is_one() -> None:
    assert p99([float(each) for each in range(1, 1000)]) == pytest.approx(990.0)
