"""`turnout experiment`: comparisons one can believe, run in cells that are never computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.experiment_answers import answers
from cli.experiment_output import show_comparison, show_live, show_report
from cli.output import console, print_error, print_json, print_table, shown_progress
from cli.output_paths import check_folder, check_out
from cli.tune import tune
from turnout.errors import TurnoutError, invalid

if TYPE_CHECKING:
    from experiments.grid.planning import Plan
    from experiments.grid.spec import ExperimentSpec
    from experiments.grid.store import Store

STORE = Path(".runs/experiments")

app = typer.Typer(help="Compare ways of answering on data: quality, cost, time, with intervals.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Of an experiment, as in its file.")]
Folder = Annotated[Path, typer.Option("--store", help="Where results are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Run however many cells are missing, without asking.")]
Again = Annotated[bool, typer.Option("--again", help="Try cells once more that were refused.")]
Out = Annotated[Path | None, typer.Option(help="Folder for NAME.html, NAME.md and NAME.json.")]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The experiment, as docs/experiments.md says.", metavar="FILE.yaml")],
    store: Folder = STORE,
    yes: Yes = False,
    again: Again = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run what is missing of an experiment, and report.

    Results are kept by all they depend on (prompts, method and parameters, models, code, machine): a run that was cut
    off continues, one that is complete computes nothing, and one more method costs its own cells only.

    Exit code 1 when a cell failed; the others are there, and the next run tries it again.
    """
    from experiments.grid.spec import read_spec

    _run(read_spec(file), store, yes, again, out, as_json)


