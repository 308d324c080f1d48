"""`turnout train router` and `turnout train outcomes`: probes that tell which model, or strategy, a prompt needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from cli.artifact_output import check_name, keep, warn
from cli.ask import load_here, read_config
from cli.output import print_json, shown_progress
from cli.output_paths import check_out, writing
from cli.router_report import show
from cli.train_options import (
    SUFFIX,
    AsJson,
    Config,
    MaxTokens,
    Pool,
    Seed,
    Temperature,
)
from turnout.errors import invalid, not_found
from turnout.pool_config import SMALL

if TYPE_CHECKING:
    from pool.endpoints.text_pool import TextPool
    from pool.local_pool import LocalPool
    from pool.text import TextTokenizer
    from router.difficulty.probe import Reads
    from training.router_outcomes import Outcomes
    from training.router_runs import Question
    from training.router_targets import Target
    from training.router_training import Trained
    from turnout.config import TurnoutConfig
    from turnout.types import SamplingParams


# Of options that do nothing where answers are there already, or something else is predicted.
USUAL: dict[str, Any] = {"count": None, "samples": 1, "temperature": 0.0, "max_tokens": 240, "most": 4}
Log = Annotated[
    list[Path] | None,
    typer.Option(help="A route log with texts: what the pool was asked; agreement with the large model is right."),
]
Count = Annotated[
    int | None,
    typer.Option(min=25, help="Questions; absent: the whole file or log, or 1000 of the demo's, of all kinds."),
]
ReadsOption = Annotated[
    Literal["state", "text"] | None,
    typer.Option(
        "--reads",
        help="What the probe reads of a prompt: the small model's hidden state, or its text alone."
        " Absent: text where the small model is an endpoint, else state.",
    ),
]
Calibration = Annotated[Literal["temperature", "isotonic"], typer.Option(help="How predicted chances are made true.")]
Samples = Annotated[int, typer.Option(min=1, max=64, help="Answers of each model to each question.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("router")(router)
    app.command("outcomes")(outcomes)


def router(
    out: Annotated[
        str, typer.Option(help="Name in the pool's folder of artifacts, or a file that ends in .safetensors.")
    ],
    outcomes: Annotated[
        Path | None,
        typer.Option(help="JSON lines: what was asked, and correct_ROLE or samples_ROLE for small and large."),
    ] = None,
    log: Log = None,
    demo: Annotated[bool, typer.Option("--demo", help="Make the outcomes first, with the demo's questions.")] = False,
    pool: Pool = None,
    config: Config = None,
    predict: Annotated[
        Literal["router", "strategy", "marginals"],
        typer.Option(help="Who is right; which strategy fits; or what each further sample adds to the best reward."),
    ] = "router",
    role: Annotated[
        Literal["small", "large"] | None,
        typer.Option(help="Whose answers strategy (absent: small) and marginals (absent: large) are about."),
    ] = None,
    most: Annotated[int, typer.Option(min=1, max=64, help="Samples that marginals are predicted for.")] = USUAL["most"],
    reads: ReadsOption = None,
    calibration: Calibration = "temperature",
    hidden: Annotated[int, typer.Option(min=1, max=4096, help="Width of the probe's hidden layer.")] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training prompts.")] = 100,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 1e-3,
    count: Count = None,
    samples: Samples = USUAL["samples"],
    temperature: Temperature = USUAL["temperature"],
    max_tokens: MaxTokens = USUAL["max_tokens"],
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a probe on the small model's state after the prompt, or on its text, from who answered what rightly."""
    from training.router_outcomes import ROLES, Outcomes
    from training.router_runs import run_outcomes
    from training.router_training import Recipe, train_probe

    _check_one(outcomes=outcomes, log=log, demo=demo)
    _check_unset(outcomes, count=count, samples=samples, temperature=temperature, max_tokens=max_tokens)
    settings, name = _settings(config, pool)
    chosen = _reads(reads, settings, name)
    place = _place(out, settings, name)
    check_out(place)
    rows = Outcomes.read(outcomes) if outcomes is not None else None
    target = _target(predict, role, most)
    if rows is not None:
        _check(target, rows)
    recipe = Recipe(hidden, calibration, epochs, learning_rate=learning_rate, seed=seed)
    sampling = _sampling(temperature, samples, max_tokens)
    asked = [] if rows is not None else _enough(_questions(None, log, name, count, seed))

    async def work(loaded: LocalPool | TextPool, advance: Callable[[str, int, int], None]) -> Trained:
        found = rows or await run_outcomes(loaded, asked, sampling, samples, seed, advance)
        found.check_models({role: loaded.model_pool.digest_of(role) for role in ROLES})
        inputs = await _inputs(chosen, loaded, found, advance)
        return train_probe(loaded.model_pool, found, inputs, target, recipe, advance, chosen)

    _keep(_run(settings, name, work), place, as_json)


