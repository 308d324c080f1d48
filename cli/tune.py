"""`turnout experiment tune`: a search over a method's parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import pool_for, read_config
from cli.calibrate import artifact_path, keep_calibration, questions, without_default
from cli.generate import parse_params
from cli.output import print_json, shown_progress
from cli.output_paths import check_out
from turnout.errors import TurnoutError, not_found

if TYPE_CHECKING:
    from experiments.tuning import Range, Tried, Tuner
    from training.calibration_data import QuestionSet
    from training.knob_calibration import Target
    from turnout.config import TurnoutConfig

Share = float | None


def tune(
    method: Annotated[str, typer.Argument(help="Any method, such as entropy_adaptive or speculative.")],
    search: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUES", help="LOW:HIGH, LOW:HIGH:log, or A,B,C; repeatable."),
    ],
    pool: Annotated[str, typer.Option(help="Which pool; may be left out where there is one.")] = "",
    config: Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo models.")] = None,
    data: Annotated[Path | None, typer.Option(help='JSON lines: {"prompt": ..., "answer": ...}.')] = None,
    demo: Annotated[
        str | None, typer.Option(help="The demo's problems instead: arithmetic, edits, lists, passages, templates.")
    ] = None,
    target_quality: Annotated[Share, typer.Option(help="Quality to keep, relative to the large model's own.")] = None,
    budget: Annotated[Share, typer.Option(help="Most cost, relative to the large model alone.")] = None,
    meter: Annotated[str, typer.Option(help="Which cost: paper, flops or wall.")] = "paper",
    param: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A parameter that stays fixed; repeatable.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings tried; with --journal earlier ones count.")] = 30,
    count: Annotated[int, typer.Option(min=1, help="Prompts used.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 160,
    seed: Annotated[int, typer.Option(min=0, help="Of answers and of the search.")] = 0,
    journal: Annotated[Path | None, typer.Option(help="File of trials: an interrupted search continues.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Name of an artifact with the knob's curve at the best setting.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search over a method's parameters: the cheapest setting that keeps a quality, or the best within a budget.

    With --out, the knob of a switching method is then calibrated with the other parameters as found, into the artifact
    that `turnout calibrate` writes and serving reads.
    """
    from experiments.tuning import Range
    from training.knob_calibration import Target, calibratable

    target = Target(None, target_quality, budget, meter)
    space = {name: Range.parse(name, str(text)) for name, text in parse_texts(search).items()}
    asked = questions(data, demo, count)
    settings = read_config(config)
    if pool and pool not in settings.pools:
        raise not_found("pool", pool, list(settings.pools))
    path = None
    if out is not None:
        calibratable(method)
        path = artifact_path(settings, pool_for(pool, settings), out)
    if journal is not None:
        check_out(journal, "journal")
    how = {"max_tokens": max_tokens, "temperature": 0.0}
    fixed = parse_params(param or [])
    name, found = pool_for(pool, settings), None if as_json else _show
    run = _search(settings, name, asked, how, (method, fixed, space), target, (trials, seed), journal, path, found)
    best, refusal = asyncio.run(run)
    if as_json:
        print_json({"method": method, "best": best, "artifact": path if refusal is None else None})
    if refusal is not None:
        raise refusal
    if path is not None and not as_json:
        typer.echo(f"written to {path}; use it: --method {method} --param calibration={path.stem}")


def _show(best: Tried) -> None:
    costs = ", ".join(f"{name} {value:.3f}" for name, value in best.costs.items())
    typer.echo(f"best: {best.params}: {best.retained:.1%} of the large model's quality; cost {costs}")


def parse_texts(given: list[str]) -> dict[str, str]:
    """`name=text` pairs.

    Raises:
        typer.BadParameter: a pair is none, or a name is given twice.
    """
    found: dict[str, str] = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name or name in found:
            raise typer.BadParameter(f"{pair!r} must be NAME=VALUES, each name once", param_hint="--search")
        found[name] = text
    return found


async def _search(
    settings: TurnoutConfig,
    pool_name: str,
    asked: QuestionSet,
    how: dict[str, Any],
    what: tuple[str, dict[str, Any], dict[str, Range]],
    target: Target,
    run: tuple[int, int],
    journal: Path | None,
    path: Path | None,
    found: Callable[[Tried], None] | None,
) -> tuple[Tried, TurnoutError | None]:
    """Return the best setting, passed to `found` at once, and why its curve was not written, if one was asked for."""
    from experiments.tuning import Tuner
    from pool.local_pool import LocalPool
    from training.question_runs import Bench
    from turnout.types import SamplingParams

    pool = LocalPool.load(pool_name, without_default(settings, pool_name))
    try:
        (trials, seed), (method, fixed, space) = run, what
        bench = Bench.of(pool, SamplingParams(**how), seed)
        bench.check(asked.questions)
        with shown_progress() as advance:
            tuner = Tuner(bench, asked, method, fixed, space, journal, advance)
            best = await tuner.search(target, trials, seed)
        if found is not None:
            found(best)
        try:
            if path is not None:
                await _calibrate(tuner, best, target, path)
        except TurnoutError as refusal:  # the search is done: it took hours, and what it found holds
            return best, refusal
        return best, None
    finally:
        await pool.close()


async def _calibrate(tuner: Tuner, best: Tried, target: Target, path: Path) -> None:
    with shown_progress() as tuner.tell:
        outcome = await tuner.calibrate(best, target)
    if outcome is None:
        return
    digests = {role: tuner.bench.models.by_role(role).digest for role in ("small", "large")}
    keep_calibration(outcome, digests, path)
