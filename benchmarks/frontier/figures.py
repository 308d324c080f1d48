"""Quality of ways of answering between the small and the large model alone: areas above random, and an oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks import retention
from benchmarks.frontier.prompts import LARGE, METERS, SMALL, Answers, Prompts
from benchmarks.retention import Spent
from experiments.stats.curves import Curve
from experiments.stats.intervals import Floats, Interval, mean_score, ratio, resampled_sums, resampled_values
from training.router_measures import Routed, best_choices

ROUNDS = 1000
GRID = np.linspace(0.0, 1.0, 201)  # of the cost between the two models

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Point:
    """One way of answering.

    Attributes:
        quality: mean score.
        share: of all tokens, written by the large model.
        tokens: of an answer, on average.
        costs: by meter, relative to the large model alone.
        above: by meter, quality less that of random routing at the same cost, which sends a share of the prompts to the
            large model.
    """

    label: str
    family: str
    quality: Interval
    share: float
    tokens: float
    costs: dict[str, Interval]
    above: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class Family:
    """All settings of a way of answering, as a curve between the two models.

    Attributes:
        area: by meter, mean of quality above random, over all costs between the two models'.
        of_oracle: by meter, that area as a part of the oracle's.
    """

    name: str
    labels: list[str]
    area: dict[str, Interval]
    of_oracle: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class Figures:
    """All there is to show.

    Attributes:
        kinds: by kind of prompt, how many, and the small and the large model's quality.
        oracle: by meter, costs and qualities of knowing beforehand which model is right.
    """

    num_prompts: int
    kinds: dict[str, tuple[int, Interval, Interval]]
    points: list[Point]
    families: list[Family]
    oracle: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)


def figures(prompts: Prompts) -> Figures:
    """Work everything out; a family needs two settings to be a curve."""
    points = [_point(prompts, label) for label in prompts.ways]
    by_family: dict[str, list[str]] = {}
    for label, family in prompts.families.items():
        if label not in (SMALL, LARGE):
            by_family.setdefault(family, []).append(label)
    return Figures(
        len(prompts.kinds),
        {kind: _kind(prompts, kind) for kind in dict.fromkeys(prompts.kinds)},
        points,
        [_family(prompts, name, labels) for name, labels in by_family.items() if len(labels) > 1],
        {meter: _oracle(prompts, meter) for meter in METERS},
    )


def _kind(prompts: Prompts, kind: str) -> tuple[int, Interval, Interval]:
    mine = np.array([each == kind for each in prompts.kinds])
    small, large = (mean_score(prompts.ways[label].scores[mine]) for label in (SMALL, LARGE))
    return int(mine.sum()), small, large


def _point(prompts: Prompts, label: str) -> Point:
    way, large = prompts.ways[label], prompts.ways[LARGE]
    return Point(
        label,
        prompts.families[label],
        mean_score(way.scores),
        float(way.by_large.sum() / way.tokens.sum()) if way.tokens.sum() else 0.0,
        float(way.tokens.mean()),
        {meter: ratio(way.costs[meter], large.costs[meter], 0, ROUNDS) for meter in METERS},
        {meter: _above(prompts, way, meter) for meter in METERS},
    )


def _above(prompts: Prompts, way: Answers, meter: str) -> Interval:
    """Quality above what random choices between the two models buy for the same; beyond either end, above that end."""
    of = (prompts.ways[SMALL], prompts.ways[LARGE], way)

    def above(sums: Floats) -> Floats:
        low, high, mine, worst, best, got = np.moveaxis(sums, -1, 0)
        gap = np.where(high > low, high - low, 1.0)
        part = np.where(high > low, np.clip((mine - low) / gap, 0.0, 1.0), 1.0)
        found: Floats = (got - (worst + part * (best - worst))) / prompts.size
        return found

    table = np.stack([*(each.costs[meter] for each in of), *(each.scores for each in of)], axis=1)
    return resampled_sums(above, table, 0, ROUNDS)


def _family(prompts: Prompts, name: str, labels: list[str]) -> Family:
    areas = {m: _areas(prompts, labels, m) for m in METERS}
    return Family(name, labels, {m: each[0] for m, each in areas.items()}, {m: each[1] for m, each in areas.items()})


def _areas(prompts: Prompts, labels: list[str], meter: str) -> tuple[Interval, Interval]:
    """Mean quality above random over the costs, and as a part of the oracle's.

    What costs less than the small model alone can be had for as much, too; what costs more than the large one is left
    out.
    """
    small, large = (prompts.ways[label] for label in (SMALL, LARGE))
    ways = [prompts.ways[label] for label in labels]
    curve = Curve(np.array([each.costs[meter] for each in ways]), np.array([each.scores for each in ways]))
    routed = _routed(prompts, meter)

    def areas(rows: Rows) -> tuple[float, float]:
        low, high = (float(each.costs[meter][rows].mean()) for each in (small, large))
        if high <= low:
            return float("nan"), float("nan")
        worst, best = (float(each.scores[rows].mean()) for each in (small, large))
        costs, qualities = curve.points(rows, below=high)
        inside, cheap = costs > low, costs <= low
        x = np.concatenate([[0.0], (costs[inside] - low) / (high - low), [1.0]])
        y = np.concatenate([[max([worst, *qualities[cheap].tolist()])], qualities[inside], [best]])
        area = float(np.mean(np.interp(GRID, x, y) - (worst + GRID * (best - worst))))
        here = routed.at(rows)
        most = float(np.mean(np.interp(GRID, *here.oracle) - GRID * here.gain.mean()))
        return area, area / most if most > 0 else float("nan")

    area, part = resampled_values(areas, prompts.size, 0, ROUNDS)
    return area, part


def _routed(prompts: Prompts, meter: str) -> Routed:
    small, large = (prompts.ways[label] for label in (SMALL, LARGE))
    return Routed(small.scores, large.scores, np.zeros(prompts.size), small.costs[meter], large.costs[meter])


def _oracle(prompts: Prompts, meter: str) -> tuple[Floats, Floats]:
    """Costs, relative to the large model alone, and qualities."""
    small, large = (prompts.ways[label] for label in (SMALL, LARGE))
    cheap, dear = (each.costs[meter] for each in (small, large))
    extra, added = best_choices(dear - cheap, large.scores - small.scores)
    return (cheap.mean() + extra) / dear.mean(), small.scores.mean() + added


def kept_at(prompts: Prompts, family: str, share: float) -> Interval:
    """Quality relative to the large model's where it writes a share of the tokens: see `retention.kept_at`."""
    labels = [SMALL, *(label for label, name in prompts.families.items() if name == family and label != SMALL)]
    settings = [Spent(way.scores, way.by_large, way.tokens) for way in (prompts.ways[label] for label in labels)]
    return retention.kept_at(settings, prompts.ways[LARGE].scores, share)
