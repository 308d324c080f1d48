"""Options that the commands of `turnout train` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SUFFIX = ".safetensors"

Out = Annotated[
    Path,
    typer.Option(
        help="File to write, NAME.safetensors, in the pool's folder of artifacts. A run goes on from NAME.run/."
    ),
]
Config = Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo models.")]
Pool = Annotated[str | None, typer.Option(help="Which pool of it; absent: the first.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the examples.")]
Seed = Annotated[int, typer.Option(min=0, help="Of answers, splits, weights and order.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
