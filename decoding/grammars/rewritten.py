"""Keywords of JSON Schema that the library does not follow, in terms of others that it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from referencing import Specification
from referencing.jsonschema import DRAFT201909, DRAFT202012

from decoding.grammars.keywords import (
    ALLOWED,
    FOLLOWED,
    LARGEST_COUNT,
    REFERENCES,
    UNSUPPORTED,
    Path,
    allows_everything,
    placed,
    says_nothing,
    subschemas,
)

DEPENDENT = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})
UNEVALUATED = frozenset({"unevaluatedItems", "unevaluatedProperties"})
SINCE_2019 = (DRAFT201909, DRAFT202012)  # with `minContains` and the unevaluated ones
MOST_DEPENDENCIES = 6  # of one schema: each doubles what the library makes of it
CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies")  # hold for some values alone

Follow = Callable[[str, dict[str, Any], Any], Any]  # returns `Resolved` of the library referencing


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
        return words if names is None else {"allOf": [names]} if names else {}
    has_none = node.get("minContains") == 0 and "maxContains" not in node
    return {} if key in ("contains", "minContains") and is_new and has_none else "is not supported"


def is_followed(key: str, value: Any, node: dict[str, Any], is_new: bool) -> bool:
    """Return whether a keyword of `UNSUPPORTED` is followed, as far as what stands next to it says so.

    Args:
        key: which.
        value: anything.
        node: the schema it stands in, of which nothing is known.
        is_new: draft 2019-09 or later.
    """
    values = [(key, value), *(value.items() if key == "propertyNames" and isinstance(value, dict) else ())]
    if not all(ALLOWED[each].hold(given) for each, given in values if each in ALLOWED):
        return False
    if says_nothing(key, value, node):
        return True
    if key in UNEVALUATED:
        return is_new and node.keys().isdisjoint({"allOf", "contains", *CONDITIONAL, *REFERENCES})
    if key == "propertyNames" and node.get("patternProperties"):
        return False  # two patterns may fit one name
    return not isinstance(rewritten(key, value, node, lambda _: True, lambda *_: "", is_new), str)


def is_since_2019(schema: Any) -> bool:
    """Return whether a whole schema is of draft 2019-09 or later."""
    says = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
    return not says or DRAFT202012.detect(schema) in SINCE_2019


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

    It is empty where any name fits.

    Args:
        value: the schema of names.
        place: what it is called in messages.
    """
    if not isinstance(value, dict) or value.get("type", "string") != "string":
        return None
    said = value.keys() & (FOLLOWED | REFERENCES | UNSUPPORTED.keys()) - {"type"}
    if not said:
        return {}
    if said <= {"const", "enum"} and len(said) == 1:
        listed = value["enum"] if "enum" in value else [value["const"]]
        names = {each: True for each in listed if isinstance(each, str)}
        return called(place, {"properties": names, "additionalProperties": False})
    if said == {"pattern"}:
        pattern = value["pattern"]
    elif said <= {"maxLength", "minLength"}:
        least = int(value.get("minLength", 0))
        most = min(int(value["maxLength"]), LARGEST_COUNT) if "maxLength" in value else None
        if most is not None and most < least:
            return called(place, {"additionalProperties": False})
        pattern = f"^[\\s\\S]{{{least},{'' if most is None else most}}}$"
    else:
        return None
    return called(place, {"patternProperties": {pattern: True}, "additionalProperties": False})


@dataclass(slots=True)
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
        return bool(self.size or self.all_names or self.all_items)

    @property
    def size(self) -> int:
        """How many names, patterns and first items there are."""
        return len(self.names) + len(self.patterns) + self.first

    def add(self, other: Evaluated) -> None:
        """Join another one to this one."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.all_names |= other.all_names
        self.first = max(self.first, other.first)
        self.all_items |= other.all_items


class Evaluation:
    """Finds what schemas evaluate, through `allOf` and references.

    Args:
        follow: keyword of a reference, the schema it stands in and that one's resolver -> its target.
        identify: schema and resolver -> what tells them from others.
        spend: counts work, in schemas and names; raises where there is too much.
        specification: the draft.
        has_prefixes: whether `prefixItems` counts, as in 2020-12.
    """

    def __init__(
        self,
        follow: Follow,
        identify: Callable[[Any, Any], Any],
        spend: Callable[[int], None],
        specification: Specification[Any],
        has_prefixes: bool,
    ) -> None:
        self._follow, self._identify, self._spend = follow, identify, spend
        self._specification, self._has_prefixes = specification, has_prefixes
        self._known: dict[Any, list[tuple[bool, Any, Any]]] = {}  # looking up is slow

    def of(self, node: dict[str, Any], resolver: Any, without: str) -> Evaluated | None:
        """What a schema evaluates; None where that depends on the value.

        Args:
            node: the schema.
            resolver: for what stands directly in it.
            without: a keyword that does not count.
        """
        found, seen = Evaluated(), set[Any]()
        always, sometimes = list[tuple[Any, Any]]([(node, resolver)]), list[tuple[Any, Any]]()
        while always or sometimes:
            is_always = bool(always)
            part, inside = (always or sometimes).pop()
            if not isinstance(part, dict) or (known := self._identify(part, inside)) in seen:
                continue
            own = self._own(part, "" if seen else without)
            self._spend(1 + own.size)
            if "contains" in part or (own and not is_always):
                return None
            seen.add(known)
            found.add(own)
            if known not in self._known:
                self._known[known] = list(self._applied(part, inside))
            for holds, child, inner in self._known[known]:
                (always if is_always and holds else sometimes).append((child, inner))
        self._spend(found.size)
        return found

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
            target = self._follow(key, node, resolver)
            yield True, target.contents, target.resolver
        for each in node.get("allOf", ()):
            yield True, each, entered(each, resolver, self._specification)
        for key in CONDITIONAL:
            for _, each in subschemas(key, node[key]) if key in node else ():
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