def outcomes(
    out: Annotated[Path, typer.Option(help="File to write: JSON lines.")],
    data: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, answer and perhaps match. Absent: the demo's questions."),
    ] = None,
    log: Log = None,
    pool: Pool = None,
    config: Config = None,
    count: Count = None,
    samples: Samples = USUAL["samples"],
    temperature: Temperature = USUAL["temperature"],
    max_tokens: MaxTokens = USUAL["max_tokens"],
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Let both models answer questions, the demo's, your own or those of a log, and write down who was right."""
    from training.router_outcomes import ROLES
    from training.router_runs import run_outcomes

    settings, name = _settings(config, pool)
    check_out(out)
    sampling = _sampling(temperature, samples, max_tokens)
    asked = _questions(data, log, name, count, seed)

    async def work(loaded: LocalPool | TextPool, advance: Callable[[str, int, int], None]) -> Outcomes:
        return await run_outcomes(loaded, asked, sampling, samples, seed, advance)

    found = _run(settings, name, work)
    with writing(out):
        found.write(out)
    shares = {role: sum(row.reward(role) for row in found.rows) / len(found.rows) for role in ROLES}
    if as_json:
        print_json({"prompts": len(found.rows), "data": found.digest, "right": shares})
        return
    right = ", ".join(f"{role} {share:.1%}" for role, share in shares.items())
    typer.echo(f"{out.name}: {len(found.rows)} prompts; right: {right}")


def _check_one(**sources: Any) -> None:
    """Refuse anything but one source of outcomes, by the names of the options."""
    given = [name for name, value in sources.items() if value]
    if not given:
        raise invalid("outcomes", "is missing; give --outcomes, --log or --demo")
    if len(given) > 1:
        raise invalid(given[1], f"excludes --{given[0]}; give one of them")


def _check_unset(outcomes: Path | None, **given: Any) -> None:
    """Refuse options about answers that were given before."""
    for name, value in given.items():
        if outcomes is not None and value != USUAL[name]:
            raise invalid(name.replace("_", "-"), "does nothing here: the answers are in --outcomes; leave it out")


def _enough(asked: list[Question]) -> list[Question]:
    """Refuse too few questions before models answer them."""
    from training.router_training import FEWEST_ROWS

    if len(asked) < FEWEST_ROWS:
        raise invalid("log", f"has {len(asked)} prompts; at least {FEWEST_ROWS} are needed")
    return asked


def _questions(data: Path | None, log: list[Path] | None, pool: str, count: int | None, seed: int) -> list[Question]:
    """What the models are to answer."""
    from training.router_runs import file_questions, logged_questions, questions

    if data is not None and log:
        raise invalid("log", "excludes --data; give one of them")
    if data is not None:
        return file_questions(data, count)
    if not log:
        return questions(count or 1000, seed)
    found = logged_questions(log, pool, count)
    if found.passed_over:
        typer.echo(f"passed over: {found.passed_over} requests with tools, or with token ids for a prompt", err=True)
    return found.questions


