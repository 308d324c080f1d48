"""The figures of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Saved, Store
from experiments.reports.answers import shown_answers
from experiments.reports.efficiency import Efficiency, efficiency
from experiments.reports.speed import Speed, by_length
from experiments.reports.table import Column, Group, Table, read_table
from experiments.reports.tuning import TunedLine, drawn_once, tuned_lines
from experiments.stats.curves import Curve
from experiments.stats.hypotheses import ALPHA, corrected, equivalence, paired_permutation
from experiments.stats.intervals import Interval, bca_mean, mean_score, paired_difference, ratio
from experiments.stats.power import UNSEEN_SPREAD, statement, statement_of_nats

if TYPE_CHECKING:
    from experiments.grid.references import Reference

METERS = ("paper", "flops", "wall_s")
WEAK = "plain model=small"


@dataclass(slots=True)
class Line:
    """One way of answering one dataset.

    Attributes:
        sampling: how it chooses tokens, where that is not as the experiment says.
        seeds: with which each prompt was asked.
        prompts: with a score.
        unscored: without one.
        errors: answers that were refused; they count as wrong.
        quality: mean score.
        difference: from the baseline, over the prompts both have; None for the baseline. Where a cell stopped early,
            with the ends of the stop rule's interval.
        p: of no difference, adjusted for all comparisons of the report; None where a cell stopped early.
        verdict: better, worse, or no difference found; "no worse" where a loss below the margin is shown, which
            has no meaning of likelihoods.
        costs: by meter, relative to the baseline on the same prompts.
        relative: paper meter, relative to the large model alone by itself.
        large_share: tokens of the large model, dropped ones included, per token of the answers.
        tokens_per_round: of speculation; None without.
        acceptance: share of drafted tokens that stayed, by depth.
        ttft_s: median and 95% quantile.
        joules_per_token: None where the machine has no meter.
        stopped: why cells ended early.
        speed: by length of the answers.
    """

    pool: str
    dataset: str
    load: str
    label: str
    method: str
    sampling: str
    seeds: int
    prompts: int
    unscored: int
    errors: int
    quality: Interval
    difference: Interval | None = None
    p: float | None = None
    verdict: str = ""
    costs: dict[str, Interval] = field(default_factory=dict)
    relative: float = 0.0
    large_share: float = 0.0
    tokens_per_round: float | None = None
    acceptance: list[float] = field(default_factory=list)
    ttft_s: tuple[float, float] = (0.0, 0.0)
    joules_per_token: float | None = None
    stopped: list[str] = field(default_factory=list)
    speed: list[Speed] = field(default_factory=list)


@dataclass(slots=True)
class CurveLine:
    """A method of several settings as a curve of cost (paper meter, baseline 1) and quality.

    Attributes:
        points: (label, cost, quality) by cost.
        at_half: quality at the cost halfway between the weak and the strong end.
        for_quality: cost of the baseline's quality less the margin.
        recovered: mean share of the gap between the ends that is recovered (as APGR); None without both ends.
    """

    pool: str
    dataset: str
    method: str
    points: list[tuple[str, float, float]]
    at_half: Interval
    for_quality: Interval
    recovered: Interval | None


@dataclass(slots=True)
class RunTime:
    """Duration of an experiment.

    Attributes:
        runs: of each: when it began (UTC), seconds on the clock, workers, cells done and failed. One that computed
            nothing is not kept, nor is one that was killed.
        wall_s: of all of them; None: none is known.
        answering_s: that answering took, cells of other experiments that it shares included.
    """

    runs: list[dict[str, Any]]
    wall_s: float | None
    answering_s: float

    def __str__(self) -> str:
        clock = "not kept" if self.wall_s is None else f"{_minutes(self.wall_s)} on the clock in {len(self.runs)} runs"
        return f"{clock}; {_minutes(self.answering_s)} of answering in all cells"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


@dataclass(slots=True)
class Report:
    """Everything a page shows; plain data but for the dataclasses.

    Attributes:
        run: how long it took.
        points: for plots elsewhere: label, method, dataset, quality with its ends, cost.
        loads: label, dataset, rate, and the figures of `experiments.load.metrics`.
        answers: per dataset and prompt, what each way answered, token by token: a page's choice of them.
        efficiency: what each way took of the machine, those under open-loop load included.
        tuned: what choosing a setting for each dataset is worth.
        references: by pool, what single requests take alone, where that was measured.
        power: what the number of prompts can tell apart, and what was drawn too seldom.
        missing: by a cell's name, why it is not there.
    """

    title: str
    baseline: str
    margin: float
    machine: list[str]
    lines: list[Line]
    points: list[dict[str, Any]]
    curves: list[CurveLine]
    loads: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    power: list[str]
    missing: dict[str, str]
    energy: str
    run: RunTime
    efficiency: list[Efficiency]
    tuned: list[TunedLine]
    references: dict[str, Any]


def make_report(saved: Saved, store: Store) -> Report:
    """Work out the figures of an experiment from what is stored."""
    table, spec = read_table(saved, store), saved.spec
    lines = [line for group in table.groups.values() for line in _lines(group, spec.baseline)]
    _judge(lines, table, spec.baseline, spec.margin)
    facts = [facts for group in table.groups.values() for column in group.columns.values() for facts in column.facts]
    machines = Counter("; ".join(f"{k} {v}" for k, v in each.machine.items() if "load" not in k) for each in facts)
    metered = any(each.energy_j is not None for each in facts)
    references = store.kept(spec.name, "references")
    return Report(
        title=spec.name,
        baseline=spec.baseline,
        margin=spec.margin,
        machine=list(machines),
        lines=lines,
        points=[_point(line) for line in lines],
        curves=[curve for group in table.groups.values() for curve in _curves(group, spec.baseline, spec.margin)],
        loads=_loads(table),
        answers=shown_answers(list(table.groups.values())),
        power=[
            _power(group, spec.baseline, spec.margin, sum(line.p is not None for line in lines))
            for group in table.groups.values()
        ]
        + drawn_once(table.groups.values()),
        missing=table.missing,
        energy=_energy(metered, spec),
        run=_run_time(store.kept(spec.name, "runs").get("runs", []), table.answering_s),
        efficiency=efficiency(table.every, spec, _references(references)),
        tuned=tuned_lines(table, spec),
        references=references,
    )


def _energy(metered: bool, spec: ExperimentSpec) -> str:
    """Where joules come from."""
    if metered:
        return "from the machine's own meters"
    if spec.watts is None:
        return "this machine has no meter that can be read: no figures"
    return f"this machine has no meter that can be read: from {spec.watts:g} W an accelerator, as the experiment states"


def _run_time(runs: list[dict[str, Any]], answering_s: float) -> RunTime:
    return RunTime(runs, sum(run["wall_s"] for run in runs) if runs else None, answering_s)


def _references(values: dict[str, Any]) -> dict[str, Reference]:
    """By pool. The engine that measured them is imported only where there is one."""
    if not values:
        return {}
    from experiments.grid.references import Reference

    return {pool: Reference.from_dict(each) for pool, each in values.items()}


def _lines(group: Group, baseline: str) -> list[Line]:
    base = group.columns.get(baseline)
    return [_line(group, column, base) for column in group.columns.values()]


def _line(group: Group, column: Column, base: Column | None) -> Line:
    records, prompts = list(column.records.values()), column.scored
    tokens = sum(record.tokens for record in records)
    rounds = sum(record.rounds for record in records)
    spent = [facts.energy_j for facts in column.facts]
    joules = sum(each for each in spent if each is not None) if None not in spent else None
    first = [record.ttft_s for record in records if record.tokens] or [0.0]
    quality = mean_score(column.mean("score", prompts)) if prompts else Interval(np.nan, np.nan, np.nan)
    line = Line(
        group.pool,
        group.dataset,
        group.load,
        column.label,
        column.method,
        column.sampling,
        seeds=len({seed for seed, _ in column.records}),
        prompts=len(prompts),
        unscored=len({prompt for _, prompt in column.records}) - len(prompts),
        errors=sum(bool(record.error) for record in records),
        quality=quality,
        relative=sum(record.paper for record in records) / tokens if tokens else 0.0,
        large_share=sum(record.by_large for record in records) / tokens if tokens else 0.0,
        tokens_per_round=tokens / rounds if rounds else None,
        acceptance=_acceptance(records),
        ttft_s=(float(np.median(first)), float(np.quantile(first, 0.95))),
        joules_per_token=joules / tokens if joules is not None and tokens else None,
        stopped=[facts.stopped for facts in column.facts if facts.stopped],
        speed=by_length(records, [] if base is None else base.records.values()),
    )
    known = set() if base is None else set(base.scored)
    shared = [prompt for prompt in prompts if prompt in known]
    if base is not None and shared:
        line.costs = {name: ratio(column.mean(name, shared), base.mean(name, shared)) for name in METERS}
        if column is not base:
            mine, theirs = column.mean("score", shared), base.mean("score", shared)
            line.difference = bca_mean(mine - theirs) if group.nats else paired_difference(mine, theirs)
            if line.stopped:
                line.difference = _whenever(line.difference.value, [facts.sequence for facts in column.facts])
    return line


def _whenever(value: float, ends: list[list[float] | None]) -> Interval:
    """A difference whose prompts were ended by looking at it: no interval of a fixed number of prompts holds then.

    Args:
        value: of the difference.
        ends: of the stop rule's interval, of each seed's cell; where they differ, the widest.
    """
    known = [each or [-1.0, 1.0] for each in ends]
    return Interval(value, min(value, *(low for low, _ in known)), max(value, *(high for _, high in known)))


def _acceptance(records: Sequence[Any]) -> list[float]:
    depth = max((len(record.drafted_at) for record in records), default=0)
    drafted, accepted = np.zeros(depth), np.zeros(depth)
    for record in records:
        drafted[: len(record.drafted_at)] += record.drafted_at
        accepted[: len(record.accepted_at)] += record.accepted_at[:depth]
    return [float(a / d) if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]


def _judge(lines: list[Line], table: Table, baseline: str, margin: float) -> None:
    """Verdicts; all comparisons are one family. What stopped early was judged by the rule that stopped it."""
    for line in lines:
        verdicts = {stopped.partition(" after ")[0] for stopped in line.stopped}
        if line.stopped:
            agreed = len(verdicts) == 1 and len(line.stopped) == line.seeds  # of one seed nothing follows for others
            line.verdict = verdicts.pop() if agreed else "not told apart"
    compared = [line for line in lines if line.difference is not None and not line.stopped]
    groups = [table.groups[line.pool, line.dataset, line.load] for line in compared]
    found = [differences(g.columns[line.label], g.columns[baseline]) for line, g in zip(compared, groups, strict=True)]
    adjusted = corrected([paired_permutation(each) for each in found])
    scored = [equivalence(each, margin).p_worse for each, group in zip(found, groups, strict=True) if not group.nats]
    shown = iter(corrected(scored))
    for line, group, values, p in zip(compared, groups, found, adjusted, strict=True):
        loss = 1.0 if group.nats else next(shown)
        base = group.columns[baseline]
        # Where the baseline answers hardly anything rightly, no loss could show.
        if not group.nats and base.mean("score", base.scored).mean() < margin:
            loss = 1.0
        line.p = p
        if p < ALPHA:
            line.verdict = "better" if values.mean() > 0 else "worse"
        else:
            line.verdict = "no worse" if loss < ALPHA else "not told apart"


def differences(column: Column, base: Column) -> Any:
    """Score less the baseline's, by prompt, over the prompts that both have."""
    mine, theirs = column.scored, set(base.scored)
    shared = [prompt for prompt in mine if prompt in theirs]
    return column.mean("score", shared) - base.mean("score", shared)


