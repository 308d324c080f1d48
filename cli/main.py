"""The `turnout` command: gathers the subcommands and turns refusals into one line and an exit code.

Exit codes: 0 done, 1 refused or failed, 2 the command line itself is wrong. Subcommands import what they need
when they run, so that `turnout --help` stays quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli import (
    batch,
    bench,
    cache,
    calibrate,
    config,
    experiment,
    generate,
    methods,
    models,
    parts,
    profile,
    route,
    serve,
    status,
    task,
    tenants,
    train,
)
from cli.output import print_error
from turnout import __version__
from turnout.errors import TurnoutError
from turnout.standard_streams import replace_unencodable

# Packages that only some commands need, by the extra that installs them.
EXTRAS = {
    "batch": frozenset({"httpx", "pandas", "pyarrow"}),
    "experiments": frozenset({"matplotlib", "optuna", "scipy"}),
}

app = typer.Typer(
    name="turnout",
    help="Adaptive decoding over a small and a large language model: serve, generate, inspect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("batch")(batch.batch)
app.command("task")(task.task)
app.command("methods")(methods.methods)
app.command("parts")(parts.parts)
app.command("status")(status.status)
app.command("profile")(profile.profile)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.add_typer(route.app, name="route")
app.add_typer(cache.app, name="cache")
app.add_typer(experiment.app, name="experiment")
app.add_typer(tenants.app, name="tenants")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Adaptive decoding over a small and a large language model: serve, generate, inspect."""


def main() -> None:
    """Run the command line; never shows a traceback for something the user can mend."""
    replace_unencodable()
    try:
        app()
    except TurnoutError as error:
        print_error(error.message)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = next((name for name, modules in EXTRAS.items() if (error.name or "").split(".")[0] in modules), None)
        if extra is None:
            raise
        print_error(f"this command needs {error.name}: pip install 'turnout[{extra}]'")
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        print_error(f"{error.filename}: {error.strerror}")
        sys.exit(1)


if __name__ == "__main__":
    main()
