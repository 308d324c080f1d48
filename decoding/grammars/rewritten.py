"""Keywords of JSON Schema that the library does not follow, in terms of others that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from referencing import Specification
from referencing.jsonschema import DRAFT201909, DRAFT202012

from decoding.grammars.keywords import FOLLOWED, REFERENCES, UNSUPPORTED, Path, allows_everything, placed

DEPENDENT = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})
UNEVALUATED = frozenset({"unevaluatedItems", "unevaluatedProperties"})
SINCE_2019 = (DRAFT201909, DRAFT202012)  # with `minContains` and the unevaluated ones
MOST_DEPENDENCIES = 6  # of one schema: each doubles what the library makes of it
CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies")  # hold for some values alone

Follow = Callable[[str, dict[str, Any], Any], tuple[Any, Any]]


def rewritten(
    key: str,
    value: Any,
    node: dict[str, Any],
    inner: Callable[[Any], Any],
    place: Callable[..., str],
    is_new: bool,
) -> dict[str, Any] | str:
    """Translate a keyword of `UNSUPPORTED`, where others mean the same.

    Args:
        key: which; none of `UNEVALUATED`.
        value: its own.
        node: the schema it stands in.
        inner: translates a schema.
        place: what the keyword, or what is at some steps from it, is called in messages.
        is_new: draft 2019-09 or later.

    Returns:
        Keywords, or why there are none.
    """
    if key in DEPENDENT:
        if len(value) > MOST_DEPENDENCIES:
            return f"is supported for up to {MOST_DEPENDENCIES} names"
        made = dependent(value, inner, place)
        return {"allOf": made} if made else {}
    if key == "propertyNames":
        names = names_only(value, place())
        words = "is supported with enum, const, a pattern, or minLength and maxLength"
        return words if names is None else {"allOf": [names]}
    has_none = node.get("minContains") == 0 and "maxContains" not in node
    return {} if key in ("contains", "minContains") and is_new and has_none else "is not supported"


def dependent(value: dict[str, Any], inner: Callable[[Any], Any], place: Callable[[str], str]) -> list[Any]:
    """Schemas that all together mean `dependentRequired`, `dependentSchemas` or `dependencies`.

    Args:
        value: by name, what is required where there is a property of the name: other names, or a schema.
        inner: translates a schema.
        place: what is said of a name is called in messages.
    """
    made = []
    for name, needed in value.items():
        if isinstance(needed, list):
            others = [each for each in dict.fromkeys(needed) if each != name]
            if others:
                schema = {"anyOf": [{"properties": {name: False}}, {"required": [*others, name]}]}
                made.append(called(place(name), schema))
        elif not allows_everything(needed):
            both = {"allOf": [inner(needed), {"required": [name]}]}
            schema = {"anyOf": [{"properties": {name: False}}, both]}
            made.append(called(place(name), schema, ("anyOf", "1", "allOf", "0")))
    return made


def names_only(value: Any, place: str) -> dict[str, Any] | None:
    """A schema that means `propertyNames`; None where it is not a list of names, one pattern or bounds of the length.

    Args:
        value: the schema of names.
        place: what it is called in messages.
    """
    if not isinstance(value, dict) or value.get("type", "string") != "string":
        return None
    said = value.keys() & (FOLLOWED | REFERENCES | UNSUPPORTED.keys()) - {"type"}
    if said <= {"const", "enum"} and len(said) == 1:
        listed = value["enum"] if "enum" in value else [value["const"]]
        names = {each: True for each in listed if isinstance(each, str)}
        return called(place, {"properties": names, "additionalProperties": False})
    if said == {"pattern"}:
        pattern = value["pattern"]
    elif said and said <= {"maxLength", "minLength"}:
        least, most = int(value.get("minLength", 0)), int(value["maxLength"]) if "maxLength" in value else None
        if most is not None and most < least:
            return called(place, {"additionalProperties": False})
        pattern = f"^[\\s\\S]{{{least},{'' if most is None else most}}}$"
    else:
        return None
    return called(place, {"patternProperties": {pattern: True}, "additionalProperties": False})


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Properties and items that a schema says something of, whatever the value is.

    Attributes:
        names: of properties.
        patterns: of names of properties.
        all_names: whether it is all of them.
        first: that many first items.
        all_items: whether it is all of them.
    """

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all_names: bool = False
    first: int = 0
    all_items: bool = False

    def __bool__(self) -> bool:
        return bool(self.names or self.patterns or self.all_names or self.first or self.all_items)

    def __or__(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_names or other.all_names,
            max(self.first, other.first),
            self.all_items or other.all_items,
        )


