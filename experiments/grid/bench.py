"""Whoever runs cells: one pool loaded at a time, one cell at a time, chunk by chunk into the store."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.pool import LocalPool
from engine.routing import PoolRouting
from experiments import machine
from experiments.grid.answering import answer, answer_chunk, score_chunk
from experiments.grid.cells import Cell, Facts, Record
from experiments.grid.datasets import Dataset, open_dataset
from experiments.grid.energy import EnergyMeter
from experiments.grid.loads import run_load
from experiments.grid.sandbox import walls_here
from experiments.grid.scoring import Item, Scorer, open_scorer
from experiments.grid.spec import StopRule
from experiments.grid.store import Store
from experiments.stats.sequential import ConfidenceSequence, verdict
from turnout.calls import GenerateCall
from turnout.config import PolicyChoice, RoutingConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError, invalid
from turnout.types import SamplingParams

KIB = 1024
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


@dataclass(slots=True)
class CellBench:
    """Runs cells, one after the other.

    Args:
        config: with the pools.
        root: folder of the store.
    """

    config: TurnoutConfig
    root: Path
    _pools: dict[str, LocalPool] = field(default_factory=dict)
    _datasets: dict[str, Dataset] = field(default_factory=dict)

    async def run(self, job: Job) -> None:
        """Run what is missing of a cell.

        Raises:
            TurnoutError: it cannot be done, or the store cannot be written to.
        """
        cell, store = job.cell, Store(self.root)
        dataset = self._dataset(cell)
        scorer = open_scorer(dataset.scorer)
        pool = await self._pool(cell.pool)
        pool.routing = routing_of(cell, pool)
        if cell.load.rate is not None:
            await self._under_load(store, cell, pool, dataset, scorer)
            return
        facts = store.progress(cell)
        facts.machine = machine.describe()
        if dataset.scorer.kind == UNIT_TESTS:
            facts.machine["sandbox"] = await walls_here()
        known = store.chunks(cell)
        watch = _Watch(store, job)
        rows = _rows(dataset, job)
        held: dict[int, list[Record]] = {}
        for number, start in enumerate(range(0, len(rows), cell.chunk)):
            records = known.get(number)
            if records is None:
                records = held[number] = await _chunk(pool, cell, rows[start : start + cell.chunk], scorer, facts)
                if known or not _refusal(held):
                    for each, kept in held.items():
                        store.save_chunk(cell, each, kept, facts)
                    known, held = known | held, {}
            facts.stopped = watch.look(records)
            if facts.stopped and start + cell.chunk < len(rows):
                break
            facts.stopped = ""
        if held:
            raise TurnoutError(Code.INVALID_ARGUMENT, f"{cell.label}: {_refusal(held)}", "methods")
        store.finish(cell, facts)

    async def _under_load(self, store: Store, cell: Cell, pool: LocalPool, dataset: Dataset, scorer: Scorer) -> None:
        """A schedule cannot be gone on with: it runs whole or not at all."""
        facts = Facts(machine=machine.describe())
        meter, started = EnergyMeter.start(), time.perf_counter()
        records, facts.load = await run_load(pool, cell, dataset.items, scorer)
        _measured(facts, started, meter)
        store.save_chunk(cell, 0, records, facts)
        store.finish(cell, facts)

    def _dataset(self, cell: Cell) -> Dataset:
        wanted = cell.depends.get("dataset", "")
        found = self._datasets.get(wanted)
        if found is None:
            found = open_dataset(cell.dataset)
            if wanted and found.digest != wanted:
                raise invalid(f"datasets.{cell.dataset.label}", "is not what it was when the experiment was planned")
            self._datasets[wanted] = found
        return found

    async def _pool(self, name: str) -> LocalPool:
        if name not in self._pools:
            await self.close()
            self._pools[name] = await asyncio.to_thread(LocalPool.load, name, self.config)
            await warm(self._pools[name])
        return self._pools[name]

    async def close(self) -> None:
        """Free the models."""
        for name in list(self._pools):
            await self._pools.pop(name).close()


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
    return PoolRouting(config, pool.name, pool.pool)


def _measured(facts: Facts, started: float, meter: EnergyMeter) -> None:
    facts.wall_s += time.perf_counter() - started
    facts.peak_bytes = max(facts.peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB)
    spent = meter.joules()
    if spent is not None:
        facts.energy_j = (facts.energy_j or 0.0) + spent


def _rows(dataset: Dataset, job: Job) -> list[tuple[int, Item]]:
    """(number, row) in the order they are asked: by chance under a stop rule, which holds for no other order."""
    rows = list(enumerate(dataset.items))
    if job.stop is None:
        return rows
    return [rows[index] for index in np.random.default_rng(job.cell.seed).permutation(len(rows))]


async def _chunk(
    pool: LocalPool, cell: Cell, rows: list[tuple[int, Item]], scorer: Scorer, facts: Facts
) -> list[Record]:
    """Answer rows, then score them; only the first is measured, but where a score is all that is asked for."""
    items = [item for _, item in rows]
    meter, started = EnergyMeter.start(), time.perf_counter()
    if scorer.generates:
        records = await answer_chunk(pool, cell, rows)
        _measured(facts, started, meter)
        await score_chunk(pool, cell, items, records, scorer)
    else:
        records = [Record(item.id) for item in items]
        await score_chunk(pool, cell, items, records, scorer)
        _measured(facts, started, meter)
    return records


def _refusal(chunks: dict[int, list[Record]]) -> str:
    """The words in which every prompt was refused: such a way of answering cannot run here. Empty: an answer came."""
    errors = {record.error for records in chunks.values() for record in records}
    return errors.pop() if len(errors) == 1 else ""


class _Watch:
    """Looks at the difference from the baseline as it grows, where a stop rule asks for it."""

    def __init__(self, store: Store, job: Job) -> None:
        self._stop = job.stop
        self._baseline: dict[str, float] = {}
        if job.stop is not None and job.baseline is not None:
            known = store.records(job.baseline)
            self._baseline = {record.id: record.score for record in known if record.score is not None}
        self._sequence = ConfidenceSequence(-1.0, 1.0, job.stop.alpha) if job.stop is not None else None

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