def _point(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "method": line.method,
        "dataset": line.dataset,
        "pool": line.pool,
        "quality": line.quality.value,
        "quality_low": line.quality.low,
        "quality_high": line.quality.high,
        "cost": line.relative,
    }


def _curves(group: Group, baseline: str, margin: float) -> list[CurveLine]:
    """Methods with at least two settings under one sampling, on the prompts that all of them have."""
    base, weak = group.columns.get(baseline), group.columns.get(WEAK)
    methods: dict[str, list[Column]] = {}
    for column in group.columns.values():
        if column not in (base, weak):
            methods.setdefault(f"{column.method} {column.sampling}".rstrip(), []).append(column)
    found = []
    for method, columns in methods.items():
        if len(columns) < 2 or base is None or columns[0].method == "speculative":
            continue
        shared = set(base.scored).intersection(*(each.scored for each in columns), *([weak.scored] if weak else []))
        prompts = [prompt for prompt in base.scored if prompt in shared]
        unit = float(base.mean("paper", prompts).mean()) if prompts else 0.0
        if not unit:
            continue
        costs = np.array([each.mean("paper", prompts) / unit for each in columns])
        curve = Curve(costs, np.array([each.mean("score", prompts) for each in columns]))
        strong = (base.mean("paper", prompts) / unit, base.mean("score", prompts))
        low = (weak.mean("paper", prompts) / unit, weak.mean("score", prompts)) if weak else None
        middle = (1.0 + (float(low[0].mean()) if low else 0.0)) / 2
        points = [
            (each.label, float(cost.mean()), float(each.mean("score", prompts).mean()))
            for each, cost in zip(columns, costs, strict=True)
        ]
        found.append(
            CurveLine(
                group.pool,
                group.dataset,
                method,
                sorted(points, key=lambda point: point[1]),
                curve.quality_at(middle),
                curve.cost_at(strong[1] - margin),
                curve.recovered(low, strong) if low else None,
            )
        )
    return found


