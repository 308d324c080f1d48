"""`turnout train judge`, `reward_model` and `enough`: what says whether tokens, steps and answers are right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.artifact_output import keep, warn
from cli.ask import read_config
from cli.output import print_json, shown_progress
from cli.train_options import (
    AsJson,
    Config,
    Epochs,
    MaxTokens,
    Out,
    Pool,
    Seed,
    Temperature,
    check_artifact,
)
from turnout.errors import not_found

if TYPE_CHECKING:
    from pool.local_pool import LocalPool
    from training.continuations import Made
    from training.data.problem import Problem
    from training.entropy_gate import Calibrated
    from training.length_data import Source
    from training.length_predictors import Advance, Trained

    Work = Callable[[LocalPool, Source, list[Problem], Advance], Awaitable[Trained | Calibrated | Made]]


Prompts = Annotated[Path | None, typer.Option(help="Text file, a question a line; absent: arithmetic problems.")]
Count = Annotated[int, typer.Option(min=8, help="Questions used; of arithmetic, none is from the held-out split.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("judge")(judge)
    app.command("reward_model")(reward_model)
    app.command("enough")(enough)


def judge(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 512,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    most: Annotated[int, typer.Option(min=1, help="Disagreements looked at in an answer.")] = 16,
    epochs: Epochs = 30,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the head of the verifier judge: draft tokens that leave the final answer as it is are right."""
    from training.judgements import final_answers, mine_judgements
    from training.state_heads import STEADY, HeadRecipe, train_state_head

    schedule = replace(STEADY, seed=seed)
    recipe = HeadRecipe("judge", "large", 0, True, epochs, schedule, (("most", most),))

    def work(loaded: LocalPool, source: Source, problems: list[Problem], advance: Advance) -> Awaitable[Trained]:
        answer_of = final_answers(loaded.tokenizer)

        def mine(index: int) -> Awaitable[Any]:
            return mine_judgements(loaded.model_pool, source, index, answer_of, most)

        return train_state_head(loaded.model_pool, source, recipe, mine, out.with_suffix(".run"), advance)

    train_on_questions(work, (config, pool), out, (prompts, count, temperature, max_tokens, seed), as_json)


def reward_model(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    count: Count = 1024,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    reads: Annotated[Literal["small", "large"], typer.Option(help="Whose hidden states the head reads.")] = "small",
    hidden: Annotated[int, typer.Option(min=0, help="Width of the head's hidden layer; 0: linear.")] = 64,
    epochs: Epochs = 30,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the head of the scorer reward_model on worked arithmetic, whose steps can be checked."""
    from training.state_heads import STEADY, HeadRecipe, train_state_head
    from training.step_rewards import mine_steps

    recipe = HeadRecipe("reward_model", reads, hidden, False, epochs, replace(STEADY, seed=seed))

    def work(loaded: LocalPool, source: Source, problems: list[Problem], advance: Advance) -> Awaitable[Trained]:
        def mine(index: int) -> Awaitable[Any]:
            expected = problems[index].answer.split("\n")
            return mine_steps(loaded.model_pool, loaded.tokenizer, source, index, expected, recipe)

        return train_state_head(loaded.model_pool, source, recipe, mine, out.with_suffix(".run"), advance)

    train_on_questions(work, (config, pool), out, (None, count, temperature, max_tokens, seed), as_json)


def enough(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    count: Count = 256,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top: Annotated[int, typer.Option(min=2, max=20, help="Most probable tokens the entropy is taken over.")] = 20,
    rounds: Annotated[
        int, typer.Option(min=1, max=16, help="Rounds of an answer that savings are counted against.")
    ] = 3,
    keep_harmful: Annotated[
        bool,
        typer.Option(
            "--keep-harmful",
            help="Keep thresholds that make answers worse, marked as such; otherwise they are left out, and where all"
            " do, nothing is written.",
        ),
    ] = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Calibrate the monitor enough on arithmetic: mean entropies up to which the large model's answers stand."""
    from training.data import arithmetic
    from training.entropy_gate import calibrate_enough

    def work(loaded: LocalPool, source: Source, problems: list[Problem], advance: Advance) -> Awaitable[Calibrated]:
        def is_right(index: int, tokens: tuple[int, ...]) -> bool:
            return arithmetic.is_correct(problems[index], loaded.tokenizer.decode(list(tokens)))

        return calibrate_enough(
            loaded.model_pool, source, is_right, top, rounds, keep_harmful=keep_harmful, advance=advance
        )

    train_on_questions(work, (config, pool), out, (None, count, temperature, max_tokens, seed), as_json)


def train_on_questions(
    work: Work,
    chosen: tuple[Path | None, str | None],
    out: Path,
    asked: tuple[Path | None, int, float, int, int],
    as_json: bool,
) -> None:
    """Do the work, write the artifact and NAME.report.json, and say what was measured."""
    check_artifact(out)
    settings = read_config(chosen[0])
    name = chosen[1] or next(iter(settings.pools))
    if name not in settings.pools:
        raise not_found("pool", name, list(settings.pools))

    async def loaded() -> Trained | Calibrated | Made:
        from pool.local_pool import LocalPool

        pool = LocalPool.load(name, settings)
        try:
            source, problems = _source(pool, *asked)
            with shown_progress() as advance:
                return await work(pool, source, problems, advance)
        finally:
            await pool.close()

    made = asyncio.run(loaded())
    report = keep(made.artifact, made.report, out)
    warn(report)
    if as_json:
        print_json(report)
        return
    shown = made.report.get("heldout", made.report)
    typer.echo(f"{out.name}: {out.stat().st_size / 2**10:.0f} KiB; held out: {json.dumps(shown)}")


def _source(
    pool: LocalPool, file: Path | None, count: int, temperature: float, max_tokens: int, seed: int
) -> tuple[Source, list[Problem]]:
    """Prompts as chats, and the problems they are, where they are arithmetic."""
    import random

    from training.data import arithmetic
    from training.demo_prompts import read_lines
    from training.length_data import Source
    from turnout.calls import ChatMessage
    from turnout.types import SamplingParams

    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    ends = frozenset(pool.tokenizer.eos_ids)
    if file is not None:
        return Source([each.encode(pool.tokenizer) for each in read_lines(file, count)], sampling, ends, seed), []
    rng = random.Random(f"judges-{seed}")
    problems = [arithmetic.draw_training(rng, rng.choice(arithmetic.DIFFICULTIES)) for _ in range(count)]
    prompts = [pool.tokenizer.encode_chat([ChatMessage("user", problem.prompt)]) for problem in problems]
    return Source(prompts, sampling, ends, seed), problems
