"""`turnout models`: what a request may put in `model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import ApiKeyFile, connect
from cli.output import print_json, print_table
from cli.provenance import quantity
from turnout.errors import invalid

if TYPE_CHECKING:
    from turnout.calls import ModelDescription


SHORT = 12  # characters of a commit

app = typer.Typer(help="List what a request may ask for; fetch models to this machine.", invoke_without_command=True)


@app.callback()
def models(
    context: typer.Context,
    address: Annotated[str, typer.Option(help="gRPC address of a running server.")] = "localhost:9000",
    api_key_file: ApiKeyFile = None,
    config: Annotated[Path | None, typer.Option(help="Read a configuration file instead of asking a server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what a request may ask for.

    A pool's name means that its models answer together, a model's that it answers alone.
    """
    if context.invoked_subcommand is not None:
        return
    if config is not None:
        _show_config(config, as_json)
        return
    with connect(address, api_key_file) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    print_table(
        [
            *("name", ">parameters", "architecture", ">vocabulary", ">max length"),
            *("members", "default method", "ends", "revision"),
        ],
        [
            [
                m.name,
                quantity(m.num_parameters),
                m.architecture,
                f"{m.vocab_size} (its own)" if m.other_vocabulary else m.vocab_size,
                m.max_length,
                ", ".join(f"{role}: {name}" for role, name in m.roles.items()),
                m.default_method,
                _ends(m),
                m.revision[:SHORT],
            ]
            for m in found
        ],
    )


@app.command()
def pull(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH...", help="Of a hub or a store, as in models.NAME.path.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Fetch all models of a configuration file.")] = None,
) -> None:
    """Fetch models to this machine's cache, so that a server starts without a download.

    Prints where the files of each are. A revision is resolved to its commit.
    """
    from turnout.checkpoint_files import check_checkpoint
    from turnout.config import parse_config, read_yaml
    from turnout.gguf_files import described
    from turnout.model_fetching import fetch_model, pin_model

    wanted = dict.fromkeys(paths or (), "path")
    if config is not None:
        settings = parse_config(read_yaml(config))
        wanted |= {model.path: f"models.{name}.path" for name, model in settings.local_models.items()}
    if not wanted:
        raise invalid("path", "name at least one, or a configuration file with --config")
    for path, field in wanted.items():
        place = fetch_model(path, field)
        check_checkpoint(described(place, field), field)
        typer.echo(f"{pin_model(path, field)}: {place}")


def _ends(model: ModelDescription) -> str:
    """The tokens that end an answer, and what names them."""
    listed = ", ".join(f"{end.id} {end.text}" for end in model.ends)
    return f"{listed} ({model.ends_source})" if listed else "none"


def _show_config(path: Path, as_json: bool) -> None:
    from turnout.config import load_config
    from turnout.model_fetching import find_model

    config = load_config(path)
    if as_json:
        print_json(config.model_dump(mode="json", include={"models", "pools"}))
        return
    print_table(
        ["pool", "small", "large", "other roles", "default method", ">replicas"],
        [
            [
                name,
                p.small,
                p.large,
                ", ".join(f"{role}: {model}" for role, model in p.models.items()),
                p.default.name,
                p.replicas,
            ]
            for name, p in config.pools.items()
        ],
    )
    print_table(
        ["model", "path", "on this machine", "dtype", "device"],
        [
            [name, m.path, _here(m.path, find_model(m.path, f"models.{name}.path").path), m.dtype, m.device]
            if m.endpoint is None
            else [name, f"{m.endpoint.url} ({m.endpoint.model})", "endpoint", "", ""]
            for name, m in config.models.items()
        ],
    )


def _here(path: str, found: Path | None) -> str:
    """Say where a model's files are, unless its path does."""
    return "not all of it" if found is None else "yes" if str(found) == path else str(found)
