"""Bench of cells: one pool loaded at a time, one cell at a time, chunk by chunk into the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from experiments import machine
from experiments.grid.answering import answer, answer_chunk, score_chunk
from experiments.grid.cells import SUMS, Cell, Facts, Record, Utilisation
from experiments.grid.datasets import Dataset, open_dataset
from experiments.grid.energy import EnergyMeter
from experiments.grid.loads import run_load
from experiments.grid.references import measure_reference
from experiments.grid.scoring import Item, Scorer, open_scorer
from experiments.grid.spec import StopRule
from experiments.grid.store import Store
from experiments.grid.utilisation import Sensors, open_sensors, watched
from experiments.stats.sequential import ConfidenceSequence, verdict
from pool.local_pool import LocalPool
from pool.routing import PoolRouting
from pool.sandbox import walls_here
from turnout.calls import GenerateCall
from turnout.config import PolicyChoice, RoutingConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError, invalid
from turnout.types import SamplingParams

WARM_UP = 8  # tokens
UNIT_TESTS = "unit_tests"


@dataclass(frozen=True, slots=True)
class Job:
    """A cell to run.

    Attributes:
        cell: which.
        baseline: the cell it is compared with, already done; None: none, or it is that cell.
        stop: when it may end early; absent: never.
    """

    cell: Cell
    baseline: Cell | None = None
    stop: StopRule | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A pool, and how the machine it is on is watched."""

    pool: LocalPool
    sensors: Sensors


@dataclass(slots=True)
class CellBench:
    """Runner of cells, one after the other.

    Args:
        config: with the pools.
        root: folder of the store.
    """

    config: TurnoutConfig
    root: Path
    _pools: dict[str, _Loaded] = field(default_factory=dict)
    _datasets: dict[str, Dataset] = field(default_factory=dict)

    async def run(self, job: Job) -> None:
        """Run what is missing of a cell.

        Raises:
            TurnoutError: it cannot be done, or the store cannot be written to.
        """
        cell, store = job.cell, Store(self.root)
        dataset = self._dataset(cell)
        scorer = open_scorer(dataset.scorer)
        loaded = await self._pool(cell.pool)
        loaded.pool.routing = routing_of(cell, loaded.pool)
        if cell.load.rate is not None:
            await self._under_load(store, cell, loaded, dataset, scorer)
            return
        facts = store.progress(cell)
        facts.machine = machine.describe()
        if dataset.scorer.kind == UNIT_TESTS:
            facts.machine["sandbox"] = await walls_here()
        await _score_again(store, cell, loaded, dataset, scorer, facts)
        known = store.chunks(cell)
        watch = _Watch(store, job)
        rows = _rows(dataset, job)
        held: dict[int, list[Record]] = {}
        for number, start in enumerate(range(0, len(rows), cell.chunk)):
            records = known.get(number)
            if records is None:
                records = held[number] = await _chunk(loaded, cell, rows[start : start + cell.chunk], scorer, facts)
                if known or not _refusal(held):
                    for each, kept in held.items():
                        store.save_chunk(cell, each, kept, facts)
                    known, held = known | held, {}
            facts.stopped, facts.sequence = watch.look(records), watch.ends
            if facts.stopped and start + cell.chunk < len(rows):
                break
            facts.stopped = ""
        if held:
            raise TurnoutError(Code.INVALID_ARGUMENT, f"{cell.label}: {_refusal(held)}", "methods")
        _finish(store, cell, facts)

    async def measure_reference(self, name: str, pool: str, key: str) -> None:
        """Keep what single requests take on a pool's models.

        Args:
            name: of the experiment.
            pool: in the configuration.
            key: of what is measured.

        Raises:
            TurnoutError: the pool cannot be loaded, or the store cannot be written to.
        """
        loaded, store = await self._pool(pool), Store(self.root)
        loaded.pool.routing = None
        found = await measure_reference(loaded.pool, key)
        store.keep(name, "references", {**store.kept(name, "references"), pool: found.as_dict()})

    async def _under_load(self, store: Store, cell: Cell, loaded: _Loaded, dataset: Dataset, scorer: Scorer) -> None:
        """A schedule cannot be gone on with: it runs whole or not at all. Its answers can be scored again."""
        facts = store.facts(cell)
        if facts is None:
            facts = Facts(machine=machine.describe())
            with _measured(facts, loaded.sensors):
                records, facts.load = await run_load(loaded.pool, cell, dataset.items, scorer)
            store.save_chunk(cell, 0, records, facts)
        else:
            await _score_again(store, cell, loaded, dataset, scorer, facts)
        _finish(store, cell, facts)

    def _dataset(self, cell: Cell) -> Dataset:
        wanted = cell.depends.get("dataset", "")
        found = self._datasets.get(wanted)
        if found is None:
            found = open_dataset(cell.dataset)
            if wanted and found.digest != wanted:
                raise invalid(f"datasets.{cell.dataset.label}", "is not what it was when the experiment was planned")
            self._datasets[wanted] = found
        return found

    async def _pool(self, name: str) -> _Loaded:
        if name not in self._pools:
            await self.close()
            pool = await asyncio.to_thread(LocalPool.load, name, self.config)
            try:
                await warm(pool)
                device = torch.device(self.config.models[pool.roles["large"]].device)
                sensors = await asyncio.to_thread(open_sensors, pool, device)
            except BaseException:
                await pool.close()
                raise
            self._pools[name] = _Loaded(pool, sensors)
        return self._pools[name]

    async def close(self) -> None:
        """Free the models."""
        for name in list(self._pools):
            await self._pools.pop(name).pool.close()


