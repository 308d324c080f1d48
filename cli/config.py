"""`turnout config`: check a configuration file, print the schema of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.output import print_json

app = typer.Typer(help="Check a configuration file or print its schema.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The YAML file to check.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole resolved configuration as JSON.")] = False,
) -> None:
    """Check a configuration file: its fields, the methods' parameters, and the models' checkpoints.

    Exit code 0 when it can be served, 1 when not; the line on standard error then names the field at fault.
    Notes go there, too. Of weight files only the headers are read; where this machine has none, a note says so.
    """
    from engine.checkpoints import read_config
    from pool.components import open_parts
    from turnout.checkpoint_files import has_weights
    from turnout.config import load_config, model_path

    config = load_config(file)
    for name, model in config.models.items():
        read_config(model_path(model), f"models.{name}.path")
    notes = [
        f"models.{name}.path: {folder} has no weight files, which each node that loads the model needs"
        for name, model in config.models.items()
        if not has_weights(folder := model_path(model))
    ]
    notes += [f"{name}: {note}" for name in config.pools for note in open_parts(name, config).notes]
    for note in notes:
        typer.echo(note, err=True)
    if as_json:
        print_json(config.model_dump(mode="json"))
        return
    pools = ", ".join(
        f"{name} ({' + '.join(pool.members)}, {pool.default.name})" for name, pool in config.pools.items()
    )
    typer.echo(f"{file}: ok; {len(config.models)} models; pools: {pools}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, for editors and other tools."""
    from turnout.config import TurnoutConfig

    print_json(TurnoutConfig.model_json_schema())
