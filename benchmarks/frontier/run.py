"""`make bench-frontier`: runs what is missing of an experiment, then works out its frontier."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from benchmarks.frontier.figures import figures, kept_at
from benchmarks.frontier.page import SWITCHING, page
from benchmarks.frontier.prompts import gather
from benchmarks.harness import Report, command_line, note, run
from benchmarks.retention import RETENTIONS
from experiments.grid.answering import answer, call_of
from experiments.grid.bench import routing_of
from experiments.grid.cells import Cell
from experiments.grid.planning import Plan, make_plan
from experiments.grid.runner import FINAL, run_plan
from experiments.grid.scoring import Item
from experiments.grid.spec import ExperimentSpec, read_spec
from experiments.grid.store import Store
from pool.local_pool import LocalPool
from turnout.errors import TurnoutError

DEMO_ONLY = "answers are scored on tasks that the demo pair was trained on"
SPEC = Path("ops/experiments/frontier.yaml")
TRIAL = Item("trial", "What is 2 + 3?")
TRIAL_TOKENS = 4
QUICK = 8  # prompts of each kind


async def refused(plan: Plan) -> dict[str, str]:
    """By label, why the pool cannot answer in that way: mostly that nothing was trained for it. Each is tried briefly.

    Raises:
        TurnoutError: the pool cannot be loaded, or one fails for another reason.
    """
    cells = {cell.label: cell for cell in plan.cells}
    found: dict[str, str] = {}
    for name in dict.fromkeys(cell.pool for cell in cells.values()):
        pool = await asyncio.to_thread(LocalPool.load, name, plan.config)
        try:
            for label, cell in cells.items():
                if cell.pool == name and (why := await _refusal(pool, cell)):
                    found[label] = why
        finally:
            await pool.close()
    return found


async def _refusal(pool: LocalPool, cell: Cell) -> str:
    """Why a way of answering cannot be had; empty: it can."""
    short = replace(cell, sampling=cell.sampling.model_copy(update={"max_tokens": TRIAL_TOKENS}))
    try:
        pool.routing = routing_of(short, pool)
        await answer(pool, call_of(short, TRIAL, 0, pool.name), TRIAL.id)
    except TurnoutError as error:
        if error.code not in FINAL:
            raise
        return error.message
    finally:
        pool.routing = None
    return ""


def without(plan: Plan, labels: dict[str, str]) -> None:
    """Take ways of answering out of a plan, so that the store does not list them."""
    plan.refused |= {cell.name: labels[cell.label] for cell in plan.cells if cell.label in labels}
    plan.cells = [cell for cell in plan.cells if cell.label not in labels]
    plan.todo = [job for job in plan.todo if job.cell.label not in labels]


def shortened(asked: ExperimentSpec) -> ExperimentSpec:
    """The experiment with a few prompts of each kind, under a name of its own."""
    datasets = [choice.model_copy(update={"count": QUICK}) for choice in asked.datasets]
    return asked.model_copy(update={"name": f"{asked.name}-quick", "datasets": datasets})


def measure(options: argparse.Namespace) -> Report:
    """Run what is missing, and work out the frontier.

    Ways that the pool cannot answer by are named before anything is run, and are no failure.
    """
    store, asked = Store(options.store), read_spec(options.spec)
    asked = shortened(asked) if options.quick else asked
    plan = make_plan(asked, store)
    lacking = asyncio.run(refused(plan))
    for label, why in lacking.items():
        note(f"left out: {label}: {why}")
    without(plan, lacking)
    ran = run_plan(plan, store, lambda what, done, total: note(f"{done} of {total}: {what}"))
    prompts = gather(store.load(asked.name), store)
    prompts.left_out.update(lacking)
    report = page(figures(prompts), prompts, {each: kept_at(prompts, SWITCHING, each.share) for each in RETENTIONS})
    report.failures += [f"{name}: {why}" for name, why in ran.failed.items()]
    return report


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/frontier.md"), rounds=None, demo_only=DEMO_ONLY)
    made.add_argument("--spec", type=Path, default=SPEC)
    made.add_argument("--store", type=Path, default=Path(".runs/experiments"))
    return made


if __name__ == "__main__":
    run(parser(), measure)