async def warm(pool: LocalPool) -> None:
    """Answer something with each model, so that the first cell does not pay for what happens once."""
    for role in ("small", "large"):
        sampling = SamplingParams(temperature=0.0, max_tokens=WARM_UP, seed=0, ignore_eos=True)
        await answer(pool, GenerateCall(f"warm-{role}", pool.name, sampling, "1", None, "plain", {"model": role}), "")


def routing_of(cell: Cell, pool: LocalPool) -> PoolRouting | None:
    """What chooses a method for the cell's prompts; None where the cell names it."""
    if not cell.policy:
        return None
    config = RoutingConfig(policy=PolicyChoice(name=cell.policy, params=cell.params))
    return PoolRouting(config, pool.name, pool.model_pool)


@contextmanager
def _measured(facts: Facts, sensors: Sensors) -> Iterator[None]:
    """Add to a cell's facts what the block takes; one that fails is not counted."""
    meter, started = EnergyMeter.start(), time.perf_counter()
    with watched(sensors.memory) as seen:
        yield
    facts.wall_s += time.perf_counter() - started
    facts.utilisation = facts.utilisation or Utilisation()
    facts.utilisation.add(_combined(seen, sensors.machine))
    spent = meter.joules()
    if spent is not None:
        facts.energy_j = (facts.energy_j or 0.0) + spent


def _combined(seen: Utilisation, machine: Utilisation) -> Utilisation:
    """What was seen, with what is known of the machine."""
    sums = {name: getattr(seen, name) for name in SUMS}
    return replace(machine, **sums, memory_peak_bytes=seen.memory_peak_bytes)


def _rows(dataset: Dataset, job: Job) -> list[tuple[int, Item]]:
    """(number, row) in the order they are asked: by chance under a stop rule, which holds for no other order."""
    rows = list(enumerate(dataset.items))
    if job.stop is None:
        return rows
    return [rows[index] for index in np.random.default_rng(job.cell.seed).permutation(len(rows))]


async def _chunk(
    loaded: _Loaded, cell: Cell, rows: list[tuple[int, Item]], scorer: Scorer, facts: Facts
) -> list[Record]:
    """Answer rows, then score them; only the first is measured, but where a score is all that is asked for."""
    items, pool = [item for _, item in rows], loaded.pool
    if scorer.generates:
        with _measured(facts, loaded.sensors):
            records = await answer_chunk(pool, cell, rows)
    else:
        records = [Record(item.id) for item in items]
    await _score(loaded, cell, items, records, scorer, facts)
    return records


async def _score(
    loaded: _Loaded, cell: Cell, items: list[Item], records: list[Record], scorer: Scorer, facts: Facts
) -> None:
    with nullcontext() if scorer.generates else _measured(facts, loaded.sensors):
        await score_chunk(loaded.pool, cell, items, records, scorer)


async def _score_again(
    store: Store, cell: Cell, loaded: _Loaded, dataset: Dataset, scorer: Scorer, facts: Facts
) -> None:
    """Score what an earlier run had answered and could not score then."""
    items = {item.id: item for item in dataset.items}
    for number, records in store.chunks(cell).items():
        waiting = [record for record in records if record.again]
        if not waiting:
            continue
        # Under load a row is asked more than once, and its answers are numbered.
        rows = [items[each.id if cell.load.rate is None else each.id.rpartition("#")[0]] for each in waiting]
        await _score(loaded, cell, rows, waiting, scorer, facts)
        store.save_chunk(cell, number, records, facts)


def _finish(store: Store, cell: Cell, facts: Facts) -> None:
    """End a cell.

    Raises:
        TurnoutError: UNAVAILABLE: it has all its answers, and some could not be scored for a reason that may pass.
    """
    waiting = [record.note for record in store.records(cell) if record.again]
    facts.unscored = len(waiting)
    store.finish(cell, facts)
    if waiting:
        message = f"{len(waiting)} answers are not scored, and will be by a later run; of the first: {waiting[0]}"
        raise TurnoutError(Code.UNAVAILABLE, message)


def _refusal(chunks: dict[int, list[Record]]) -> str:
    """The words in which every prompt was refused: such a way of answering cannot run here. Empty: an answer came."""
    errors = {record.error for records in chunks.values() for record in records}
    return errors.pop() if len(errors) == 1 else ""


class _Watch:
    """Stop rule of a cell, which follows the difference from the baseline as it grows."""

    def __init__(self, store: Store, job: Job) -> None:
        self._stop = job.stop
        self._baseline: dict[str, float] = {}
        if job.stop is not None and job.baseline is not None:
            known = store.records(job.baseline)
            self._baseline = {record.id: record.score for record in known if record.score is not None}
        self._sequence = ConfidenceSequence(-1.0, 1.0, job.stop.alpha) if job.stop is not None else None

    @property
    def ends(self) -> list[float] | None:
        """Of the interval that holds the difference however often one looked; None: there is no stop rule."""
        if self._sequence is None or not self._sequence.count:
            return None
        return [self._sequence.interval.low, self._sequence.interval.high]

    def look(self, records: list[Record]) -> str:
        """Why enough is known; empty: it is not."""
        if self._stop is None or self._sequence is None:
            return ""
        differences = [
            record.score - self._baseline[record.id]
            for record in records
            if record.score is not None and record.id in self._baseline
        ]
        if not differences or float(np.abs(differences).max()) > 1.0:
            return ""
        found = verdict(self._sequence.add(differences), self._stop.margin)
        if found == "undecided":
            return ""
        return f"{found} after {self._sequence.count} prompts ({self._sequence.interval}), confidence sequence"
