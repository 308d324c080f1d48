"""Real actors that are killed, stopped and poisoned: clients see a pause, and the tokens they would have seen."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray

import actors.group
from actors.incarnation import Incarnation, Launcher
from actors.pool import ActorPool
from tests.actors.faulty_hosts import DEADLY, POISON
from tests.actors.hosts import open_local, poll
from tests.engine.harness import Reply, answer, ask_all, call_of, random_prompts
from turnout.calls import GenerateCall
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.structure import Structure

# One loop for all: the pool belongs to it. Starting processes takes its time on a machine that is busy.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

START_S = 240.0
SAMPLED = {"temperature": 0.9, "max_tokens": 64, "ignore_eos": True, "logit_bias": {POISON: -100.0}}
METHODS: list[Any] = [
    ("plain", {}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
    ("speculative", {"length": "fixed"}),
    ("plain", {"model": "small"}),
    ("best_of", {}),
]


@pytest.fixture(scope="module")
def placed(actors_config: TurnoutConfig) -> TurnoutConfig:
    """The pool's models in actors."""
    placement = PlacementConfig(
        models="actors", cpus=0.5, threads=1, silence_s=3.0, start_timeout_s=START_S, max_restarts=100
    )
    pool = actors_config.pools["pair"].model_copy(update={"placement": placement})
    return actors_config.model_copy(update={"pools": {"pair": pool}})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(placed: TurnoutConfig, ray_cluster: None) -> AsyncIterator[ActorPool]:
    """Over real actors; afterwards no process is left, and nothing in the cluster is taken."""
    free = ray.available_resources()
    loaded = ActorPool.load("pair", placed, host=DEADLY)
    yield loaded
    pids = [pid_of(loaded, name) for name in (0, 1)]
    await assert_idle(loaded)
    await loaded.close()
    await poll(lambda: not any(map(lives, pids)), "the actors' processes ended", 30)
    await poll(lambda: ray.available_resources().get("CPU") == free.get("CPU"), "their bundles are free", 30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted(placed: TurnoutConfig) -> dict[str, Reply]:
    """What models in one piece answer, by request id."""
    local = open_local(placed)
    replies = {call.request_id: await answer(local, call) for call in calls_of(10)}
    await local.close()
    return replies


def calls_of(count: int) -> list[GenerateCall]:
    """Requests of several methods; the same each time, up to their number."""
    prompts = random_prompts(10, 24, seed=5, vocab_size=POISON)
    calls = [call_of(prompt, *METHODS[i % len(METHODS)], **{**SAMPLED, "seed": i}) for i, prompt in enumerate(prompts)]
    return [
        GenerateCall(f"r{i}", call.model, call.sampling, call.prompt, method=call.method, params=call.params)
        for i, call in enumerate(calls[:count])
    ]


def told(reply: Reply) -> list[list[tuple[int, str]]]:
    return [[(token.id, token.source) for token in tokens] for tokens in reply.answers]


def pid_of(pool: ActorPool, owner: int) -> int:
    return pool.supervisors[owner]._life.places[0].pid


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def assert_idle(pool: ActorPool) -> None:
    """The actors tell that nothing is left, on their stores neither."""

    def idle() -> bool:
        held, loads = pool.stats(), [each.connection and each.connection.load for each in pool.supervisors]
        told_all = all(load is not None and not load.stored and not load.in_flight for load in loads)
        return told_all and held.requests == held.sequences == held.used_blocks == held.waiting == 0

    await poll(idle, "the pool is idle", 60)
    assert not any(each._calls or each._sent or len(each._quarantine) for each in pool.supervisors)


async def under_way(pool: ActorPool, calls: list[GenerateCall]) -> list[asyncio.Task[Reply]]:
    """Ask, and come back when both actors work on it."""
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls]
    await poll(lambda: all(each._sent for each in pool.supervisors), "both actors work", START_S)
    return tasks


async def assert_as_wanted(pool: ActorPool, tasks: list[asyncio.Task[Reply]], wanted: dict[str, Reply]) -> None:
    for i, reply in enumerate(await asyncio.gather(*tasks)):
        assert told(reply) == told(wanted[f"r{i}"]), f"r{i} after a restart"
    await assert_idle(pool)


async def timed(what: str, work: Awaitable[Any], record: Callable[[str, object], None]) -> None:
    started = time.monotonic()
    await work
    record(what, f"{time.monotonic() - started:.1f} s")


