"""Measuring what a method's knob does on a pair of models, and finding the setting that meets a target."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from decoding.calibrated_params import TARGETS, CalibratedParams
from decoding.calibration import Basis, KnobCalibration, Point, Span, TunableParam, along
from decoding.drift import WINDOW, Tally, population_stability
from training.calibration_data import QuestionSet
from training.question_runs import Bench, Floats, Run, paper_cost, ratio
from turnout.errors import invalid
from turnout.registry import MethodInfo, all_methods, get_method

TRAINER = "training.knob_calibration"
GRID = 101
DECILES = tuple(step / 10 for step in range(1, 10))
# What is called a large change of a distribution; windows of the calibration's own answers rarely come near it.
LEAST_DRIFT = 0.25
DRIFT_ROUNDS = 1000
DRIFT_QUANTILE = 0.999
SAME = 1e-6
REFINEMENTS = 4
CLOSE = 0.01
METERS = ("paper", "flops", "wall")
MOST_QUALITY = 2.0  # of the large model's: as much as a request may ask for

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Target:
    """What is aimed at: one of the first three.

    Attributes:
        large_share: tokens of the large model, dropped ones included, per token of the answers.
        quality: relative to the large model's own.
        budget: cost relative to the large model alone.
        meter: which cost: paper, flops or wall.
    """

    large_share: float | None = None
    quality: float | None = None
    budget: float | None = None
    meter: str = "paper"

    def __post_init__(self) -> None:
        given = [each for each in (self.large_share, self.quality, self.budget) if each is not None]
        if len(given) != 1:
            raise invalid("target", "give exactly one of --target-large-share, --target-quality and --budget")
        if self.meter not in METERS:
            raise invalid("meter", f"must be one of {', '.join(METERS)} (got {self.meter!r})")
        for name, value, most in (
            ("target-large-share", self.large_share, 1.0),
            ("target-quality", self.quality, MOST_QUALITY),
            ("budget", self.budget, math.inf),
        ):
            if value is not None and not (math.isfinite(value) and 0.0 <= value <= most):
                words = f"from 0 to {most:g}" if math.isfinite(most) else "at least 0"
                raise invalid(name, f"must be {words}, relative to the large model alone (got {value:g})")

    @property
    def aim(self) -> float:
        """The number aimed at."""
        return next(each for each in (self.large_share, self.quality, self.budget) if each is not None)

    @property
    def plain(self) -> dict[str, Any]:
        """As kept in the artifact."""
        if self.budget is not None:
            return {"budget": self.budget, "meter": self.meter}
        return {"large_share": self.large_share} if self.large_share is not None else {"quality": self.quality}


@dataclass(frozen=True)
class Outcome:
    """A calibration, and what is measured and not kept in it, because it is another in every run.

    Attributes:
        calibration: the curve.
        wall: wall clock of each point, relative to the large model alone.
        wall_large_s: seconds of the large model alone on all questions.
        warning: what is to be doubted about the setting found; empty: nothing.
    """

    calibration: KnobCalibration
    wall: tuple[Span, ...]
    wall_large_s: float
    warning: str = ""


def calibratable(name: str) -> MethodInfo:
    """The method of that name, if it has a knob to calibrate.

    Raises:
        TurnoutError: it does not exist or has none; lists those that have.
    """
    info = get_method(name)
    if not issubclass(info.params, CalibratedParams):
        known = [each.name for each in all_methods() if issubclass(each.params, CalibratedParams)]
        raise invalid("method", f"{name!r} has nothing to calibrate; these have: {', '.join(known)}")
    return info


@dataclass
class Calibrator:
    """One calibration in the making.

    Args:
        bench: asks.
        asked: what.
        method: its name.
        params: what stays the same; not the knob.
        num_points: settings of the knob that are tried, both ends included, at least 3.
        advance: called with (run that begins, runs in all).
        large: the large model alone on the same questions, where that has been run.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the method has no knob, or the parameters are wrong or set the knob.
    """

    bench: Bench
    asked: QuestionSet
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    num_points: int = 9
    advance: Advance = lambda what, done, total: None
    large: Run | None = None

    def __post_init__(self) -> None:
        info = calibratable(self.method)
        assert issubclass(info.params, CalibratedParams)
        self._knob: TunableParam = info.params.knob
        for name in (self._knob.name, "calibration", *TARGETS):
            if name in self.params:
                raise invalid(
                    f"param.{name}", f"is what is calibrated; fixed here can be {', '.join(self._knob.fixed)}"
                )
        some = 0.5 if self._knob.never is None else self._knob.never
        parsed = info.parse({**self.params, self._knob.name: some}, "param")
        assert isinstance(parsed, CalibratedParams)
        if parsed.soft:
            raise invalid(f"param.{parsed.soft}", f"leaves no {self._knob.name} that parts what is kept from the rest")
        self._parsed = parsed
        self._runs: dict[float, tuple[Point, Run]] = {}
        self._done = 0

    async def measure(self, target: Target) -> Outcome:
        """Sweep the knob, and add runs about the setting that meets the target.

        Raises:
            TurnoutError: OUT_OF_RANGE with the reachable range: no setting meets the target.
        """
        self.large = self.large or await self._run("large model alone", "plain", {"model": "large"})
        grid, edges, first = await self._survey()
        span = np.linspace(0.0, 1.0, self.num_points)
        for position in span:
            done = first if first is not None and position == 0.0 else None
            await self._add(float(position), grid, edges, done)
        chosen = await self._refine(target, grid, edges)
        return Outcome(
            replace(self._build(grid, edges, target), chosen=chosen, drift_limit=self._drift_limit(chosen, edges)),
            tuple(self._wall(run) for _, run in self._sorted()),
            float(self._reference.wall_s.sum()),
            self._doubt(target, chosen),
        )

    async def _refine(self, target: Target, grid: list[tuple[float, float]], edges: list[float]) -> float:
        """Measure where the target is expected to be met until it is, or often enough; where it is met.

        A budget is met only by a setting that was measured to keep it, a quality by one that was measured to reach it.
        """
        for turn in range(REFINEMENTS):
            chosen = self._choose(target, grid, edges)
            known = sorted(self._runs)
            if turn % 2:  # where the curve bends, its chord stays on one side: halve what holds the target
                above = min(bisect_left(known, chosen), len(known) - 1)
                chosen = (known[max(above - 1, 0)] + known[above]) / 2
            await self._add(chosen, grid, edges)
            nearest = min(self._runs, key=lambda position: abs(position - chosen))
            beyond = self._cost(target, *self._runs[nearest]) - target.aim
            least = 0.0 if target.quality is not None else -CLOSE
            if least <= beyond <= (0.0 if target.budget is not None else CLOSE):
                break
        if target.quality is not None:
            return self._build(grid, edges, target).position_of("target_quality", quality=target.quality)
        if target.budget is None:
            return self._choose(target, grid, edges)
        return max(at for at, (point, run) in self._runs.items() if self._cost(target, point, run) <= target.budget)

    def _doubt(self, target: Target, chosen: float) -> str:
        """A share that jumps over its target: what a setting between its two neighbouring runs gives is not known."""
        if target.large_share is None:
            return ""
        shares = {position: point.large_share.value for position, (point, _) in self._runs.items()}
        if min(abs(share - target.large_share) for share in shares.values()) <= CLOSE:
            return ""
        below = max((at for at in shares if at <= chosen), default=min(shares))
        above = min((at for at in shares if at >= chosen), default=max(shares))
        return (
            f"no run came within {CLOSE:g} of {target.large_share:g}: the neighbouring runs gave"
            f" {shares[below]:.3f} and {shares[above]:.3f}"
        )

    async def _survey(self) -> tuple[list[tuple[float, float]], list[float], Run | None]:
        """The knob's way: its ends, or for a threshold quantiles of what it is compared with under the small model."""
        if self._knob.never is None:
            low, high = self._parsed.knob_range
            return [(0.0, low), (1.0, high)], [], None
        alone = {**self.params, self._knob.name: self._knob.never}
        run = await self._run("small model alone", self.method, alone, _Values)
        values = np.array([value for record in run.tallies for value in record.values])
        down = getattr(self._parsed, "threshold_down", None)
        if down is not None:
            values = values[values >= down]
        if len(values) < GRID:
            wanted = "" if down is None else f" at or above threshold_down ({down:g} bits)"
            raise invalid(
                "data", f"gives {len(values)} places where a switch is allowed{wanted}; at least {GRID} are needed"
            )
        levels = np.linspace(0.0, 1.0, GRID)
        quantiles = np.quantile(values, 1.0 - levels if self._knob.falling else levels)
        if self._parsed.always is not None:  # of equal values the last ones are on neither side of any quantile
            quantiles[-1] = self._parsed.always
        edges = np.unique(np.quantile(values, DECILES))
        return [(float(p), float(v)) for p, v in zip(levels, quantiles, strict=True)], edges.tolist(), run

    async def _add(
        self, position: float, grid: Sequence[tuple[float, float]], edges: list[float], same: Run | None = None
    ) -> None:
        """Measure the setting at a position, unless that has been done."""
        if any(abs(known - position) < SAME for known in self._runs):
            return
        places, settings = zip(*grid, strict=True)
        value = along(places, settings, position)
        run = same or await self._run(
            f"{self._knob.name} {value:.4g}",
            self.method,
            {**self.params, self._knob.name: value},
            (lambda: Tally(edges)) if edges else None,
        )
        self._runs[position] = (self._point(position, value, run, edges), run)

    async def _run(self, what: str, method: str, params: dict[str, Any], recorder: Any = None) -> Run:
        total = self.num_points + 2 + REFINEMENTS
        self.advance(what, self._done, total)
        run = await self.bench.run(self.asked.questions, method, params, recorder)
        self._done += 1
        self.advance(what, min(self._done, total), total)
        return run

    def _point(self, position: float, value: float, run: Run, edges: list[float]) -> Point:
        large, seed = self._reference, self.bench.seed
        ones = np.ones_like(run.tokens)
        return Point(
            position=position,
            value=value,
            large_share=ratio(run.by_large, run.tokens, seed),
            paper=paper_cost(run, self.bench.models.large.num_parameters, seed),
            flops=ratio(run.flops, large.flops, seed),
            length=ratio(run.tokens, large.tokens, seed),
            quality=ratio(run.quality, ones, seed),
            retained=ratio(run.quality, large.quality, seed),
            seen=tuple(int(count) for count in _counts(run, edges).sum(axis=0)) if edges else (),
        )

    @property
    def _reference(self) -> Run:
        assert self.large is not None
        if not self.large.quality.sum():
            raise invalid("data", "the large model answers none of it well: quality relative to its own is undefined")
        return self.large

    def _choose(self, target: Target, grid: list[tuple[float, float]], edges: list[float]) -> float:
        found = self._build(grid, edges, target)
        if target.large_share is not None:
            return found.position_of("target_large_share", large_share=target.large_share)
        if target.quality is not None:
            return found.expected_at("target_quality", target.quality, margin=CLOSE / 2)
        assert target.budget is not None
        return found.position_within("budget", target.budget, [self._cost(target, *each) for each in self._sorted()])

    def _cost(self, target: Target, point: Point, run: Run) -> float:
        """What a point has of what the target is about."""
        measure = target.meter if target.budget is not None else "large_share" if target.quality is None else "retained"
        return self._wall(run).value if measure == "wall" else float(getattr(point, measure).value)

    def _build(self, grid: list[tuple[float, float]], edges: list[float], target: Target) -> KnobCalibration:
        fixed = self._parsed.model_dump(mode="json", include=set(self._knob.fixed), exclude_none=True)
        return KnobCalibration(
            method=self.method,
            knob=self._knob.name,
            fixed=fixed,
            basis=self._basis(),
            grid=tuple(grid),
            points=tuple(point for point, _ in self._sorted()),
            chosen=0.0,
            target=target.plain,
            edges=tuple(edges),
        )

    def _basis(self) -> Basis:
        sampling, asked = self.bench.sampling, self.asked
        quality = ratio(self._reference.quality, np.ones(len(asked.questions)), self.bench.seed)
        return Basis(
            data=asked.digest,
            source=asked.source,
            rows=len(asked.questions),
            measure=asked.measure,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=self.bench.seed,
            large_quality=quality,
        )

    def _sorted(self) -> list[tuple[Point, Run]]:
        return [self._runs[position] for position in sorted(self._runs)]

    def _wall(self, run: Run) -> Span:
        return ratio(run.wall_s, self._reference.wall_s, self.bench.seed)

    def _drift_limit(self, chosen: float, edges: list[float]) -> float:
        """What windows of the calibration's own answers stay below, whole answers drawn anew; at least 0.25."""
        _, run = self._runs[min(self._runs, key=lambda position: abs(position - chosen))]
        return drift_limit(_counts(run, edges), self.bench.seed) if edges else 0.0


def drift_limit(counts: Floats, seed: int) -> float:
    """Stability index that windows of the same answers stay below, drawn anew on both sides; at least 0.25.

    Args:
        counts: [answers, bins] what each answer showed.
        seed: of the draws.
    """
    seen = counts[counts.sum(axis=1) > 0]
    if not len(seen):
        return LEAST_DRIFT
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(DRIFT_ROUNDS):
        expected = seen[rng.integers(0, len(seen), len(seen))].sum(axis=0)
        live = seen[rng.integers(0, len(seen), WINDOW)].sum(axis=0)
        found.append(population_stability((expected / expected.sum()).tolist(), live.astype(int).tolist()))
    return max(LEAST_DRIFT, float(np.quantile(found, DRIFT_QUANTILE)))


class _Values:
    """Recorder that keeps every value."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)


def _counts(run: Run, edges: list[float]) -> Floats:
    """[questions, bins] of what a run's recorders saw."""
    rows = []
    for record in run.tallies:
        tally = record if isinstance(record, Tally) else Tally(edges)
        for value in record.values if isinstance(record, _Values) else ():
            tally.add(value)
        rows.append(tally.counts)
    return np.array(rows, dtype=np.float64)
