"""`turnout models`: what a request may put in `model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import ApiKeyFile, connect
from cli.output import print_json, print_table
from cli.provenance import quantity

if TYPE_CHECKING:
    from turnout.calls import ModelDescription


def models(
    address: Annotated[str, typer.Option(help="gRPC address of a running server.")] = "localhost:9000",
    api_key_file: ApiKeyFile = None,
    config: Annotated[Path | None, typer.Option(help="Read a configuration file instead of asking a server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what a request may ask for.

    A pool's name means that its models answer together, a model's that it answers alone.
    """
    if config is not None:
        _show_config(config, as_json)
        return
    with connect(address, api_key_file) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    print_table(
        ["name", ">parameters", "architecture", ">vocabulary", ">max length", "members", "default method", "ends"],
        [
            [
                m.name,
                quantity(m.num_parameters),
                m.architecture,
                m.vocab_size,
                m.max_length,
                ", ".join(f"{role}: {name}" for role, name in m.roles.items()),
                m.default_method,
                _ends(m),
            ]
            for m in found
        ],
    )


def _ends(model: ModelDescription) -> str:
    """The tokens that end an answer, and what names them."""
    listed = ", ".join(f"{end.id} {end.text}" for end in model.ends)
    return f"{listed} ({model.ends_source})" if listed else "none"


def _show_config(path: Path, as_json: bool) -> None:
    from turnout.config import load_config, model_path

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
        ["model", "folder", "dtype", "device"],
        [[name, model_path(m), m.dtype, m.device] for name, m in config.models.items()],
    )
