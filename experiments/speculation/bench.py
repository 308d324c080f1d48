"""Running the comparison: measure what is not measured yet, and report all that is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from experiments.grid.contenders import PLAIN, contenders
from experiments.speculation.cells import Cell, Plan
from experiments.speculation.grid import PANEL, Axes, Grid, Setting
from experiments.speculation.measure import Panel, measure
from experiments.speculation.summary import Figures, figures
from turnout.errors import not_found

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """Results after a run.

    Attributes:
        grid: models and contenders.
        cells: what was measured in this setting, now or before.
        wanted: cells of the whole comparison, those not measured yet included.
    """

    grid: Grid
    cells: list[Cell]
    wanted: int

    def conditions(self) -> list[tuple[float, int]]:
        """Temperatures and batch sizes that were measured over plain decoding, greedy and small first."""
        return sorted({condition for condition, baseline, _ in self._figures if baseline == PLAIN})

    def figures(self, temperature: float, batch: int) -> dict[str, dict[str, Figures]]:
        """By contender and group, over plain decoding; all groups together stand under ""."""
        return {
            name: found
            for (condition, baseline, name), found in self._figures.items()
            if baseline == PLAIN and condition == (temperature, batch)
        }

    def peers(self) -> dict[str, dict[str, Figures]]:
        """Ours over each of Hugging Face's ways, by "ours over theirs" and group; all together stand under ""."""
        return {
            f"{name} over {baseline}": found
            for (_, baseline, name), found in self._figures.items()
            if baseline != PLAIN
        }

    @property
    def wrong(self) -> int:
        """Answers that differ from plain decoding's where they must not."""
        return sum(found[""].wrong for found in self._figures.values())

    @cached_property
    def _figures(self) -> dict[tuple[tuple[float, int], str, str], dict[str, Figures]]:
        """By temperature and batch, baseline, and contender."""
        found: dict[tuple[tuple[float, int], str, str], list[Cell]] = {}
        for cell in self.cells:
            plan = cell.plan
            found.setdefault(((plan.temperature, plan.batch), plan.baseline, plan.challenger), []).append(cell)
        made = {}
        for key, mine in found.items():
            contender = self.grid.contenders[key[-1]]
            made[key] = {"": figures(mine, contender)}
            made[key] |= {cell.plan.group: figures([cell], contender) for cell in mine}
        return made


async def run(setting: Setting, axes: Axes, out: Path, progress: Progress) -> Report:
    """Measure the cells of these axes that `out` does not hold yet, each saved at once; then report all it holds.

    Args:
        setting: models and prompts.
        axes: which cells.
        out: folder of the cells.
        progress: called with what comes next.

    Raises:
        TurnoutError: an unknown method, or models that cannot be loaded.
    """
    unknown = next((name for name in axes.methods if name not in contenders()), None)
    if unknown is not None:
        raise not_found("methods", unknown, list(contenders()))
    grid = Grid.open(setting)
    try:
        await _measure(grid, grid.plans(axes), out, progress)
        asked = {plan.address: plan for plan in [*grid.whole(), *grid.plans(axes)]}
        cells = [cell for plan in asked.values() if (cell := Cell.load(plan, out)) is not None]
        return Report(grid, cells, len(asked))
    finally:
        await grid.pool.close()


async def _measure(grid: Grid, plans: list[Plan], out: Path, progress: Progress) -> None:
    """Measure what is left. A contender that fails says why among those that did not run, and the others go on."""
    left = [plan for plan in plans if Cell.load(plan, out) is None]
    if len(left) < len(plans):
        progress(f"{len(plans) - len(left)} of {len(plans)} cells are there already")
    clock = _Clock(len(left), progress)
    for panel in _panels(left):
        able = [plan for plan in panel if plan.challenger not in grid.missing]
        try:
            clock.say(able)
            cells = await _panel(grid, able)
        except Exception:  # one after the other, to see whose it is
            cells = [cell for plan in able for cell in await _alone(grid, plan, progress)]
        for cell in cells:
            cell.save(out)
        clock.done += len(panel)


def _panels(plans: list[Plan]) -> list[list[Plan]]:
    """Cells that differ in nothing but their challenger, a few at a time."""
    groups: dict[tuple[object, ...], list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.baseline, plan.group, plan.temperature, plan.batch), []).append(plan)
    return [mine[start : start + PANEL] for mine in groups.values() for start in range(0, len(mine), PANEL)]


async def _panel(grid: Grid, plans: list[Plan]) -> list[Cell]:
    if not plans:
        return []
    baseline, challengers = grid.baseline(plans[0]), tuple(grid.challenger(plan) for plan in plans)
    return await measure(plans, Panel(baseline, challengers), grid.group(plans[0].group), grid.pool, grid.setting.turns)


async def _alone(grid: Grid, plan: Plan, progress: Progress) -> list[Cell]:
    try:
        return await _panel(grid, [plan])
    except Exception as error:
        if plan.challenger == PLAIN:
            raise
        where = f"{plan.group}, T={plan.temperature:g}, batch {plan.batch}"
        grid.missing[plan.challenger] = f"failed at {where}: {type(error).__name__}: {error}"
        progress(f"{plan.challenger} {grid.missing[plan.challenger]}")
        return []


@dataclass(slots=True)
class _Clock:
    """Progress of a run, and an estimate of the rest."""

    total: int
    progress: Progress
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def say(self, plans: list[Plan]) -> None:
        for first in plans[:1]:
            so_far = time.monotonic() - self.started
            rest = f", about {so_far / self.done * (self.total - self.done) / 60:.0f} min left" if self.done else ""
            names = ", ".join(plan.challenger for plan in plans)
            where = f"{first.group}, T={first.temperature:g}, batch {first.batch}, over {first.baseline}"
            self.progress(f"{self.done} of {self.total} cells{rest}; {where}: {names}")
