"""Options that the commands of `turnout train` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import read_config
from cli.output_paths import check_out
from turnout.errors import invalid, not_found

if TYPE_CHECKING:
    from turnout.config import ModelConfig, TurnoutConfig

SUFFIX = ".safetensors"

Out = Annotated[
    Path,
    typer.Option(
        help="File to write, NAME.safetensors, in the pool's folder of artifacts. A run continues from NAME.run/."
    ),
]
Config = Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo models.")]
Pool = Annotated[str | None, typer.Option(help="Which pool of it; absent: the first.")]
ModelName = Annotated[
    str,
    typer.Option(
        help="Which model: small or large of the first pool, a configured name, or a path as in models.NAME.path."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the examples.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Places in the answers that a step learns from.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")]
Seed = Annotated[int, typer.Option(min=0, help="Of answers, splits, weights and order.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_artifact(path: Path) -> None:
    """Refuse a file that is not to be an artifact, or cannot be written.

    Raises:
        TurnoutError: INVALID_ARGUMENT: as `check_out`, or it ends in something else.
    """
    if path.suffix != SUFFIX:
        raise invalid("out", f"must end in {SUFFIX}, got {path.name!r}")
    check_out(path)


def configured_model(model: str, config: Path | None) -> tuple[ModelConfig, TurnoutConfig]:
    """Find the model that `--model` means, with the configuration around it.

    Raises:
        TurnoutError: NOT_FOUND: no role, model or folder of that name; the configuration is refused.
    """
    from turnout.config import ModelConfig
    from turnout.model_location import LocalFiles, parse_location

    settings = read_config(config)
    pool = next(iter(settings.pools.values()))
    name = pool.roles.get(model, model)
    if name in settings.models:
        return settings.models[name], settings
    location = parse_location(model)
    if not isinstance(location, LocalFiles) or location.path.exists():
        return ModelConfig(path=model), settings
    raise not_found("model", model, [*pool.roles, *settings.models, "a path as of models.NAME.path"])
