"""`turnout parts`: what methods can be put together from, and the parameters of each part."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.methods import bounds, type_name
from cli.output import print_json, print_table

if TYPE_CHECKING:
    from decoding.parts import Part


def parts(
    slot: Annotated[str | None, typer.Argument(help="Only parts of this kind: drafters, lengths, ...")] = None,
    name: Annotated[str | None, typer.Argument(help="Show this part's parameters with their bounds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, parameter schemas included.")] = False,
) -> None:
    """List parts: of `speculative` (drafters to selectors), `step_speculation` (scorers), `search`, `monitored`, ..."""
    from turnout.errors import not_found
    from turnout.registry import load, names, slots

    if slot is not None and slot not in slots():
        raise not_found("slot", slot, slots())
    asked = (
        [(slot, name)]
        if slot is not None and name is not None
        else [(each, known) for each in (slots() if slot is None else [slot]) for known in names(f"decoding.{each}")]
    )
    found = {(each, known): load(f"decoding.{each}", known, "part").PART for each, known in asked}
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
    return ", ".join(f"#{number}" for number in part.papers)


def _describe(slot: str, part: type[Part]) -> dict[str, Any]:
    return {
        "slot": slot,
        "name": part.name,
        "summary": summary(part),
        "papers": list(part.papers),
        "fits": fits(part),
        "params_schema": part.Params.model_json_schema(),
    }
