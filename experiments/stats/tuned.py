"""A setting fixed for all tasks and one tuned for each: what tuning is worth, and how far settings lie apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.stats.intervals import Floats


@dataclass(frozen=True, slots=True)
class Tuned:
    """Settings of one method over several tasks.

    Attributes:
        fixed: number of the setting with the best mean over the tasks.
        best: [tasks] number of each task's own best setting.
        fixed_scores: [tasks] of the fixed setting.
        tuned_scores: [tasks] of the best: on the prompts it was chosen on, so never below the fixed one.
        held_out: [tasks] of what one half of the prompts chose, on the other half; NaN of a single prompt.
        spread: [tasks] (best - worst) / best; NaN where the best is 0.
    """

    fixed: int
    best: list[int]
    fixed_scores: Floats
    tuned_scores: Floats
    held_out: Floats
    spread: Floats


def tuned(scores: list[Floats]) -> Tuned:
    """Choose settings.

    Args:
        scores: by task, [settings, prompts], from 0 to 1; settings in the same order, at least one prompt each.

    Raises:
        ValueError: no tasks, or tasks of other settings or without prompts.
    """
    if not scores or not all(each.ndim == 2 and each.size and len(each) == len(scores[0]) for each in scores):
        raise ValueError("every task needs [settings, prompts] of the same settings")
    means = np.array([each.mean(axis=1) for each in scores])  # [tasks, settings]
    fixed, best = int(means.mean(axis=0).argmax()), means.argmax(axis=1)
    tops, worst = means.max(axis=1), means.min(axis=1)
    return Tuned(
        fixed=fixed,
        best=[int(each) for each in best],
        fixed_scores=means[:, fixed],
        tuned_scores=tops,
        held_out=np.array([_held_out(each) for each in scores]),
        spread=np.divide(tops - worst, tops, out=np.full_like(tops, np.nan), where=tops > 0),
    )


def _held_out(scores: Floats) -> float:
    """Each half of the prompts is scored with the setting that the other half chose.

    Args:
        scores: [settings, prompts].
    """
    count = int(scores.shape[1])
    if count < 2:
        return float("nan")
    odd: npt.NDArray[np.bool_] = np.arange(count) % 2 == 1
    found = 0.0
    for chosen_on in (odd, ~odd):
        setting = int(scores[:, chosen_on].mean(axis=1).argmax())
        found += float(scores[setting, ~chosen_on].sum())
    return found / count
