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
    """Check a configuration file: its fields, the models' folders and the methods' parameters.

    Exit code 0 when it can be served, 1 when not; the one line on standard error names the field at fault.
    """
    from turnout.config import load_config

    config = load_config(file)
    if as_json:
        print_json(config.model_dump(mode="json"))
        return
    pools = ", ".join(
        f"{name} ({pool.small} + {pool.large}, {pool.default.name})" for name, pool in config.pools.items()
    )
    typer.echo(f"{file}: ok; {len(config.models)} models; pools: {pools}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, for editors and other tools."""
    from turnout.config import TurnoutConfig

    print_json(TurnoutConfig.model_json_schema())
