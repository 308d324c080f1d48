"""`turnout parts`: what methods can be put together from, and the parameters of each part."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.methods import bounds, type_name
from cli.output import print_json, print_table

if TYPE_CHECKING:
    from decoding.parts import Part


class Slot(StrEnum):
    """Where a part goes."""

    DRAFTERS = "drafters"
    LENGTHS = "lengths"
    VERIFIERS = "verifiers"
    SELECTORS = "selectors"
    SCORERS = "scorers"
    MONITORS = "monitors"


def parts(
    slot: Annotated[Slot | None, typer.Argument(help="Only parts of this kind.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show this part's parameters with their bounds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, parameter schemas included.")] = False,
) -> None:
    """List the parts of `speculative` (drafters to selectors), `step_speculation` (scorers), `monitored` (monitors)."""
    from turnout.registry import load, names

    slots = [slot] if slot is not None else list(Slot)
    if slot is not None and name is not None:
        found = {(slot, name): load(f"decoding.{slot}", name, "part").PART}
    else:
        found = {
            (each, n): load(f"decoding.{each}", n, "part").PART for each in slots for n in names(f"decoding.{each}")
        }
    if as_json:
        print_json([_describe(each, part) for (each, _), part in found.items()])
    elif slot is not None and name is not None:
        _show_one(found[slot, name])
    else:
        print_table(
            ["slot", "part", "papers", "fits", "parameters", "summary"],
            [
                [each, n, _papers(part), fits(part), ", ".join(part.Params.model_fields), summary(part)]
                for (each, n), part in found.items()
            ],
        )


def summary(part: type[Part]) -> str:
    """First line of its module's docstring."""
    return (sys.modules[part.__module__].__doc__ or "").strip().split("\n")[0]


def fits(part: Any) -> str:
    """What a drafter makes and a verifier takes; whether a drafter asks, and a policy looks, at each token."""
    kinds = getattr(part, "kinds", None) or getattr(part, "accepts", ())
    found = [" or ".join(sorted(kinds))] if kinds else []
    if getattr(part, "stepwise", False):
        found.append("token by token")
    if getattr(part, "lossless", True) is False:
        found.append("not lossless")
    return ", ".join(found)


def _show_one(part: type[Part]) -> None:
    typer.echo(f"{part.name}: {summary(part)}")
    typer.echo(f"papers: {_papers(part) or 'none'}; {fits(part)}")
    schema = part.Params.model_json_schema()
    print_table(
        ["parameter", "type", "allowed", "default", "meaning"],
        [
            [name, type_name(field, schema), bounds(field, schema), field.get("default"), field.get("description", "")]
            for name, field in schema.get("properties", {}).items()
        ],
    )


def _papers(part: type[Part]) -> str:
    return ", ".join(f"#{number}" for number in part.seeds)


def _describe(slot: Slot, part: type[Part]) -> dict[str, Any]:
    return {
        "slot": slot,
        "name": part.name,
        "summary": summary(part),
        "papers": list(part.seeds),
        "fits": fits(part),
        "params_schema": part.Params.model_json_schema(),
    }
