"""The page of the HTTP side, written from its OpenAPI document when the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deployments.openapi.document import PATH, document
from scripts.docs_catalogue import allowed, cell

PREFIX = "#/components/schemas/"


def pages() -> dict[str, str]:
    """Markdown by page."""
    return {"reference/http.md": "".join(_page(document(batches=True, keys=True)))}


def _page(api: dict[str, Any]) -> Iterator[str]:
    parts = api["components"]
    yield f"# HTTP\n\n{api['info']['description']} A server has this as OpenAPI {api['openapi']} at `{PATH}`. Files "
    yield "and batches are there where the configuration has `batches`; where it has `access`, a key goes into "
    yield "`Authorization: Bearer KEY`. HEAD is answered wherever GET is. Bodies are not compressed: a "
    yield "`Content-Encoding` other than `identity` is refused with 415. The name of a model may contain slashes, "
    yield "plain or as `%2F`. In events, U+0085, U+2028 and U+2029 are escaped: each is one line for every reader."
    yield "\n\n| call | what it does |\n| --- | --- |\n"
    found = [(method, path, each) for path, methods in api["paths"].items() for method, each in methods.items()]
    for method, path, each in found:
        yield f"| [`{method.upper()} {path}`](#{_anchor(method, path)}) | {each['summary']} |\n"
    for method, path, each in found:
        yield f"\n## `{method.upper()} {path}` {{ #{_anchor(method, path)} }}\n\n{each['summary']}\n\n"
        query = {p["name"]: p["schema"] for p in each["parameters"] if p["in"] == "query"}
        yield f"In the query:\n\n{_fields({'properties': query})}\n" if query else ""
        for media, content in each.get("requestBody", {}).get("content", {}).items():
            yield f"It takes `{media}`{_reference(content['schema'])}.\n\n{_fields(content['schema'])}\n"
        for media, content in each["responses"]["200"].get("content", {}).items():
            yield f"It answers `{media}`: {content['schema'].get('description') or _kind(content['schema'])}.\n\n"
        codes = sorted(status for status in each["responses"] if status not in ("200", "default"))
        yield f"Refusals: {', '.join(f'[{status}](#refusals)' for status in codes)}.\n" if codes else ""
    yield "\n## Refusals { #refusals }\n\nEach has the body [`ErrorAnswer`](#erroranswer).\n\n"
    yield "| status | when |\n| --- | --- |\n"
    yield from (f"| {status} | {cell(each['description'])} |\n" for status, each in parts["responses"].items())
    yield "\n## Objects { #objects }\n"
    for name, schema in sorted(parts["schemas"].items()):
        about = " ".join(schema.get("description", "").split("\n\n")[0].split())
        yield f"\n### `{name}` {{ #{name.lower()} }}\n\n{about}\n\n{_fields(schema) or 'One of: ' + _kind(schema)}\n"


def _anchor(method: str, path: str) -> str:
    return method + "".join(character if character.isalnum() else "-" for character in path)


def _reference(schema: dict[str, Any]) -> str:
    return f", {_kind(schema)}" if "$ref" in schema else ""


def _fields(schema: dict[str, Any]) -> str:
    """A table of an object's members; nothing where there are none."""
    if not schema.get("properties"):
        return ""
    rows = ["| member | type | allowed | meaning |\n", "| --- | --- | --- | --- |\n"]
    for name, field in schema["properties"].items():
        limits = "" if "$ref" in str(field) else allowed(field, {})
        meaning = " ".join(str(field.get("description", "")).split())
        needed = ", required" if name in schema.get("required", ()) else ""
        rows.append(f"| `{name}` | {_kind(field)}{needed} | {limits} | {cell(meaning)} |\n")
    return "".join(rows)


def _kind(schema: Any) -> str:
    """A type in a word or two, objects as links to what they hold."""
    if not isinstance(schema, dict):
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(PREFIX)
        return f"[`{name}`](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(part for each in schema[key] for part in _kind(each).split(" or ")))
    if "const" in schema or "enum" in schema:
        return cell(" or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")])))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema.get('items'))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_kind(schema['additionalProperties'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
