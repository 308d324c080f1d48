"""`turnout calibrate`: measure a method's knob on a pool, and keep the curve for requests to read from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.artifact_output import check_name, keep, warn
from cli.ask import pool_for, read_config
from cli.generate import parse_params
from cli.output import console, print_json, print_table
from cli.output_paths import check_out
from turnout.errors import invalid, not_found

if TYPE_CHECKING:
    from decoding.calibration import KnobCalibration
    from training.calibration_data import QuestionSet
    from training.knob_calibration import Calibrator, Outcome, Target
    from turnout.config import TurnoutConfig

Share = float | None


def calibrate(
    method: Annotated[str, typer.Argument(help="A method with a knob, such as entropy_adaptive.")],
    pool: Annotated[str, typer.Option(help="Which pool; may be left out where there is one.")] = "",
    config: Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo models.")] = None,
    data: Annotated[
        Path | None, typer.Option(help='JSON lines: {"prompt": ..., "answer": ...}; without answers, agreement counts.')
    ] = None,
    demo: Annotated[
        str | None, typer.Option(help="The demo's problems instead: arithmetic, edits, lists, passages, templates.")
    ] = None,
    target_large_share: Annotated[
        Share, typer.Option(help="Tokens written by the large model, per token of the answers.")
    ] = None,
    target_quality: Annotated[Share, typer.Option(help="Quality relative to the large model's own.")] = None,
    budget: Annotated[Share, typer.Option(help="Most cost, relative to the large model alone; see --meter.")] = None,
    meter: Annotated[str, typer.Option(help="Which cost --budget means: paper, flops or wall.")] = "paper",
    out: Annotated[str | None, typer.Option(help="Name of the artifact; absent: the method's.")] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A parameter that stays fixed; repeatable.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts used.")] = 200,
    points: Annotated[int, typer.Option(min=3, max=50, help="Settings tried, both ends included.")] = 9,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 160,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers; 0 is greedy.")] = 0.0,
    at_once: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Ask as chat messages, or continue the prompts.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of answers and intervals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the setting of a method's knob that meets a target, and write what was measured as an artifact.

    Requests and pools name it: --param calibration=NAME. It holds for this pair of models, this method and the fixed
    parameters, and is written only when the target can be met.
    """
    from training.knob_calibration import Target, calibratable

    calibratable(method)
    if budget is None and meter != Target.meter:
        raise invalid("meter", "says which cost --budget is about; give that, or leave it out")
    target = Target(target_large_share, target_quality, budget, meter)
    settings = read_config(config)
    if pool and pool not in settings.pools:
        raise not_found("pool", pool, list(settings.pools))
    name = pool_for(pool, settings)
    path = artifact_path(settings, name, out or method)
    asked = questions(data, demo, count)
    how = {"max_tokens": max_tokens, "temperature": temperature}
    fixed = {"method": method, "params": parse_params(param or []), "num_points": points}
    outcome, digests = asyncio.run(_measure(settings, name, asked, how, (seed, at_once, chat), fixed, target))
    report = keep_calibration(outcome, digests, path)
    warn(report)
    if as_json:
        print_json(report)
    else:
        _show(outcome, path)


def artifact_path(settings: TurnoutConfig, pool: str, name: str) -> Path:
    """Where the artifact goes; refused before anything is measured."""
    from decoding.artifacts import SUFFIX
    from turnout.config import artifacts_path

    folder = artifacts_path(settings.pools[pool])
    if folder is None:
        raise invalid(f"pools.{pool}.artifacts", "is not set: a calibration is kept in the pool's folder of artifacts")
    check_name(name, " without folder or ending")
    path = folder / f"{name}{SUFFIX}"
    check_out(path)
    return path


def questions(data: Path | None, demo: str | None, count: int) -> QuestionSet:
    """What is asked: a file or a kind of the demo's problems, exactly one of them."""
    from training.calibration_data import demo_questions, read_questions

    if (data is None) == (demo is None):
        raise invalid("data", "give either --data FILE or --demo KIND")
    return read_questions(data, count) if data is not None else demo_questions(demo or "", count)


async def _measure(
    settings: TurnoutConfig,
    pool_name: str,
    asked: QuestionSet,
    how: dict[str, Any],
    run: tuple[int, int, bool],
    fixed: dict[str, Any],
    target: Target,
) -> tuple[Outcome, dict[str, str]]:
    """What was measured, and the digests of the models by role."""
    from pool.local_pool import LocalPool
    from training.knob_calibration import Calibrator
    from training.question_runs import Bench
    from turnout.types import SamplingParams

    pool = LocalPool.load(pool_name, without_default(settings, pool_name))
    try:
        seed, at_once, chat = run
        bench = Bench.of(pool, SamplingParams(**how), seed, at_once, chat)
        bench.check(asked.questions)
        outcome = await _with_progress(Calibrator(bench, asked, **fixed), target)
        return outcome, {role: pool.model_pool.by_role(role).digest for role in ("small", "large")}
    finally:
        await pool.close()


def without_default(settings: TurnoutConfig, name: str) -> TurnoutConfig:
    """The configuration with nothing in the pool that may ask for the calibration that is about to be made."""
    from turnout.config import MethodChoice

    bare = settings.pools[name].model_copy(update={"default": MethodChoice(name="plain"), "routing": None})
    return settings.model_copy(update={"pools": {**settings.pools, name: bare}})


async def _with_progress(calibrator: Calibrator, target: Target) -> Outcome:
    from rich.progress import Progress

    shown = console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        calibrator.advance = advance
        return await calibrator.measure(target)


def keep_calibration(outcome: Outcome, digests: dict[str, str], path: Path) -> dict[str, Any]:
    """Write the curve as an artifact, and everything measured, wall clock included, as its report.

    Returns:
        The report.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be written.
    """
    from dataclasses import asdict

    from training.knob_calibration import TRAINER

    found = outcome.calibration
    report = {
        **{key: value for key, value in asdict(found).items() if key not in ("grid", "version")},
        "artifact": path.stem,
        "setting": found.setting(found.chosen),
        "wall": [asdict(each) for each in outcome.wall],
        "wall_large_s": outcome.wall_large_s,
        "warning": outcome.warning,
    }
    return keep(found.to_artifact(digests, TRAINER), report, path)


def _show(outcome: Outcome, path: Path) -> None:
    found: KnobCalibration = outcome.calibration
    print_table(
        [
            f">{found.knob}",
            ">large tokens",
            ">paper cost",
            ">FLOPs",
            ">wall clock",
            ">length",
            ">quality",
            ">of large's",
        ],
        [
            [
                f"{p.value:.4g}",
                p.large_share,
                f"{p.paper.value:.3f}",
                f"{p.flops.value:.3f}",
                wall,
                f"{p.length.value:.2f}",
                p.quality,
                f"{p.retained.value:.1%}",
            ]
            for p, wall in zip(found.points, outcome.wall, strict=True)
        ],
    )
    typer.echo(
        f"quality: {found.basis.measure} on {found.basis.rows} prompts ({found.basis.source});"
        f" the large model alone has {found.basis.large_quality}; intervals are 95%"
    )
    aim = ", ".join(f"{key} {value}" for key, value in found.target.items())
    typer.echo(f"{aim}: {found.knob} {found.setting(found.chosen):.6g}; written to {path}")
    typer.echo(f"use it: --method {found.method} --param calibration={path.stem}")
