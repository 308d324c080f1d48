"""`turnout train em_ft` and `em_rl`: a copy of a model, tuned on its own answers until it is surer of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import print_json, shown_progress
from cli.output_paths import check_folder, writing
from cli.train_options import AsJson, Config, LearningRate, MaxTokens, ModelName, Seed, Steps, configured_model

if TYPE_CHECKING:
    from training.entropy_minimisation import Form
    from turnout.config import ModelConfig

OutFolder = Annotated[
    Path, typer.Option(help="Folder to write; there must be none. A run continues from FOLDER.run/, left in place.")
]
Prompts = Annotated[
    Path | None, typer.Option(help="Text file, a question a line, every eighth held out; absent: the demo's problems.")
]
Count = Annotated[int, typer.Option(min=8, help="Questions used.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers that it learns from.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("em_ft")(em_ft)
    app.command("em_rl")(em_rl)


def em_ft(
    out: OutFolder,
    model: ModelName = "large",
    config: Config = None,
    prompts: Prompts = None,
    count: Count = 512,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    steps: Steps = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers that a step learns from.")] = 8,
    learning_rate: LearningRate = 1e-5,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Tune a copy of a model to less entropy at the tokens of its own answers, without labels (EM-FT)."""
    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    values = {"max_tokens": max_tokens, "temperature": temperature}
    _tune("ft", configured_model(model, config)[0], out, (prompts, count), schedule, values, as_json)


def em_rl(
    out: OutFolder,
    model: ModelName = "large",
    config: Config = None,
    prompts: Prompts = None,
    count: Count = 512,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    samples: Annotated[int, typer.Option(min=2, max=64, help="Answers of a prompt, the baseline of each other.")] = 4,
    reward: Annotated[
        str, typer.Option(help="token: less entropy at an answer's tokens; trajectory: its log-probability.")
    ] = "token",
    kl: Annotated[float, typer.Option(min=0.0, help="Weight of the divergence from the model as it was.")] = 0.001,
    steps: Steps = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that a step learns from.")] = 4,
    learning_rate: LearningRate = 1e-5,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Tune a copy of a model by a policy gradient whose only reward is how sure it is of its answers (EM-RL)."""
    from typing import get_args

    from training.entropy_minimisation import Reward
    from turnout.errors import invalid

    if reward not in get_args(Reward):
        raise invalid("reward", f"must be {' or '.join(get_args(Reward))}, got {reward!r}")
    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    values = {"max_tokens": max_tokens, "temperature": temperature, "samples": samples, "reward": reward, "kl": kl}
    _tune("rl", configured_model(model, config)[0], out, (prompts, count), schedule, values, as_json)


def _tune(
    form: Form,
    settings: ModelConfig,
    out: Path,
    asked: tuple[Path | None, int],
    schedule: dict[str, Any],
    values: dict[str, Any],
    as_json: bool,
) -> None:
    from pool.local_pool import DTYPES
    from training.entropy_minimisation import SCHEDULES, EntropyPlan, EntropyRun
    from training.head_runs import Questions
    from training.tuned_models import check_new, export_tuned
    from turnout.config import model_path

    prompts, count = asked
    check_new(out)
    check_folder(out)
    questions = Questions.of_demo(count) if prompts is None else Questions.of_file(prompts, count)
    plan = EntropyPlan(form, questions, replace(SCHEDULES[form], **schedule), **values)
    folder = model_path(settings)
    with shown_progress() as advance:
        tuned = EntropyRun(folder, plan, out.with_name(f"{out.name}.run"), advance).tune()
    with writing(out):
        report = export_tuned(
            tuned.model, tuned.report, "training.entropy_minimisation", folder, DTYPES[settings.dtype], out
        )
    if as_json:
        print_json(report)
        return
    before, after = (report["heldout"][when] for when in ("before", "after"))
    typer.echo(
        f"{out}: held-out answers {before['entropy_nats']:.3f} nats of entropy a token before,"
        f" {after['entropy_nats']:.3f} after; {after['kl_from_start_nats']:.3f} nats from the start"
    )