def _loads(table: Table) -> list[dict[str, Any]]:
    return [
        {"label": cell.label, "pool": cell.pool, "dataset": cell.dataset.label, "rate": cell.load.rate,
         "seed": cell.seed, **(facts.load or {})}
        for cell, facts in table.loads
    ]  # fmt: skip


def _power(group: Group, baseline: str, margin: float, comparisons: int) -> str:
    """From the differences that were seen; before any, from answers that differ on a fifth of the prompts."""
    base = group.columns.get(baseline)
    found = [differences(c, base) for c in group.columns.values() if base is not None and c is not base]
    spreads = [float(np.std(each)) for each in found if len(each) > 1 and np.any(each)]
    count = min((len(each) for each in found), default=0)
    if not count:
        return f"{group.name}: nothing to compare"
    if group.nats:
        return f"{group.name}: {statement_of_nats(count, float(np.median(spreads)) if spreads else 0.0, comparisons)}"
    spread = float(np.median(spreads)) if spreads else UNSEEN_SPREAD
    assert base is not None
    right = float(base.mean("score", base.scored).mean())
    lost = "" if right >= margin else f"; {baseline} has a quality of {right:.3f}: no loss of {margin:g} could show"
    return f"{group.name}: {statement(count, spread, comparisons)}{lost}"