async def test_actors_answer_as_one_process_does(pool: ActorPool, wanted: dict[str, Reply]):
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls_of(10)]
    await assert_as_wanted(pool, tasks, wanted)
    members = pool.stats().members
    assert [member.model for member in members] == ["small", "large"]
    assert all(member.place.endswith(f"pid {pid_of(pool, owner)}") for owner, member in enumerate(members))


async def test_an_actor_killed_mid_answer_and_again_while_it_starts(
    pool: ActorPool, wanted: dict[str, Reply], monkeypatch: pytest.MonkeyPatch, record_property: Any
):
    loaded, killed = Launcher._loaded, []

    async def killing(self: Launcher, number: int, actors: list[Any], places: tuple[Any, ...]) -> Incarnation:
        if not killed:
            killed.append(places[0].pid)
            os.kill(places[0].pid, signal.SIGKILL)
        return await loaded(self, number, actors, places)

    monkeypatch.setattr(Launcher, "_loaded", killing)
    tasks = await under_way(pool, calls_of(6))
    os.kill(pid_of(pool, 1), signal.SIGKILL)
    await timed("killed, and killed while starting", assert_as_wanted(pool, tasks, wanted), record_property)
    assert len(killed) == 1
    assert pool.supervisors[1].restarts == 2


async def test_a_stopped_actor_is_ended_and_another_dies_while_they_join(
    pool: ActorPool, wanted: dict[str, Reply], monkeypatch: pytest.MonkeyPatch, record_property: Any
):
    join, killed = actors.group.join, []

    async def killing(*args: Any) -> None:
        if not killed:
            killed.append(pid_of(pool, 0))
            os.kill(killed[0], signal.SIGKILL)
        await join(*args)

    monkeypatch.setattr(actors.group, "join", killing)
    tasks, stopped, generation = await under_way(pool, calls_of(6)), pid_of(pool, 1), pool.generation
    os.kill(stopped, signal.SIGSTOP)
    await timed("stopped, the other killed while joining", assert_as_wanted(pool, tasks, wanted), record_property)
    assert killed
    await poll(lambda: not lives(stopped), "the stopped process ended", 30)
    await poll(lambda: pool.generation is not None and pool.generation > (generation or 0), "they joined", START_S)


async def test_an_actor_killed_under_answers_with_a_structure(pool: ActorPool, placed: TurnoutConfig):
    """The next one makes their constraints anew, where the answers were."""
    structure = Structure(kind="regex", value="([a-h][0-9]{2};){12,15}")
    options = {**SAMPLED, "ignore_eos": False, "structure": structure}
    calls = [call_of(f"{i}:", *METHODS[(0, 2)[i % 2]], **{**options, "seed": i, "n": 1 + i % 2}) for i in range(4)]
    local = open_local(placed)
    wanted = await ask_all(local, calls)
    await local.close()
    restarts = pool.supervisors[1].restarts
    tasks = await under_way(pool, calls)
    os.kill(pid_of(pool, 1), signal.SIGKILL)
    got = await asyncio.gather(*tasks)
    assert pool.supervisors[1].restarts == restarts + 1
    assert [told(each) for each in got] == [told(each) for each in wanted]
    assert all(re.fullmatch(structure.value, text) for reply in got for text in reply.texts)
    await assert_idle(pool)


async def test_both_actors_killed_at_once(pool: ActorPool, wanted: dict[str, Reply], record_property: Any):
    tasks = await under_way(pool, calls_of(6))
    for owner in (0, 1):
        os.kill(pid_of(pool, owner), signal.SIGKILL)
    await timed("both killed", assert_as_wanted(pool, tasks, wanted), record_property)
    await poll(lambda: pool.generation is not None, "they joined again", START_S)
    rejected = call_of("tensors travel again", "speculative", {"verifier": "rejection"}, **SAMPLED)
    assert len((await answer(pool, rejected)).ids) == 64


async def test_exactly_the_poison_request_fails(pool: ActorPool, wanted: dict[str, Reply]):
    before = [each.restarts for each in pool.supervisors]
    tasks = await under_way(pool, calls_of(6))
    places = [str(pid_of(pool, 1))]
    venom = GenerateCall("venom", "pair", call_of("x", **SAMPLED).sampling, (7, POISON, 9), method="plain")
    with pytest.raises(TurnoutError, match=r"ended [23] processes in a row") as caught:
        await answer(pool, venom)
    assert caught.value.code is Code.INTERNAL
    assert "'venom'" in caught.value.message
    assert all(place in caught.value.message for place in places)
    await assert_as_wanted(pool, tasks, wanted)
    ended = caught.value.message.count("pid ")
    assert [each.restarts for each in pool.supervisors] == [before[0], before[1] + ended]
    pool.check()