@app.command()
def resume(
    name: Name,
    store: Folder = STORE,
    yes: Yes = False,
    again: Again = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Go on with an experiment as its file was when it was last run."""
    from experiments.grid.store import Store

    _run(Store(store).load(name).spec, store, yes, again, out, as_json)


@app.command("list")
def list_(store: Folder = STORE, as_json: AsJson = False) -> None:
    """List experiments, and how far they are."""
    from collections import Counter

    from experiments.grid.store import Store

    kept = Store(store)
    found: list[dict[str, Any]] = []
    for name in kept.names():
        try:
            cells = kept.load(name).cells
        except TurnoutError as error:  # one that another version wrote hides no other
            print_error(error.message)
            continue
        counted = Counter(kept.state(cell) for cell in cells)
        found.append({"name": name, "cells": len(cells), **{str(state): count for state, count in counted.items()}})
    if as_json:
        print_json(found)
        return
    states = ("done", "unscored", "partial", "absent", "failed", "refused")
    rows = [[each["name"], each["cells"], *(each.get(state, 0) for state in states)] for each in found]
    print_table(["experiment", ">cells", *(f">{state}" for state in states)], rows)


@app.command()
def show(name: Name, store: Folder = STORE, out: Out = None, as_json: AsJson = False) -> None:
    """Report what is there of an experiment; nothing is run."""
    _show(name, store, out, as_json)


@app.command()
def rm(name: Name, store: Folder = STORE) -> None:
    """Delete an experiment, and the cells that no other one has."""
    from experiments.grid.store import Store

    typer.echo(f"{Store(store).remove(name)} cells deleted")


@app.command()
def prune(store: Folder = STORE) -> None:
    """Delete cells that no experiment has any more: those of code, models or prompts that were changed since."""
    from experiments.grid.store import Store

    typer.echo(f"{Store(store).prune()} cells deleted")


@app.command()
def compare(
    then: Annotated[str, typer.Argument(help="The experiment to compare with.", metavar="THEN")],
    now: Annotated[str, typer.Argument(help="The experiment that may have become worse.", metavar="NOW")],
    store: Folder = STORE,
    time_tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Look at time too: share by which it may grow, such as 0.25.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name what got worse between two experiments: quality and cost of the same way of answering, prompt by prompt.

    All figures are tested together: where nothing changed, the chance of any alarm is at most 5%.

    Exit code 1 when something got worse, or when a way that NOW asks for is not there or not whole.
    """
    from experiments.grid.store import Store
    from experiments.reports.comparing import compare as compared

    kept = Store(store)
    found = compared(kept.load(then), kept.load(now), kept, time_tolerance)
    if not found.changes and not found.lost:
        raise invalid("now", f"{now!r} and {then!r} have no way of answering in common")
    show_comparison(found, as_json)
    if found.regressions or found.lost:
        raise typer.Exit(1)


app.command()(answers)
app.command()(tune)


@app.command()
def live(
    logs: Annotated[list[Path], typer.Argument(help="Files of the route log.", metavar="LOG...")],
    control: Annotated[str, typer.Option(help="Arm of the split that others are compared with.")] = "",
    metric: Annotated[
        str,
        typer.Option(help="What the stop rule watches: answered, score, large_share, paper, flops, ttft_s, wall_s."),
    ] = "paper",
    most: Annotated[float, typer.Option(min=0.0, help="No value counts as more than this.")] = 2.0,
    margin: Annotated[float, typer.Option(min=0.0, help="A difference that matters.")] = 0.0,
    pool: Annotated[str, typer.Option(help="The only pool that is looked at; absent: all in the log.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for live.html, live.md and live.json; with --pool, live-POOL.*.")
    ] = None,
    decide: Annotated[
        Path | None, typer.Option(help="File that the split names as `decided`: written once one arm is left.")
    ] = None,
    scorer: Annotated[
        Path | None,
        typer.Option(help="YAML file with `scorer`, as of a dataset, that scores answers; the log must hold texts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the arms of a split on a served endpoint, and shadows with their requests.

    The unit is what the split keeps together. The stop rule may be asked as often as one likes, of sessions that are
    over.
    """
    import asyncio

    from experiments.live import METRICS, LiveRule, of_pool
    from experiments.live_scores import Scored, read_scorer, score_entries
    from experiments.reports.live import make_live_report, winner
    from router.experiment_winner import write_decided
    from router.summary import read_log

    if metric not in METRICS:
        raise invalid("metric", f"must be one of {', '.join(METRICS)} (got {metric!r})")
    if most <= 0:
        raise invalid("most", "must be above 0")
    if metric == "score" and scorer is None:
        raise invalid("metric", "score needs --scorer FILE.yaml")
    if out is not None:
        check_folder(out)
    if decide is not None:
        check_out(decide)
    found = Scored([entry for path in logs for entry in read_log(path)], [])
    if scorer is not None:
        found = asyncio.run(score_entries(of_pool(found.entries, pool), read_scorer(scorer), control))
    report = make_live_report(found.entries, control, LiveRule(metric, most, margin), pool, found.notes)
    show_live(report, out, as_json)
    if decide is not None and (arm := winner(report)):
        write_decided(decide, {"arm": arm, "metric": metric, "why": report.ends})


@contextmanager
def _on_cluster(plan: Plan) -> Iterator[None]:
    """The configured cluster, where there is one and it is needed; else the run has a Ray of its own, or none."""
    address = plan.config.ray.address
    if address is None or not plan.spec.workers or not (plan.todo or plan.references):
        yield
        return
    from deployments.cluster import connect, leave

    connect(address)
    try:
        yield
    finally:
        leave()


def _run(spec: ExperimentSpec, folder: Path, yes: bool, again: bool, out: Path | None, as_json: bool) -> None:
    from experiments.grid.planning import make_plan
    from experiments.grid.runner import run_plan
    from experiments.grid.store import Store

    if out is not None:
        check_folder(out)
    store = Store(folder)
    _ask_before_planning(spec, store, yes)
    plan = make_plan(spec, store, again)
    _ask(plan, store, yes)
    with _on_cluster(plan), shown_progress() as advance:
        ran = run_plan(plan, store, advance)
    console(stderr=True).print(
        f"{len(plan.cells)} cells: {len(plan.cells) - len(plan.todo)} were there, {ran.done} computed,"
        f" {len(ran.failed)} failed, {len(plan.refused)} left out"
    )
    for name, why in ran.failed.items():
        print_error(f"{name}: {why}")
    _show(spec.name, folder, out, as_json)
    if ran.failed:
        raise typer.Exit(1)


def _ask_before_planning(spec: ExperimentSpec, store: Store, yes: bool) -> None:
    """A grid too large to be made is asked about before it is."""
    from experiments.grid.datasets import open_dataset
    from experiments.grid.estimates import estimated
    from experiments.grid.planning import LARGE, count_cells
    from experiments.grid.spec import config_of

    cells = count_cells(spec)
    if cells <= LARGE:
        return
    prompts = cells // len(spec.datasets) * sum(len(open_dataset(choice).items) for choice in spec.datasets)
    _confirm(f"the whole grid: {estimated(spec, config_of(spec), store, cells, prompts)}", yes)


def _ask(plan: Plan, store: Store, yes: bool) -> None:
    from experiments.grid.estimates import estimate

    if not plan.todo:
        return
    found = estimate(plan, store)
    if len(plan.todo) > plan.spec.max_cells:
        _confirm(f"missing: {found}", yes)
    else:
        console(stderr=True).print(f"missing: {found}")


def _confirm(what: str, yes: bool) -> None:
    """Ask for confirmation on a terminal.

    Raises:
        TurnoutError: there is no terminal, or the answer is no.
    """
    import sys

    if yes:
        return
    if not sys.stdin.isatty() or not typer.confirm(f"{what}. Run it?"):
        raise invalid("max_cells", f"{what}; run it with --yes")


def _show(name: str, folder: Path, out: Path | None, as_json: bool) -> None:
    from experiments.grid.store import Store
    from experiments.reports.data import make_report

    store = Store(folder)
    show_report(make_report(store.load(name), store), out, as_json)
