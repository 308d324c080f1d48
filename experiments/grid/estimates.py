"""Estimate of the missing cells of an experiment, before they are run."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.grid.cells import Cell
from experiments.grid.code import words_of
from experiments.grid.depends import computing, members_of, place
from experiments.grid.planning import Plan
from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Store
from turnout.checkpoint_files import weight_files
from turnout.config import TurnoutConfig, artifacts_path, model_path

# For a first estimate, before anything was measured: bytes of weights a processor reads in a second.
BYTES_PER_S = 5e9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of running a number of cells.

    Attributes:
        seconds: on the clock, all workers together.
        measured: by earlier cells of the same models on this machine; otherwise it is a rough guess.
        tokens: generated at most.
        price: in the currency of `price_per_hour`; None where that is not given.
    """

    cells: int
    prompts: int
    seconds: float
    measured: bool
    tokens: int
    price: float | None

    def __str__(self) -> str:
        basis = "from what was measured" if self.measured else "a rough guess: nothing of these models was measured yet"
        price = "" if self.price is None else f", price {self.price:.2f}"
        return (
            f"{self.cells} cells, {self.prompts} prompts, at most {self.tokens} tokens,"
            f" about {_hours(self.seconds)} ({basis}){price}"
        )


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def estimate(plan: Plan, store: Store) -> Estimate:
    """What the missing cells would take."""
    alike = {_computed_by(cell) for cell in plan.cells}
    return _estimated(plan.spec, plan.config, store, len(plan.todo), plan.prompts, alike)


def estimated(spec: ExperimentSpec, config: TurnoutConfig, store: Store, cells: int, prompts: int) -> Estimate:
    """Estimate what a number of cells and prompts would take, of a grid that is too large to be planned."""
    alike = set()
    for name in spec.pools or list(config.pools):
        members = members_of(config, name)
        alike.add((computing(members, artifacts_path(config.pools[name]), words_of("plain", {})), place(members)))
    return _estimated(spec, config, store, cells, prompts, alike)


def _estimated(
    spec: ExperimentSpec,
    config: TurnoutConfig,
    store: Store,
    cells: int,
    prompts: int,
    alike: set[tuple[str, str]],
) -> Estimate:
    """By cells that the same models have answered on this machine; without any, by the weights' bytes."""
    tokens = prompts * spec.sampling.max_tokens
    known = [
        (facts.wall_s, count)
        for cell, facts, count in store.every_facts()
        if facts.load is None and count and _computed_by(cell) in alike
    ]
    if known:
        seconds = prompts * sum(wall for wall, _ in known) / sum(count for _, count in known)
    else:
        at_once = max(load.at_once for load in spec.loads)
        seconds = tokens * _weight_bytes(config) / BYTES_PER_S / at_once
    seconds /= max(spec.workers, 1)
    units = spec.accelerators * max(spec.workers, 1)
    price = None if spec.price_per_hour is None else spec.price_per_hour * units * seconds / 3600
    return Estimate(cells, prompts, seconds, bool(known), tokens, price)


def _computed_by(cell: Cell) -> tuple[str, str]:
    return cell.depends.get("models", ""), cell.depends.get("machine", "")


def _weight_bytes(config: TurnoutConfig) -> int:
    folders = {model_path(model) for model in config.models.values()}
    return max(sum(path.stat().st_size for path in weight_files(folder)) for folder in folders)
