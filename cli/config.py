"""`turnout config`: check a configuration file, print the schema of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import print_json

if TYPE_CHECKING:
    from turnout.config import TurnoutConfig

app = typer.Typer(help="Check a configuration file or print its schema.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The YAML file to check.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole resolved configuration as JSON.")] = False,
) -> None:
    """Check a configuration file: its fields, the methods' parameters, and the models' checkpoints.

    Exit code 0 when it can be served, 1 when not; the line on standard error then names the field at fault.
    Notes go there, too. Of weight files only the headers are read; where this machine has none, a note says so.
    Nothing is downloaded: of a model of a hub or a URL, what the cache holds is checked.
    With a good file, the memory is shown that each pool takes whose models are all here.
    """
    from engine.checkpoints import read_config
    from engine.costs.limits import count_parameters
    from pool.components import larger_draft, open_parts
    from pool.endpoints.client import check_keys
    from turnout.checkpoint_files import check_present, has_weights
    from turnout.config import load_config, models_here

    config = load_config(file)
    here = models_here(config)
    for name, folder in here.items():
        check_present(folder, f"models.{name}.path")
        read_config(folder, f"models.{name}.path")
    notes = _notes_on_files(config, here)
    local = {
        name: model.model_copy(update={"path": str(here.get(name))}) for name, model in config.local_models.items()
    }
    on_disk = config.model_copy(update={"models": {**config.models, **local}})
    loadable = {name for name, folder in here.items() if has_weights(folder)}
    sizes = {name: count_parameters(here[name], f"models.{name}.path") for name in loadable}
    for name, pool in config.pools.items():
        if config.endpoint_roles(pool):
            check_keys(config, pool)
        elif here.keys() >= set(pool.members):
            found = open_parts(name, on_disk).notes + larger_draft(pool, sizes)
            notes += [f"{name}: {note}" for note in found]
        else:
            notes.append(f"{name}: the vocabularies of its models are compared at the start, when all of them are here")
    memory, scarce = _memory(on_disk, loadable)
    for note in notes + scarce:
        typer.echo(note, err=True)
    if as_json:
        print_json(config.model_dump(mode="json"))
        return
    pools = ", ".join(
        f"{name} ({' + '.join(pool.members)}, {pool.default.name})" for name, pool in config.pools.items()
    )
    typer.echo(f"{file}: ok; {len(config.models)} models; pools: {pools}")
    for line in memory:
        typer.echo(line)


def _memory(config: TurnoutConfig, loadable: Collection[str]) -> tuple[list[str], list[str]]:
    """What each pool takes in each of its processes, and notes where this machine does not have it now.

    Args:
        config: with the models' folders on this machine as their paths.
        loadable: models whose weights are there; others' are not known.
    """
    from engine.costs.limits import described_needs, predict_memory

    lines, notes = [], []
    for name, pool in config.pools.items():
        apart = pool.placement.models == "actors" or bool(config.endpoint_roles(pool))
        for members in [[member] for member in pool.members] if apart else [pool.members]:
            if not all(member in loadable for member in members):
                continue
            models = {member: config.models[member] for member in members}
            ranks = max(model.tensor_parallel for model in models.values())
            for device, needs in predict_memory(models, config.engine, ranks).items():
                line, missing = described_needs(needs, device)
                lines.append(f"{name}: {line}")
                notes += [f"{name}: {missing}"] if missing else []
    return lines, notes


def _notes_on_files(config: TurnoutConfig, here: Mapping[str, Path]) -> list[str]:
    """A note for each model of which this machine does not have all."""
    from turnout.checkpoint_files import has_weights
    from turnout.hub_models import is_offline
    from turnout.model_fetching import find_model
    from turnout.model_files import some
    from turnout.model_location import HubRepository, parse_location

    notes = []
    for name, model in config.local_models.items():
        field = f"models.{name}.path"
        found = find_model(model.path, field)
        if found.path is None:
            lacks = f"lacks {some(found.lacking)}" if found.lacking else "has nothing"
            offline = isinstance(parse_location(model.path), HubRepository) and is_offline()
            then = "and HF_HUB_OFFLINE is set, so that it cannot be" if offline else "which is"
            notes.append(f"{field}: this machine {lacks} of {model.path}, {then} downloaded at the start")
        elif not has_weights(folder := here[name]):
            notes.append(f"{field}: {folder} has no weight files, which each node that loads the model needs")
    return notes


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, for editors and other tools."""
    from turnout.config import TurnoutConfig

    print_json(TurnoutConfig.model_json_schema())
