"""Running the cells of a plan: in this process, or by Ray actors, each of which holds one pool at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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

log = logging.getLogger(__name__)

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a cell was not done, as a value: exceptions do not cross process borders."""

    code: Code
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run did.

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
        tell: told (what is being done, cells done, cells in all).

    Raises:
        TurnoutError: the store cannot be written to, or Ray does not start.
    """
    store.save(plan.spec, plan.cells, plan.refused)
    if not plan.todo:
        return Ran(0, {})
    if plan.spec.workers == 0:
        return asyncio.run(_run_here(plan, store, tell))
    with_ray = _RayRun(plan, store, tell)
    return with_ray.run()


async def attempted(bench: CellBench, job: Job) -> Fault | None:
    """Run a cell; what kept it from being done, or None."""
    try:
        await bench.run(job)
    except TurnoutError as error:
        return Fault(error.code, error.message, error.field)
    except Exception as error:
        log.exception("cell %s", job.cell.name)
        return Fault(Code.INTERNAL, f"{type(error).__name__}: {error}", None)
    return None


class _Tally:
    """What has come of the jobs so far."""

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
        if fault is None:
            self.done += 1
        elif fault.field == STORE:
            raise TurnoutError(fault.code, fault.message, fault.field)
        else:
            self.failed[job.cell.name] = fault.message
            self._store.fail(job.cell, fault.message, final=fault.code in FINAL)
        self._tell(f"cells, {job.cell.name}", self._ended, self._total)


async def _run_here(plan: Plan, store: Store, tell: Tell) -> Ran:
    bench, tally = CellBench(plan.config, store.root), _Tally(plan, store, tell)
    try:
        for job in plan.todo:
            tally.begun(job)
            tally.ended(job, await attempted(bench, job))
    finally:
        await bench.close()
    return Ran(tally.done, tally.failed)


class RayBench:
    """A `CellBench` in an actor."""

    def __init__(self, config: TurnoutConfig, root: Path) -> None:
        self._bench = CellBench(config, root)

    async def run(self, job: Job) -> Fault | None:
        """See `attempted`."""
        return await attempted(self._bench, job)


class _RayRun:
    """Hands jobs to actors, one at a time each; an actor that dies costs the cell it was at, and is replaced."""

    def __init__(self, plan: Plan, store: Store, tell: Tell) -> None:
        self._plan, self._store = plan, store
        self._tally = _Tally(plan, store, tell)
        # Baselines first: others may look at them while they run.
        self._first = deque(job for job in plan.todo if job.baseline is None)
        self._rest = deque(job for job in plan.todo if job.baseline is not None)
        self._running: dict[Any, tuple[Any, Job]] = {}

    def run(self) -> Ran:
        with _joined(self._plan.config, self._plan.spec.workers):
            return self._work()

    def _work(self) -> Ran:
        idle = [self._actor() for _ in range(min(self._plan.spec.workers, len(self._plan.todo)))]
        try:
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
    except RayError as error:  # one that was killed for want of memory is not told of as an actor's
        said = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"its process ended, perhaps for want of memory: {said}"
        return Fault(Code.UNAVAILABLE, why, None), False
    return fault, True


@contextmanager
def _joined(config: TurnoutConfig, workers: int) -> Iterator[None]:
    """The Ray that this process is in already, else the configured cluster, else one of this run's own."""
    if ray.is_initialized():
        yield
    elif config.ray.address is None:
        with ray_of_its_own(workers + 1):
            yield
    else:
        try:
            ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise TurnoutError(Code.UNAVAILABLE, f"ray: {' '.join(str(error).split())}", "ray.address") from None
        try:
            yield
        finally:
            ray.shutdown()
