"""Load steps against a pool that scales itself: how soon replicas follow, whether a request fails, a cold start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import note
from benchmarks.scaling.asking import Asked, Watch, ask
from benchmarks.served import running_server
from turnout.client import AsyncClient
from turnout.config import TurnoutConfig, parse_config
from turnout.free_ports import on_free_ports

# Requests at once that one replica is meant to have, and of the steps: 1x wants one replica, 6x three, 0 none.
TARGET = 4
STEPS = (("1x", 2, 1), ("6x", 12, 3), ("0", 0, 0))
MOST = 3
MAX_TOKENS = 48
LIMIT_S = 120.0  # given up
GOAL_S = 30.0
BEFORE = "What follows has no sense and no end, and every time a number is different: "


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the load.

    Attributes:
        name: of the step.
        at_once: requests in progress.
        wanted: replicas for that load.
        followed_s: time until that number was there; None: they did not come.
        answered: requests that ended in it.
        failed: codes of those that did not.
        ttft_s: median.
    """

    name: str
    at_once: int
    wanted: int
    followed_s: float | None
    answered: int
    failed: tuple[str, ...]
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """All steps, replicas over time as (seconds, how many), and the first token after a sleep, warm and cold."""

    steps: tuple[Step, ...]
    replicas: tuple[tuple[float, int], ...]
    settings: dict[str, Any]
    warm_s: float
    cold_s: float
    cold_error: str | None


def config() -> TurnoutConfig:
    """The demo pool, with delays that a test can wait for."""
    values = TurnoutConfig.demo().model_dump(mode="json")
    pool = next(iter(values["pools"].values()))
    pool["autoscaling"] = {
        "min_replicas": 0,
        "max_replicas": MOST,
        "target_requests": TARGET,
        "target_waiting_s": 10.0,  # requests alone decide, on a machine of any speed
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 5.0,
        "idle_s": 5.0,
    }
    values["engine"]["threads"] = 1
    return on_free_ports(parse_config(values))


async def measure(given: TurnoutConfig, hold_s: float) -> Scaled:
    """Take the steps; each lasts until the replicas have followed, and a while longer."""
    name, pool = next(iter(given.pools.items()))
    assert pool.autoscaling is not None
    watch = Watch(f"http://127.0.0.1:{given.server.http_port}", name)
    steps = []
    async with AsyncClient(f"127.0.0.1:{given.server.grpc_port}") as client:
        warm = await _one(client, watch, 0)
        for step_name, at_once, wanted in STEPS:
            note(f"load step {step_name}: {at_once} requests at once")
            steps.append(await _step(client, watch, step_name, at_once, wanted, hold_s))
        note("a cold start")
        cold = await _one(client, watch, -1)
    await watch.close()
    return Scaled(
        steps=tuple(steps),
        replicas=_changes(watch),
        settings=pool.autoscaling.model_dump(),
        warm_s=warm.ttft_s,
        cold_s=cold.ttft_s,
        cold_error=cold.error,
    )


async def _one(client: AsyncClient, watch: Watch, number: int) -> Asked:
    return await ask(client, f"{BEFORE}{number}", watch.now(), watch.now, MAX_TOKENS, deadline_s=LIMIT_S)


async def _step(client: AsyncClient, watch: Watch, name: str, at_once: int, wanted: int, hold_s: float) -> Step:
    done: list[Asked] = []
    over = asyncio.Event()
    since = watch.now()

    async def user(number: int) -> None:
        while not over.is_set():
            done.append(await _one(client, watch, 1000 * number + len(done)))
            if done[-1].error:
                await asyncio.sleep(0.2)

    users = [asyncio.create_task(user(number)) for number in range(at_once)]
    followed = await watch.until(wanted, since, LIMIT_S)
    await asyncio.sleep(hold_s)
    over.set()
    await asyncio.gather(*users)
    times = sorted(each.ttft_s for each in done if each.error is None)
    return Step(
        name=name,
        at_once=at_once,
        wanted=wanted,
        followed_s=followed,
        answered=len(times),
        failed=tuple(each.error for each in done if each.error is not None),
        ttft_s=times[len(times) // 2] if times else float("nan"),
    )


def _changes(watch: Watch) -> tuple[tuple[float, int], ...]:
    changes: list[tuple[float, int]] = []
    for each in watch.seen:
        if not changes or changes[-1][1] != each.replicas:
            changes.append((round(each.at_s, 1), each.replicas))
    return tuple(changes)


def run(hold_s: float) -> Scaled:
    """Serve, and take the steps."""
    given = config()
    with running_server(given):
        return asyncio.run(measure(given, hold_s))
