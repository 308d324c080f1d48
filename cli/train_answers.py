"""`turnout train uni_encoder`, `rank_gen` and `daemon`: what chooses among answers, from passages of text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.artifact_output import keep, warn
from cli.ask import read_config
from cli.output import print_json, shown_progress
from cli.train_options import AsJson, Config, Epochs, Out, Pool, Seed, Temperature, check_artifact
from turnout.errors import invalid, not_found

if TYPE_CHECKING:
    from decoding.model import ModelPool
    from training.continuations import Advance, Made, Passage

    Work = Callable[[ModelPool, list[Passage], Advance], Awaitable[Made]]

Texts = Annotated[Path, typer.Option("--passages", help="Text file, a passage a line; a quarter is held out.")]
Length = Annotated[int, typer.Option(min=4, max=256, help="Tokens of a prefix, and of a continuation.")]
Count = Annotated[int, typer.Option(min=16, help="Passages used.")]
Reads = Annotated[Literal["small", "large"], typer.Option(help="Whose hidden states are read, and who writes.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("uni_encoder")(uni_encoder)
    app.command("rank_gen")(rank_gen)
    app.command("daemon")(daemon)


def uni_encoder(
    out: Out,
    passages: Texts,
    config: Config = None,
    pool: Pool = None,
    count: Count = 512,
    length: Length = 24,
    candidates: Annotated[int, typer.Option(min=2, max=64, help="Continuations of a prefix.")] = 8,
    reads: Reads = "large",
    hidden: Annotated[int, typer.Option(min=0, help="Width of the head's hidden layer; 0: linear.")] = 64,
    epochs: Epochs = 40,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the head of the aggregator uni_encoder: the true continuation among those of other passages."""

    def work(models: ModelPool, made: list[Passage], advance: Advance) -> Awaitable[Made]:
        from training.continuations import STEADY, train_uni_encoder

        schedule = replace(STEADY, seed=seed)
        return train_uni_encoder(models, reads, made, candidates, hidden, epochs, schedule, advance)

    _run(work, (config, pool), out, (passages, count, length, seed), as_json)


def rank_gen(
    out: Out,
    passages: Texts,
    config: Config = None,
    pool: Pool = None,
    count: Count = 512,
    length: Length = 24,
    size: Annotated[int, typer.Option(min=1, max=4096, help="Numbers of a vector.")] = 64,
    reads: Reads = "large",
    epochs: Epochs = 40,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the dual encoder of the aggregator rank_gen against other parts of a text and what the model writes."""

    def work(models: ModelPool, made: list[Passage], advance: Advance) -> Awaitable[Made]:
        from training.continuations import STEADY, train_rank_gen

        return train_rank_gen(models, reads, made, size, epochs, replace(STEADY, seed=seed), advance)

    _run(work, (config, pool), out, (passages, count, length, seed), as_json)


def daemon(
    out: Out,
    passages: Texts,
    config: Config = None,
    pool: Pool = None,
    count: Count = 128,
    length: Length = 48,
    metric: Annotated[list[str] | None, typer.Option(help="Once for each; absent: diversity and information.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Continuations of a prefix.")] = 8,
    temperature: Temperature = 1.0,
    reads: Reads = "large",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Solve for the coefficients of the aggregator daemon: the model's mean metrics become those of the passages."""
    from decoding.metric_matching import METRICS

    chosen = [each for each in METRICS if each in (metric or ["diversity", "information"])]
    unknown = [each for each in metric or [] if each not in METRICS]
    if unknown:
        raise invalid("metric", f"must be one of {', '.join(METRICS)} (got {unknown[0]!r})")
    if temperature == 0.0:
        raise invalid("temperature", "must be above 0: continuations of a prefix would all be the same")

    def work(models: ModelPool, made: list[Passage], advance: Advance) -> Awaitable[Made]:
        from training.continuations import solve_daemon

        return solve_daemon(models, reads, made, chosen, samples, temperature, seed, advance)

    _run(work, (config, pool), out, (passages, count, length, seed), as_json)


def _run(
    work: Work,
    chosen: tuple[Path | None, str | None],
    out: Path,
    asked: tuple[Path, int, int, int],
    as_json: bool,
) -> None:
    """Do the work, write the artifact and NAME.report.json, and say what was measured."""
    check_artifact(out)
    settings = read_config(chosen[0])
    name = chosen[1] or next(iter(settings.pools))
    if name not in settings.pools:
        raise not_found("pool", name, list(settings.pools))

    async def loaded() -> Made:
        from pool.local_pool import LocalPool
        from training.continuations import cut
        from training.demo_prompts import read_lines

        file, count, length, seed = asked
        pool = LocalPool.load(name, settings)
        try:
            texts = [pool.tokenizer.encode(each.text, parse_special=False) for each in read_lines(file, count)]
            with shown_progress() as advance:
                return await work(pool.model_pool, cut(texts, length, seed), advance)
        finally:
            await pool.close()

    made = asyncio.run(loaded())
    report = keep(made.artifact, made.report, out)
    warn(report)
    if as_json:
        print_json(report)
        return
    typer.echo(f"{out.name}: {out.stat().st_size / 2**10:.0f} KiB; held out: {json.dumps(made.report['heldout'])}")