def _keep(trained: Trained, place: Path, as_json: bool) -> None:
    """Write the artifact and its report, and show what was measured."""
    report = keep(trained.artifact, trained.report, place)
    warn(report)
    if as_json:
        print_json(report)
    else:
        show(report, place)


def _settings(config: Path | None, pool: str | None) -> tuple[TurnoutConfig, str]:
    """The configuration, and the name of the pool meant."""
    settings = read_config(config)
    name = pool or next(iter(settings.pools))
    if name not in settings.pools:
        raise not_found("pool", name, list(settings.pools))
    return settings, name


def _place(out: str, settings: TurnoutConfig, pool: str) -> Path:
    """Where the artifact goes."""
    from turnout.config import artifacts_path

    if out.endswith(SUFFIX):
        return Path(out)
    folder = artifacts_path(settings.pools[pool])
    if folder is None:
        raise invalid("out", f"pool {pool!r} has no folder of artifacts; give a file that ends in {SUFFIX}")
    check_name(out, f", or a file that ends in {SUFFIX}")
    return folder / f"{out}{SUFFIX}"


def _target(predict: str, role: Any, most: int) -> Target:
    from training.router_targets import WhatSamplesAdd, WhichStrategy, WhoIsRight

    if predict == "marginals":
        return WhatSamplesAdd(most, role or "large")
    if most != USUAL["most"]:
        raise invalid("most", "does nothing here: it is for --predict marginals; leave it out")
    if predict == "strategy":
        return WhichStrategy(role or "small")
    if role is not None:
        raise invalid("role", "is for --predict strategy and marginals; a router is about both models")
    return WhoIsRight()


def _check(target: Target, rows: Outcomes) -> None:
    """Refuse rows before models are loaded for them."""
    from training.router_targets import labels_of
    from training.router_training import split

    split(rows, 0)
    labels_of(target, rows)


def _reads(given: Reads | None, settings: TurnoutConfig, name: str) -> Reads:
    """What the probe reads, where the option says nothing: the text, if there is no state to read."""
    pool = settings.pools[name]
    elsewhere = SMALL in settings.endpoint_roles(pool)
    if given == "state" and elsewhere:
        message = f"state needs a small model that is computed here, and {pool.small!r} is an endpoint; use text"
        raise invalid("reads", message)
    return given or ("text" if elsewhere else "state")


async def _inputs(
    reads: Reads, loaded: LocalPool | TextPool, found: Outcomes, advance: Callable[[str, int, int], None]
) -> Any:
    """What the probe sees of each row."""
    from training.router_training import read_prompts, read_texts

    if reads == "text":
        return read_texts([row.question for row in found.rows])
    models = loaded.model_pool
    prompts = [row.encode(cast("TextTokenizer", models.tokenizer)) for row in found.rows]
    return await read_prompts(models, prompts, advance)


def _sampling(temperature: float, samples: int, max_tokens: int) -> SamplingParams:
    from turnout.types import SamplingParams

    if samples > 1 and temperature == 0.0:
        raise invalid("temperature", f"must be above 0 for {samples} samples: greedy answers are all the same")
    return SamplingParams(temperature=temperature, max_tokens=max_tokens)


def _run(
    settings: TurnoutConfig,
    name: str,
    work: Callable[[Any, Callable[[str, int, int], None]], Coroutine[Any, Any, Any]],
) -> Any:
    """Load a pool, do the work with a progress bar, give back what the pool holds."""
    # Its routing may need what is trained here.
    alone = settings.pools[name].model_copy(update={"routing": None})
    settings = settings.model_copy(update={"pools": {**settings.pools, name: alone}})

    async def go() -> Any:
        loaded = load_here(name, settings)
        try:
            with shown_progress() as advance:
                return await work(loaded, advance)
        finally:
            await loaded.close()

    return asyncio.run(go())
