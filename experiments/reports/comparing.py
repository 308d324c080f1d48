"""Two experiments side by side: what got worse, for people and for CI."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.grid.cells import Cell
from experiments.grid.store import Saved, Store
from experiments.reports.table import Column, read_table
from experiments.stats.hypotheses import ALPHA, corrected, paired_permutation
from experiments.stats.intervals import Floats, Interval, bca_mean, paired_difference, ratio
from experiments.stats.power import UNSEEN_SPREAD, statement, statement_of_nats

COSTS = ("paper", "flops")
OTHER_DATA = "other prompts or another scorer: answers cannot be paired"
TIMES = {"time": "wall_s", "first token": "ttft_s"}  # the second tells under open-loop load, where answers wait


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one way of answering, then and now, on the prompts both have.

    Attributes:
        way: dataset, pool, load and label.
        measure: quality, a cost meter, time, or under open-loop load the time to the first token.
        change: of quality the difference, else now over then.
        p: of no change, adjusted for all figures compared.
        worse: whether it is a regression.
        prompts: compared.
    """

    way: str
    measure: str
    change: Interval
    p: float
    worse: bool
    better: bool
    prompts: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All changes, and ways that only one of the two has.

    Attributes:
        lost: by way, why NOW, which asks for it, has not all of it, other prompts, or answers without a
            score: that is a regression too.
        power: by dataset, pool and load, which change of quality is likely to be seen, whichever way has it.
    """

    changes: list[Change]
    only_then: list[str]
    only_now: list[str]
    lost: dict[str, str]
    power: list[str]

    @property
    def regressions(self) -> list[Change]:
        """What got worse."""
        return [change for change in self.changes if change.worse]


def compare(then: Saved, now: Saved, store: Store, time_tolerance: float | None = None) -> Comparison:
    """Compare what two experiments have in common: the same dataset, pool, load and label.

    Quality and costs are tested together, with Holm's correction over all figures of all ways: where nothing changed,
    the chance that any change is named is at most 5%, and that of an alarm, which is a change for the worse, about half
    of that. Time differs between any two runs of a machine: it counts only where it is asked for, and only beyond a
    tolerance.

    Args:
        then: before.
        now: after.
        store: of both.
        time_tolerance: share by which time may grow; None: time is not looked at.
    """
    before, after = _columns(then, store), _columns(now, store)
    other = _other_data(then, now)
    both = [name for name in before if name in after and name not in other]
    drafts = [draft for name in both for draft in _drafts(name, before[name], after[name], time_tolerance)]
    adjusted = corrected([draft.p for draft in drafts])
    changes = [draft.judged(p, time_tolerance) for draft, p in zip(drafts, adjusted, strict=True)]
    lost = {name: OTHER_DATA for name in before if name in after and name in other}
    lost |= {name: why for name in both if (why := _unscored(before[name], after[name]))}
    lost |= {name: why for name, why in _unfinished(now, store).items() if name in before}
    gone = [name for name in before if name not in after and name not in lost]
    power = _power([draft for draft in drafts if draft.measure == "quality"], len(drafts))
    return Comparison(changes, gone, [name for name in after if name not in before], lost, power)


def _power(drafts: list[_Draft], comparisons: int) -> list[str]:
    groups: dict[str, list[_Draft]] = {}
    for draft in drafts:
        groups.setdefault(draft.way.rpartition(": ")[0], []).append(draft)
    said = []
    for name, ways in groups.items():
        spread = max(float(np.std(way.now - way.then)) for way in ways) or UNSEEN_SPREAD
        state = statement_of_nats if ways[0].nats else statement
        said.append(f"{name}: {state(min(len(way.now) for way in ways), spread, comparisons)}")
    return said


def _unfinished(saved: Saved, store: Store) -> dict[str, str]:
    """By way, why a cell of it is not done."""
    return {
        _way(cell): store.failure(cell) or f"not run ({store.state(cell)})"
        for cell in saved.cells
        if store.state(cell) != "done"
    }


def _unscored(then: Column, now: Column) -> str:
    """What NOW answered and cannot score, though it could be; empty: nothing. Left out, it would hide a loss."""
    asked, scored = set(now.prompts), set(now.scored)
    missing = [prompt for prompt in then.scored if prompt in asked and prompt not in scored]
    return f"{len(missing)} prompts have no score, {missing[0]} for one, that had one before" if missing else ""


def _other_data(then: Saved, now: Saved) -> set[str]:
    """Ways whose prompts or scorer differ: a row's number, or even its id, may stand for another prompt by now."""
    asked: dict[str, set[str]] = {}
    for saved in (then, now):
        for cell in saved.cells:
            asked.setdefault(_way(cell), set()).add(cell.depends.get("dataset", ""))
    return {way for way, digests in asked.items() if len(digests) > 1}


def _way(cell: Cell) -> str:
    return f"{cell.dataset.label}, {cell.pool}, {cell.load.label}: {cell.label}"


def _columns(saved: Saved, store: Store) -> dict[str, Column]:
    table = read_table(saved, store)
    return {
        f"{group.name}: {column.label}": column
        for groups in (table.groups, table.loaded)
        for group in groups.values()
        for column in group.columns.values()
    }


@dataclass(frozen=True, slots=True)
class _Draft:
    way: str
    measure: str
    then: Floats
    now: Floats
    p: float
    nats: bool

    def judged(self, p: float, time_tolerance: float | None) -> Change:
        if self.measure == "quality":
            change = bca_mean(self.now - self.then) if self.nats else paired_difference(self.now, self.then)
            worse, better = change.value < 0, change.value > 0
        else:
            change = ratio(self.now, self.then)
            limit = 1.0 + (time_tolerance or 0.0) if self.measure in TIMES else 1.0
            worse = change.value > 1.0 and (change.low > limit or self.measure not in TIMES)
            better = change.value < 1.0
        sure = p < ALPHA
        return Change(self.way, self.measure, change, p, sure and worse, sure and better, len(self.then))


def _drafts(name: str, then: Column, now: Column, time_tolerance: float | None) -> list[_Draft]:
    known = set(then.scored)
    prompts = [prompt for prompt in now.scored if prompt in known]
    if not prompts:
        return []
    measures = {"quality": "score", **{cost: cost for cost in COSTS}}
    if time_tolerance is not None:
        measures |= TIMES if now.loaded else {"time": "wall_s"}
    found = []
    refused = then.refused | now.refused
    for measure, field in measures.items():
        compared = [prompt for prompt in prompts if measure == "quality" or prompt not in refused]
        if not compared:
            continue
        before, after = then.mean(field, compared), now.mean(field, compared)
        # The sign of a sum of differences is that of the ratio of sums: what is tested is what is judged.
        found.append(_Draft(name, measure, before, after, paired_permutation(after - before), then.nats))
    return found
