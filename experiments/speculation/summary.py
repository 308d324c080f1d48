"""From cells to figures: speed-ups with intervals, tokens of a forward, acceptance, equality."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments.grid.contenders import Contender
from experiments.speculation.cells import Cell
from experiments.stats.intervals import Floats, Interval, resampled_sums
from turnout.cost import SpeculationMeter

ALL = "all texts"


@dataclass(frozen=True, slots=True)
class Figures:
    """One contender on one group, or on all of them together, at one temperature and batch.

    Attributes:
        speedup: its tokens per second over the baseline's, bootstrapped over turns, both sides of a turn together.
        halves: the same of every other prompt, and of those between: who is chosen for being the fastest on the one
            half is judged by the other.
        baseline_tokens_per_s: of the baseline in the same turns.
        tokens_per_step: tokens of a forward of the target.
        fed_per_token: tokens fed to the target for each of the answer's, prompts left out.
        acceptance: share of drafted tokens that stayed.
        by_depth: share of the rounds that drafted so deep which accepted so deep.
        draft_share: of the wall time of drafting and verifying.
        undrafted: share of rounds without a draft.
        equality: how answers compare with plain decoding's, in words.
        wrong: answers that differ where they must not.
    """

    contender: str
    baseline: str
    group: str
    temperature: float
    batch: int
    answers: int
    speedup: Interval
    halves: tuple[Interval, Interval]
    baseline_tokens_per_s: float
    tokens_per_step: float
    fed_per_token: float
    acceptance: float
    by_depth: tuple[float, ...]
    draft_share: float
    undrafted: float
    equality: str
    wrong: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data, rounded to what the measurement can bear."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


def figures(cells: list[Cell], contender: Contender) -> Figures:
    """The figures of a contender's cells together, which differ in nothing but their group.

    Args:
        cells: at least one.
        contender: whose they are.
    """
    plan = cells[0].plan
    turns = np.array([turn for cell in cells for turn in cell.turns], dtype=np.float64)
    second = np.array([place % cell.turns_once % 2 == 1 for cell in cells for place in range(len(cell.turns))])
    meter, steps, fed = SpeculationMeter(), 0, 0.0
    for cell in cells:
        meter.merge(cell.speculation)
        steps += cell.target_steps
        fed += cell.target_tokens
    tokens = int(turns[:, 3].sum())
    drafted = meter.drafted_at[0] if meter.drafted_at else 0
    equality, wrong = _equality(cells, contender)
    return Figures(
        contender=plan.challenger,
        baseline=plan.baseline,
        group=plan.group if len(cells) == 1 else ALL,
        temperature=plan.temperature,
        batch=plan.batch,
        answers=sum(cell.num_answers for cell in cells),
        speedup=speedup(turns),
        halves=(speedup(turns[~second]), speedup(turns[second] if second.any() else turns)),
        baseline_tokens_per_s=float(turns[:, 1].sum() / turns[:, 0].sum()),
        tokens_per_step=tokens / steps if steps else 0.0,
        fed_per_token=fed / tokens if tokens else 0.0,
        acceptance=meter.accepted_tokens / meter.draft_tokens if meter.draft_tokens else 0.0,
        by_depth=tuple(meter.acceptance),
        draft_share=meter.draft_time_share,
        undrafted=1.0 - drafted / meter.rounds if meter.rounds else 0.0,
        equality=equality,
        wrong=wrong,
    )


def speedup(turns: Floats, seed: int = 0) -> Interval:
    """Tokens per second over the baseline's, with its 95% interval over turns.

    Args:
        turns: [turns, 4], seconds and tokens of the baseline, then of the challenger.
        seed: of the bootstrap.
    """
    return resampled_sums(_ratio, turns, seed)


def _ratio(sums: Floats) -> Floats:
    """[..., 4] -> [...]."""
    rates: Floats = sums[..., 3] / sums[..., 2] / (sums[..., 1] / sums[..., 0])
    return rates


def _equality(cells: list[Cell], contender: Contender) -> tuple[str, int]:
    found = [cell.equality for cell in cells if cell.equality is not None]
    if not found:
        return f"{sum(cell.agreement * cell.num_answers for cell in cells):.0f} equal", 0
    if not contender.lossless:
        return "own law", 0
    if cells[0].plan.temperature and not contender.seeded:
        return "in law", 0
    equal, ties, wrong = (sum(each[name] for each in found) for name in ("equal", "ties", "wrong"))
    words = [f"{equal} equal", *([f"{ties} ties"] if ties else []), *([f"{wrong} WRONG"] if wrong else [])]
    return ", ".join(words), wrong


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return [_rounded(each) for each in value.values()]
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value
