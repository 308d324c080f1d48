"""A steady load on a cluster whose parts are killed at random: `make chaos`."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.chaos.cluster import TwoNodes, until
from benchmarks.chaos.report import Outcome, Strike, page, strike_of
from benchmarks.chaos.requests import Answer, Asked, CheckingClient, Done, Grpc, Http, mixed
from benchmarks.chaos.serving import float32_config
from benchmarks.harness import Report, command_line, note, run
from experiments.load.generator import drive
from experiments.load.schedule import SCHEDULES
from experiments.machine import describe
from experiments.pairs import DEMO, open_pair
from ops.chaos import kit

# worker: the node that is not the head, lost and started again; frozen: SIGSTOP for the target's process, and nothing
# after it. The others are kill -9.
PARTS = ("draft", "target", "replica", "ingress", "proxy", "controller", "head", "worker", "frozen")
NETWORK = "127.0.88"
LEAST_EACH = 3
CALM = 3  # requests in a row, begun after a fault, that must come at the usual latency before the next one
# Latencies of an undisturbed load scatter: what is slower than this many times their 95th percentile is unusual.
UNUSUAL = 1.5
BACK_TIMEOUT_S = 240.0
IDLE_TIMEOUT_S = 60.0
BUSY_TIMEOUT_S = 60.0
LEAST_RUNNING = 2  # requests in progress when a part is hit: a fault that meets an idle process shows little


@dataclass(frozen=True)
class Settings:
    """Duration and intensity of a run.

    Attributes:
        seconds: of faults; longer where every part has not had its share by then.
        calm_s: of load before the first fault: the usual latency is measured there.
        rate: requests a second.
        parts: what is hit.
        least_each: how often each.
        tokens: length of every answer.
        seed: of order, times and load.
    """

    seconds: float = 600.0
    calm_s: float = 45.0
    rate: float = 2.0
    parts: tuple[str, ...] = PARTS
    least_each: int = LEAST_EACH
    tokens: int = 96
    seed: int = 0


@dataclass
class Load:
    """Two open-loop streams of requests, one over each protocol, until they are ended."""

    clients: list[CheckingClient]
    settings: Settings
    ended: bool = False
    started: float = field(default_factory=time.monotonic)

    def arrivals(self, seed: int) -> Iterator[float]:
        """Poisson times of one of the streams."""
        for due in SCHEDULES["poisson"](self.settings.rate / len(self.clients), 86_400.0, seed):
            if self.ended:
                return
            yield due

    async def run(self) -> None:
        """Send until the end is said, and read what was begun."""
        async with asyncio.TaskGroup() as group:
            for place, client in enumerate(self.clients):
                numbers = [str(number) for number in range(len(client.requests))]
                random.Random(self.settings.seed + place).shuffle(numbers)
                group.create_task(drive(client, self.arrivals(self.settings.seed + place), numbers, drain_s=300.0))

    @property
    def done(self) -> list[Done]:
        """All that has ended, over both protocols."""
        return [each for client in self.clients for each in client.done]

    @property
    def running(self) -> list[float]:
        """When the requests in progress began."""
        return [begun for client in self.clients for begun in client.running.values()]


async def undisturbed(address: str, requests: list[Asked]) -> list[Answer]:
    """Each answer, alone, before anything is broken."""
    front = Grpc(address)
    try:
        return [await front.ask(asked, lambda: None) for asked in requests]
    finally:
        await front.close()


def striker(cluster: TwoNodes, part: str) -> Callable[[], object]:
    """What breaks a part; it returns when that is done, for the head when it has been started again."""
    if part == "head":
        return cluster.lose_head
    if part == "worker":
        return cluster.lose_worker

    def hit() -> None:
        pids = kit.find("target" if part == "frozen" else part, cluster.tag, cluster.http)
        kit.send([random.choice(pids)], signal.SIGSTOP if part == "frozen" else signal.SIGKILL)

    return hit


async def calm(load: Load, since: float, usual_s: float, timeout_s: float) -> bool:
    """Wait until the last requests begun after a moment came at the usual latency, and none lags behind."""
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        after = sorted((each for each in load.done if each.begun >= since), key=lambda each: each.begun)[-CALM:]
        waiting = any(time.monotonic() - begun > usual_s for begun in load.running)
        usual = [each for each in after if each.error is None and not each.refusals and each.seconds <= usual_s]
        if len(usual) == CALM and not waiting:
            return True
        await asyncio.sleep(0.2)
    return False


async def whole(cluster: TwoNodes, parts: set[str]) -> bool:
    """Wait until every part is there again and the server says where its models run."""

    def there() -> bool:
        counts = cluster.parts()
        members = kit.members(cluster.http)
        alive = {each.pid for each in kit.processes(cluster.tag)}
        return parts <= set(counts) and all(pids and pids <= alive for pids in members.values())

    try:
        await asyncio.to_thread(until, there, "every part", BACK_TIMEOUT_S)
    except TimeoutError:
        return False
    return True


async def busy(load: Load) -> None:
    """Wait until enough requests are in progress."""
    limit = time.monotonic() + BUSY_TIMEOUT_S
    while time.monotonic() < limit:
        if len(load.running) >= LEAST_RUNNING:
            return
        await asyncio.sleep(0.01)


async def strikes(cluster: TwoNodes, load: Load, settings: Settings, usual_s: float) -> list[tuple[str, float]]:
    """Hit one part after the other, in random order, each when the one before is over.

    Returns:
        What was hit, and when.
    """
    choose, found, started = random.Random(settings.seed), list[tuple[str, float]](), time.monotonic()
    counts: Counter[str] = Counter()
    while time.monotonic() - started < settings.seconds or min(counts[part] for part in settings.parts) < (
        settings.least_each
    ):
        # What has been hit least is next: a random order in every round.
        least = min(counts[part] for part in settings.parts)
        part = choose.choice([each for each in settings.parts if counts[each] == least])
        counts[part] += 1
        strike = striker(cluster, part)
        await busy(load)
        at = time.monotonic()
        found.append((part, at))
        await asyncio.to_thread(strike)
        there = await whole(cluster, {"controller", "proxy", "ingress", "replica", "actor", "gcs", "raylet"})
        back = there and await calm(load, at, usual_s, BACK_TIMEOUT_S)
        note(f"{at - load.started:6.0f} s  {part}: {time.monotonic() - at:.1f} s" + ("" if back else ", NOT BACK"))
        if not back:
            break
        await asyncio.sleep(choose.uniform(1.0, 4.0))
    return found


def left_behind(cluster: TwoNodes, wanted: dict[str, int]) -> list[str]:
    """What an idle cluster still has though it should not.

    Args:
        cluster: without load.
        wanted: processes of each part before anything was hit.
    """
    found = []
    try:
        until(lambda: not any(_busy(cluster).values()), "nothing is held", IDLE_TIMEOUT_S)
    except TimeoutError:
        found += [f"{count} {name} are still held" for name, count in _busy(cluster).items() if count]

    def surplus() -> dict[str, int]:
        counts = cluster.parts()
        return {part: counts.get(part, 0) for part in wanted | counts if counts.get(part, 0) != wanted.get(part, 0)}

    try:
        until(lambda: not surplus(), "as many processes as at first", IDLE_TIMEOUT_S)
    except TimeoutError:
        found += [f"{count} processes of {part}, not {wanted.get(part, 0)}" for part, count in surplus().items()]
    return found


def _busy(cluster: TwoNodes) -> dict[str, int]:
    return {name: count for name, count in cluster.held().items() if name != "replicas"}


async def chaos(cluster: TwoNodes, settings: Settings) -> Outcome:
    """Load a served cluster, break it, and look at what came and what is left.

    Args:
        cluster: serving, with nothing else to do.
        settings: how long and how hard.
    """
    requests = mixed(settings.tokens, settings.seed)
    expected = await undisturbed(cluster.grpc, requests)
    note(f"{len(expected)} undisturbed answers")
    parts = await asyncio.to_thread(cluster.parts)
    load = Load(
        [CheckingClient(front, requests, expected) for front in (Grpc(cluster.grpc), Http(cluster.http))], settings
    )
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(settings.calm_s)
        before = [each.seconds for each in load.done]
        usual_s = UNUSUAL * float(np.percentile(before, 95))
        note(f"usual: up to {usual_s:.2f} s (median {np.median(before):.2f} s, {len(before)} requests)")
        began = time.monotonic()
        hit = await strikes(cluster, load, settings, usual_s)
        seconds = time.monotonic() - began
    finally:
        load.ended = True
        await running
        for client in load.clients:
            await client.close()
    return _outcome(load, hit, settings, seconds, usual_s, before, await asyncio.to_thread(left_behind, cluster, parts))


def _outcome(
    load: Load,
    hit: list[tuple[str, float]],
    settings: Settings,
    seconds: float,
    usual_s: float,
    before: list[float],
    left: list[str],
) -> Outcome:
    ends = [at for _, at in hit[1:]] + [np.inf]
    struck: list[Strike] = [
        strike_of(part, at, end, load.done, usual_s, load.started) for (part, at), end in zip(hit, ends, strict=True)
    ]
    return Outcome(
        seconds=seconds,
        offered_per_s=settings.rate,
        usual_s=usual_s,
        median_s=float(np.median(before)),
        answered=dict(Counter(f"{each.method} over {each.client}" for each in load.done if each.error is None)),
        wrong=[f"{_named(each)}: {each.wrong}" for each in load.done if each.wrong is not None],
        lost=[f"{_named(each)}: {each.error} after {each.codes}" for each in load.done if each.error is not None],
        strikes=struck,
        left=left,
        least_each=settings.least_each,
        parts=settings.parts,
    )


def _named(each: Done) -> str:
    return f"request {each.number}, {each.method} over {each.client}"


def break_cluster(settings: Settings, network: str = NETWORK, pair: str = DEMO) -> Outcome:
    """Start a cluster of its own, break it, end it; nothing of it may be there afterwards."""
    cluster = TwoNodes(network, float32_config(pair))
    with cluster:
        note(f"a cluster in {cluster.folder}")
        cluster.serve()
        outcome = asyncio.run(chaos(cluster, settings))
    left = kit.processes(cluster.tag)
    outcome.left.extend(f"process {each.pid} {each.words[0]} outlives its cluster" for each in left)
    return outcome


def measure(options: argparse.Namespace) -> Report:
    """Break a served cluster of its own for some minutes."""
    machine = describe()
    wanted = Settings(
        seconds=60 * options.minutes,
        rate=options.rate,
        parts=tuple(options.parts),
        least_each=options.least,
        seed=options.seed,
    )
    return page(break_cluster(wanted, pair=options.pair), machine, open_pair(options.pair).title)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/chaos.md"), rounds=None, takes_pair=True, minutes=1.0, least=0)
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--rate", type=float, default=Settings.rate)
    made.add_argument("--parts", nargs="+", default=list(PARTS))
    made.add_argument("--least", type=int, default=LEAST_EACH)
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    run(parser(), measure)
