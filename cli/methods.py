"""`turnout methods`: the decoding methods of this installation and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import print_json, print_table

if TYPE_CHECKING:
    from turnout.registry import MethodInfo

BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
    "const": "only {}",
}


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method's parameters with their bounds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, parameter schemas included.")] = False,
) -> None:
    """List the decoding methods and their parameters.

    Lossless means that the output follows exactly the large model's own distribution.
    """
    from turnout.registry import all_methods, get_method

    if name is not None:
        _show_one(get_method(name), as_json)
    elif as_json:
        print_json([_describe(info) for info in all_methods()])
    else:
        print_table(
            ["method", "papers", "lossless", "parameters", "summary"],
            [
                [i.name, _papers(i), _yes(i.lossless), ", ".join(i.params.model_fields), i.summary]
                for i in all_methods()
            ],
        )


def _show_one(info: MethodInfo, as_json: bool) -> None:
    if as_json:
        print_json(_describe(info))
        return
    typer.echo(f"{info.name}: {info.summary}")
    typer.echo(f"lossless: {_yes(info.lossless)}; papers: {_papers(info) or 'none'}")
    schema = info.params.model_json_schema()
    required = schema.get("required", [])
    print_table(
        ["parameter", "type", "allowed", "default", "meaning"],
        [
            [
                name,
                type_name(field, schema),
                bounds(field, schema),
                "(required)" if name in required else field.get("default"),
                field.get("description", ""),
            ]
            for name, field in schema.get("properties", {}).items()
        ],
    )


def _describe(info: MethodInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "summary": info.summary,
        "papers": list(info.papers),
        "lossless": info.lossless,
        "needs": sorted(info.needs),
        "params_schema": info.params.model_json_schema(),
    }


def _papers(info: MethodInfo) -> str:
    return ", ".join(f"#{number}" for number in info.papers)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def type_name(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """A JSON-schema type in a word or two."""
    field = _resolved(field, schema)
    if "anyOf" in field:
        return " or ".join(type_name(choice, schema) for choice in field["anyOf"])
    if "enum" in field:
        return "choice"
    if field.get("type") == "array" and "items" in field:
        return f"list of {type_name(field['items'], schema)}"
    return str(field.get("type", "any"))


def bounds(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a JSON-schema field allows beyond its type."""
    field = _resolved(field, schema)
    found = [text.format(field[key]) for key, text in BOUNDS.items() if key in field]
    if "enum" in field:
        found.append(", ".join(map(str, field["enum"])))
    if "examples" in field:
        found.append("such as " + ", ".join(map(str, field["examples"])))
    found += filter(None, (bounds(choice, schema) for choice in field.get("anyOf", ())))
    return ", ".join(found)


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = field.get("$ref")
    if reference is None:
        return field
    target: dict[str, Any] = schema["$defs"][reference.removeprefix("#/$defs/")]
    return target
