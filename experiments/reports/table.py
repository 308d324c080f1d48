"""The answers of an experiment as a table: one row a prompt, one column a way of answering."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from experiments.grid.cells import Cell, Facts, Record
from experiments.grid.spec import CHOOSING, ExperimentSpec
from experiments.grid.store import Saved, Store
from experiments.stats.intervals import Floats


@dataclass(slots=True)
class Column:
    """One way of answering one dataset under one load, all seeds.

    Attributes:
        method: or policy: what its parameters belong to.
        sampling: how it chooses tokens, where that is not as the experiment says; empty: it is.
        drawn: whether tokens are drawn, and not always the likeliest.
        nats: as of its group.
        records: by (seed, prompt).
        facts: of each cell.
    """

    label: str
    method: str
    nats: bool
    sampling: str = ""
    drawn: bool = False
    records: dict[tuple[int, str], Record] = field(default_factory=dict)
    facts: list[Facts] = field(default_factory=list)

    def mean(self, name: str, prompts: list[str]) -> Floats:
        """A figure by prompt, averaged over seeds: what is drawn again for a prompt is no new prompt.

        Args:
            name: field of `Record`.
            prompts: ids; each was answered.
        """
        values: dict[str, list[float]] = defaultdict(list)
        for (_, prompt), record in self.records.items():
            value = getattr(record, name)
            if value is not None:
                values[prompt].append(float(value))
        return np.array([float(np.mean(values[prompt])) for prompt in prompts])

    @property
    def loaded(self) -> bool:
        """Whether prompts came on a schedule; their ids then end in their place in it."""
        return any(each.load is not None for each in self.facts)

    @property
    def refused(self) -> set[str]:
        """Prompts without an answer under some seed: they cost nothing, and that is no gain."""
        return {prompt for (_, prompt), record in self.records.items() if record.error}

    @property
    def prompts(self) -> list[str]:
        """All that were asked, in order."""
        return list(dict.fromkeys(prompt for _, prompt in self.records))

    @property
    def scored(self) -> list[str]:
        """Prompts with a score under every seed that has them, in order."""
        found: dict[str, bool] = {}
        for (_, prompt), record in self.records.items():
            found[prompt] = found.get(prompt, True) and record.score is not None
        return [prompt for prompt, whole in found.items() if whole]


@dataclass(slots=True)
class Group:
    """Columns that are compared: the same pool, dataset and load.

    Attributes:
        nats: whether scores are log-likelihoods, which have no bounds and so no points of 0.01.
    """

    pool: str
    dataset: str
    load: str
    nats: bool
    columns: dict[str, Column] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.dataset}, {self.pool}, {self.load}"


@dataclass(slots=True)
class Table:
    """All that is known of an experiment.

    Attributes:
        groups: of closed-loop cells.
        loads: cells under open-loop load, with their figures.
        loaded: answers of these, of one way of answering each.
        missing: by a cell's name, why it is not there.
        answering_s: seconds that the cells took, each of them once.
    """

    groups: dict[tuple[str, str, str], Group] = field(default_factory=dict)
    loads: list[tuple[Cell, Facts]] = field(default_factory=list)
    loaded: dict[tuple[str, str, str], Group] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    answering_s: float = 0.0

    @property
    def every(self) -> list[Group]:
        """All groups, those under open-loop load last."""
        return [*self.groups.values(), *self.loaded.values()]


def read_table(saved: Saved, store: Store) -> Table:
    """Gather the cells of an experiment; what failed or was never run is listed."""
    table, seen = Table(missing=dict(saved.refused)), set[str]()
    for cell in saved.cells:
        facts = store.facts(cell)
        if facts is None:
            table.missing[cell.name] = store.failure(cell) or f"not run ({store.state(cell)})"
            continue
        if (address := cell.address) not in seen:  # one cell may have several labels
            seen.add(address)
            table.answering_s += facts.wall_s
        if facts.load is not None:
            table.loads.append((cell, facts))
        key = (cell.pool, cell.dataset.label, cell.load.label)
        groups = table.groups if facts.load is None else table.loaded
        group = groups.setdefault(key, Group(*key, cell.likelihood))
        sampling = _sampling(cell, saved.spec)
        made = Column(cell.label, cell.family, group.nats, sampling, drawn=not cell.sampling.greedy)
        column = group.columns.setdefault(cell.label, made)
        column.facts.append(facts)
        for record in store.records(cell):
            column.records[cell.seed, record.id] = record
    return table


def _sampling(cell: Cell, spec: ExperimentSpec) -> str:
    """What a cell has of its own of how tokens are chosen."""
    given = ((name, getattr(cell.sampling, name), getattr(spec.sampling, name)) for name in CHOOSING)
    return " ".join(f"{name}={mine}" for name, mine, everybodys in given if mine != everybodys)
