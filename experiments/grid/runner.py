"""Running the cells of a plan: in this process, or by Ray actors, each of which holds one pool at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from experiments.grid.bench import CellBench, Job
from experiments.grid.planning import Plan
from experiments.grid.store import Store
from experiments.own_ray import ray_of_its_own
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

# A cell that is refused would be refused again as long as nothing it depends on changes.
FINAL = {Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.NOT_FOUND}
STORE = "store"
PLACED_S = 600.0  # an autoscaler may have to add a node first
PLACED_MORE_S = 60.0
UNSEEN = "was computed, but its results are not in {}: the store must lie on a disk that all nodes share"

log = logging.getLogger(__name__)

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Reason why a cell was not done, as a value: exceptions do not cross process borders."""

    code: Code
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a run.

    Attributes:
        done: cells that were finished by it.
        failed: by a cell's name, why it was not.
    """

    done: int
    failed: dict[str, str]


def run_plan(plan: Plan, store: Store, tell: Tell = lambda what, done, total: None) -> Ran:
    """Run what is missing. A cell that fails is named and left out; what was answered is kept whatever happens.

    Args:
        plan: from `make_plan`.
        store: where results go.
        tell: called with (what is being done, cells done, cells in all).

    Raises:
        TurnoutError: the store cannot be written to, or Ray does not start.
    """
    store.save(plan.spec, plan.cells, plan.refused)
    if not plan.todo and not plan.references:
        return Ran(0, {})
    tally = _Tally(plan, store, tell)
    with _on_the_clock(plan, store, tally):
        if plan.spec.workers == 0:
            return asyncio.run(_run_here(plan, store, tally))
        return _RayRun(plan, store, tally).run()


@contextmanager
def _on_the_clock(plan: Plan, store: Store, tally: _Tally) -> Iterator[None]:
    """Keep how long a run takes, also where it is cut off."""
    at, started = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        yield
    finally:
        seconds, done, failed = time.perf_counter() - started, tally.done, len(tally.failed)
        run = {"at": at, "wall_s": seconds, "workers": plan.spec.workers, "done": done, "failed": failed}
        earlier = store.kept(plan.spec.name, "runs").get("runs", [])
        with suppress(TurnoutError):  # a full disk has been reported
            store.keep(plan.spec.name, "runs", {"runs": [*earlier, run]})


async def attempted(work: Awaitable[None], name: str) -> Fault | None:
    """Do something; what kept it from being done, or None."""
    try:
        await work
    except TurnoutError as error:
        return Fault(error.code, error.message, error.field)
    except Exception as error:
        log.exception("%s", name)
        return Fault(Code.INTERNAL, f"{type(error).__name__}: {error}", None)
    return None


class _Tally:
    """Results of the jobs so far."""

    def __init__(self, plan: Plan, store: Store, tell: Tell) -> None:
        self._total, self._store, self._tell = len(plan.todo), store, tell
        self._ended = 0
        self.done = 0
        self.failed: dict[str, str] = {}

    def begun(self, job: Job) -> None:
        self._tell(f"cells, {job.cell.name}", self._ended, self._total)

    def ended(self, job: Job, fault: Fault | None) -> None:
        """Note a job's end.

        Raises:
            TurnoutError: the store itself failed: whatever comes next would fail too.
        """
        self._ended += 1
        if fault is None and self._store.state(job.cell) != "done":
            fault = Fault(Code.UNAVAILABLE, UNSEEN.format(self._store.root), None)
        if fault is None:
            self.done += 1
        else:
            self._failed(job.cell.name, fault)
            self._store.fail(job.cell, fault.message, final=fault.code in FINAL)
        self._tell(f"cells, {job.cell.name}", self._ended, self._total)

    def measuring(self, pool: str) -> None:
        self._tell(f"what single requests take on {pool}", self._ended, self._total)

    def measured(self, pool: str, fault: Fault | None) -> None:
        """Note that a pool's reference was measured, or why not.

        Raises:
            TurnoutError: the store itself failed.
        """
        if fault is not None:
            self._failed(f"what single requests take on {pool}", fault)

    def _failed(self, what: str, fault: Fault) -> None:
        if fault.field == STORE:
            raise TurnoutError(fault.code, fault.message, fault.field)
        self.failed[what] = fault.message


async def _run_here(plan: Plan, store: Store, tally: _Tally) -> Ran:
    bench = CellBench(plan.config, store.root)
    try:
        for pool, key in plan.references.items():
            tally.measuring(pool)
            tally.measured(pool, await attempted(bench.measure_reference(plan.spec.name, pool, key), pool))
        for job in plan.todo:
            tally.begun(job)
            tally.ended(job, await attempted(bench.run(job), job.cell.name))
    finally:
        await bench.close()
    return Ran(tally.done, tally.failed)


class RayBench:
    """A `CellBench` in an actor."""

    def __init__(self, config: TurnoutConfig, root: Path) -> None:
        self._bench = CellBench(config, root)

    async def ready(self) -> None:
        """Answer, which an actor can only after it was placed."""

    async def run(self, job: Job) -> Fault | None:
        """See `attempted`."""
        return await attempted(self._bench.run(job), job.cell.name)

    async def measure_reference(self, name: str, pool: str, key: str) -> Fault | None:
        """See `CellBench.measure_reference`."""
        return await attempted(self._bench.measure_reference(name, pool, key), pool)


class _RayRun:
    """Run on Ray actors, one job at a time each; an actor that dies costs the cell it was at, and is replaced."""

    def __init__(self, plan: Plan, store: Store, tally: _Tally) -> None:
        self._plan, self._store, self._tally = plan, store, tally
        # Baselines first: others may look at them while they run.
        self._first = deque(job for job in plan.todo if job.baseline is None)
        self._rest = deque(job for job in plan.todo if job.baseline is not None)
        self._running: dict[Any, tuple[Any, Job]] = {}

    def run(self) -> Ran:
        with _joined(self._plan.spec.workers):
            return self._work()

    def _work(self) -> Ran:
        idle = self._placed(max(1, min(self._plan.spec.workers, len(self._plan.todo))))
        try:
            self._measure(idle)
            self._give(idle)
            while self._running:
                ended, _ = ray.wait(list(self._running), num_returns=1)
                actor, job = self._running.pop(ended[0])
                fault, alive = _outcome(ended[0])
                self._tally.ended(job, fault)
                if not alive:
                    _end(actor)  # what Ray still starts anew would keep the place of its successor
                idle.append(actor if alive else self._actor())
                self._give(idle)
        finally:
            for actor in (*idle, *(actor for actor, _ in self._running.values())):
                _end(actor)
        return Ran(self._tally.done, self._tally.failed)

    def _placed(self, count: int) -> list[Any]:
        """Start `count` actors, or as many as the cluster has a place for.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED: it has none.
        """
        actors = {actor.ready.remote(): actor for actor in [self._actor() for _ in range(count)]}
        ready, waiting = ray.wait(list(actors), num_returns=1, timeout=PLACED_S)
        if ready and waiting:
            more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=PLACED_MORE_S)
            ready += more
        for each in waiting:
            _end(actors[each])
        if not ready:
            gpus = f" and {self._plan.spec.gpus:g} GPUs" if self._plan.spec.gpus else ""
            message = f"no worker has found a place within {PLACED_S:g} s: each takes one CPU{gpus} of the cluster"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, message, "workers")
        if waiting:
            log.warning("%d of %d workers have found a place; the experiment continues with these", len(ready), count)
        return [actors[each] for each in ready]

    def _measure(self, idle: list[Any]) -> None:
        """References come before the cells, one at a time: the machine is idle then."""
        for pool, key in self._plan.references.items():
            self._tally.measuring(pool)
            fault, alive = _outcome(idle[0].measure_reference.remote(self._plan.spec.name, pool, key))
            self._tally.measured(pool, fault)
            if not alive:
                _end(idle[0])
                idle[0] = self._actor()

    def _actor(self) -> Any:
        options = {"num_cpus": 1, "num_gpus": self._plan.spec.gpus}
        return ray.remote(RayBench).options(**options).remote(self._plan.config, self._store.root)

    def _give(self, idle: list[Any]) -> None:
        """Every idle actor gets a job, as long as there is one that need not wait for a baseline."""
        while idle:
            if self._first:
                job = self._first.popleft()
            elif self._rest and not any(job.baseline is None for _, job in self._running.values()):
                job = self._rest.popleft()
            else:
                return
            actor = idle.pop()
            self._tally.begun(job)
            self._running[actor.run.remote(job)] = (actor, job)


def _end(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)


def _outcome(ended: Any) -> tuple[Fault | None, bool]:
    """What came of a job, and whether its actor lives: one that dies while it starts anew would cost more cells."""
    try:
        fault: Fault | None = ray.get(ended)
    except RayError as error:  # one that was killed for want of memory is not reported as an actor's
        said = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"its process ended, perhaps for want of memory: {said}"
        return Fault(Code.UNAVAILABLE, why, None), False
    return fault, True


@contextmanager
def _joined(workers: int) -> Iterator[None]:
    """The Ray that this process is in already, else one of this run's own."""
    if ray.is_initialized():
        yield
    else:
        with ray_of_its_own(workers + 1):
            yield
