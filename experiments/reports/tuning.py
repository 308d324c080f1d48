"""Gain of tuning: for each family of settings one fixed for all tasks, and the best of each (paper #13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from experiments.grid.spec import Axis, ExperimentSpec
from experiments.reports.table import Group, Table
from experiments.stats.tuned import tuned

EVERY = "(all ways)"


@dataclass(slots=True)
class TunedLine:
    """One family of settings on one dataset.

    Attributes:
        family: an entry of the experiment, a method, or all ways together.
        settings: how many there are.
        fixed: the setting with the best mean over all datasets, and its score here.
        best: the setting that is best here, and its score: on the prompts it was chosen on, so a little too good.
        gap: the best score less the fixed one's.
        held_out: score of what one half of the prompts chose, on the other half.
        spread: (best - worst) / best over the settings.
    """

    pool: str
    load: str
    family: str
    dataset: str
    settings: int
    fixed: tuple[str, float]
    best: tuple[str, float]
    gap: float
    held_out: float
    spread: float


def drawn_once(groups: Iterable[Group]) -> list[str]:
    """A sentence for each group with ways that draw their tokens and were asked with one seed."""
    found = {
        group.name: [c.label for c in group.columns.values() if c.drawn and len({seed for seed, _ in c.records}) == 1]
        for group in groups
        if not group.nats
    }
    return [f"{name}: drawn with one seed only: {', '.join(labels)}" for name, labels in found.items() if labels]


def tuned_lines(table: Table, spec: ExperimentSpec) -> list[TunedLine]:
    """Families of at least two settings; datasets with log-likelihoods are left out: they have no common scale."""
    places: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in table.groups.values():
        if not group.nats:
            places[group.pool, group.load].append(group)
    return [line for groups in places.values() for line in _of_place(groups, spec)]


def _of_place(groups: list[Group], spec: ExperimentSpec) -> Iterator[TunedLine]:
    labels = [label for label in groups[0].columns if all(label in group.columns for group in groups)]
    named = {arm.label: axis.family for axis in spec.methods if isinstance(axis, Axis) for arm in axis.arms()}
    families: dict[str, list[str]] = {EVERY: labels}
    for label in labels:
        families.setdefault(named.get(label, groups[0].columns[label].method), []).append(label)
    for family, settings in families.items():
        if len(settings) > 1:
            yield from _lines(groups, family, settings)


def _lines(groups: list[Group], family: str, settings: list[str]) -> Iterator[TunedLine]:
    scores, kept = [], []
    for group in groups:
        columns = [group.columns[label] for label in settings]
        shared = set[str].intersection(*(set(column.scored) for column in columns))
        prompts = [prompt for prompt in columns[0].scored if prompt in shared]
        if prompts:
            scores.append(np.array([column.mean("score", prompts) for column in columns]))
            kept.append(group)
    if not scores:
        return
    found = tuned(scores)
    for at, group in enumerate(kept):
        fixed, best = float(found.fixed_scores[at]), float(found.tuned_scores[at])
        yield TunedLine(
            group.pool,
            group.load,
            family,
            group.dataset,
            len(settings),
            (settings[found.fixed], fixed),
            (settings[found.best[at]], best),
            best - fixed,
            float(found.held_out[at]),
            float(found.spread[at]),
        )