class Evaluation:
    """Finds what schemas evaluate, through `allOf` and references.

    Args:
        follow: keyword of a reference, the schema it stands in and that one's resolver -> target, and its resolver.
        specification: the draft.
        has_prefixes: whether `prefixItems` counts, as in 2020-12.
    """

    def __init__(self, follow: Follow, specification: Specification[Any], has_prefixes: bool) -> None:
        self._follow, self._specification, self._has_prefixes = follow, specification, has_prefixes
        self._inside: list[int] = []

    def of(self, node: Any, resolver: Any, without: str = "") -> Evaluated | None:
        """What a schema evaluates; None where that depends on the value.

        Args:
            node: the schema.
            resolver: for what stands directly in it.
            without: a keyword that does not count.
        """
        if not isinstance(node, dict):
            return Evaluated()
        if id(node) in self._inside:
            return None
        self._inside.append(id(node))
        try:
            found = self._own(node, without)
            for is_always, child, inner in self._applied(node, resolver):
                part = self.of(child, inner)
                if part is None or (part and not is_always):
                    return None
                found = found | part
            return None if "contains" in node else found
        finally:
            self._inside.pop()

    def _own(self, node: dict[str, Any], without: str) -> Evaluated:
        said = node.keys() - {without}
        lists = isinstance(node.get("items"), list)
        first = node["items"] if lists else node.get("prefixItems", ()) if self._has_prefixes else ()
        return Evaluated(
            dict.fromkeys(node.get("properties", ())),
            dict.fromkeys(node.get("patternProperties", ())),
            not said.isdisjoint({"additionalProperties", "unevaluatedProperties"}),
            len(first),
            ("items" in said and (not lists or "additionalItems" in said)) or "unevaluatedItems" in said,
        )

    def _applied(self, node: dict[str, Any], resolver: Any) -> Iterator[tuple[bool, Any, Any]]:
        """Schemas that apply to the same value: whether always, the schema, its resolver."""
        for key in sorted(REFERENCES & node.keys()):
            yield (True, *self._follow(key, node, resolver))
        for each in node.get("allOf", ()):
            yield True, each, entered(each, resolver, self._specification)
        for key in CONDITIONAL:
            value = node.get(key, ())
            inner = (
                value.values() if key in DEPENDENT and value else value if isinstance(value, list | tuple) else [value]
            )
            for each in inner:
                yield False, each, entered(each, resolver, self._specification)


def entered(node: Any, resolver: Any, specification: Specification[Any]) -> Any:
    """Return the resolver of what stands in a schema that stands in another one, whose resolver is given."""
    return resolver.in_subresource(specification.create_resource(node)) if isinstance(node, dict) else resolver


def closed(key: str, seen: Evaluated, made: dict[str, Any], rest: Callable[[], Any]) -> dict[str, Any]:
    """Keywords that mean one of `UNEVALUATED` in a schema; empty: nothing is left for it.

    Args:
        key: which.
        seen: what the schema evaluates without it.
        made: its other keywords, translated.
        rest: translates the keyword's own schema.
    """
    if key == "unevaluatedItems":
        if seen.all_items:
            return {}
        first = made.get("prefixItems", [])
        first = [*first, *[True] * (seen.first - len(first))]
        return {"items": rest(), **({"prefixItems": first} if first else {})}
    if seen.all_names:
        return {}
    part = {"additionalProperties": rest()}
    for name, known in (("properties", seen.names), ("patternProperties", seen.patterns)):
        if known:
            part[name] = {**made.get(name, {}), **{each: True for each in known if each not in made.get(name, {})}}
    return part


def called(place: str, schema: dict[str, Any], but_in: Path = ()) -> dict[str, Any]:
    """A schema of our making, all of which has one name in messages.

    Args:
        place: the name.
        schema: without `$comment`.
        but_in: what stands there has names of its own for what is within.
    """
    count = len(but_in)
    paths = (path for path in _paths(schema) if not count or path[:count] != but_in or len(path) == count)
    return placed(schema, [(path, place) for path in paths])


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    steps: Iterable[tuple[Any, Any]] = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for step, each in steps:
        yield from _paths(each, (*path, str(step)))
