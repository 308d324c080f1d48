"""Write docs/configuration.md from the configuration's own schema; a test refuses a stale file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli.methods import type_name
from scripts.docs_catalogue import allowed, cell
from turnout.config import TurnoutConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

One YAML file describes everything that `turnout serve FILE` runs. Check it with `turnout config check FILE`; a
fault is one line that names the field. `turnout config schema` prints the JSON schema, for editors. Unknown keys,
keys given twice, folders that are not [checkpoints of a kind that runs](own-pair.md#1-what-fits), a pool that names
a model which does not exist, methods and parameters that do not validate, and two endpoints on one port are all
refused before anything starts.

`ops/demo.yaml` is a complete small example, `ops/cluster-serve.yaml` one for a cluster with GPUs. Relative model
paths are relative to the working directory of the server. No setting of ours comes from an environment variable.

This page is generated: `.venv/bin/python -m scripts.write_config_docs`.
"""


def render() -> str:
    """The whole page."""
    schema = TurnoutConfig.model_json_schema()
    return HEAD + "".join(_sections("", schema, schema))


def _sections(path: str, section: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """A section's table, then the sections below it."""
    rows: list[str] = []
    below: list[tuple[str, dict[str, Any]]] = []
    required = section.get("required", [])
    for name, field in section["properties"].items():
        place = f"{path}.{name}" if path else name
        child, child_place = _child(field, schema, place)
        if child is not None:
            below.append((child_place, child))
        default = "required" if name in required else _default(field, child)
        kind = "section" if child is not None else type_name(field, schema)
        cells = (f"`{name}`", cell(kind), allowed(field, schema), cell(default), cell(field.get("description", "")))
        rows.append("| " + " | ".join(cells) + " |\n")
    yield f"\n## {f'`{path}`' if path else 'The file'}\n\n{_sentence(section)}\n\n"
    yield "| field | type | allowed | default | meaning |\n| --- | --- | --- | --- | --- |\n"
    yield from rows
    for place, child in below:
        yield from _sections(place, child, schema)


def _sentence(section: dict[str, Any]) -> str:
    return str(section["description"]).split("\n\n")[0]


def _child(field: dict[str, Any], schema: dict[str, Any], place: str) -> tuple[dict[str, Any] | None, str]:
    """The section a field holds, itself or one per name."""
    if "additionalProperties" in field and isinstance(field["additionalProperties"], dict):
        field, place = field["additionalProperties"], f"{place}.<name>"
    # A section that may be absent is its reference or null.
    reference = next((each["$ref"] for each in (field, *field.get("anyOf", ())) if "$ref" in each), None)
    return (schema["$defs"][reference.removeprefix("#/$defs/")] if reference else None), place


def _default(field: dict[str, Any], child: dict[str, Any] | None) -> str:
    if child is not None and "name" not in child["properties"] and "anyOf" not in field:
        return "each field's own"
    value = field.get("default")
    if isinstance(value, dict) and value:
        value = value["name"]
    return "absent" if value in (None, "") else f"`{value}`"


def main() -> int:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
