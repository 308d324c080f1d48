"""Makes JSON schemas that stand for themselves: references resolved, and only what is followed kept."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from referencing import Registry, Specification
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT3, DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012, lookup_recursive_ref

from decoding.grammars.keywords import (
    ALLOWED,
    FOLLOWED,
    REFERENCES,
    UNSUPPORTED,
    Path,
    has_moves,
    joined,
    place_in,
    placed,
    says_nothing,
    subschemas,
)
from decoding.grammars.rewritten import (
    SINCE_2019,
    UNEVALUATED,
    Evaluation,
    closed,
    entered,
    rewritten,
)
from decoding.grammars.translated import translated
from turnout.errors import TurnoutError, invalid

if TYPE_CHECKING:
    from referencing._core import Resolved, Resolver  # which have no public names

MOST_SHOWN = 80  # characters of a value in a message
MOST_SCHEMAS = 32_768  # with all that references lead to
MOST_UNROLLED = 32  # one in another: each is two levels more for the library, which reads 128
ANCHORS = {"$dynamicAnchor", "$recursiveAnchor"}
REF_ALONE = {DRAFT4, DRAFT6, DRAFT7}  # where what stands next to a `$ref` is ignored


class FlatSchema:
    """A JSON schema of 2020-12 without identifiers, anchors and annotations.

    What references lead to stands in `$defs` under numbers. Comments (`placed`) say where it stood, and what else has
    moved, so that a refusal can name the place in the schema that was given. Keywords of older drafts
    are respelled, and bounds beyond what is followed narrowed.

    Args:
        schema: an object, true or false.
        field: of the caller's where it stands.
        under: where `field` stands in what the schema will become a part of, for `$comment`.
        first: number of its first definition.
        unroll: put what a reference leads to in its place, once, where other keywords stand next to it: the library
            does not follow such references in a circle.

    Attributes:
        root: the schema without its `$defs`.
        definitions: by number.
        has_siblings: whether keywords stand next to references.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming a keyword and its place: its value is not allowed, it is not supported,
            or it refers to nothing in this schema. Nothing is fetched from elsewhere.
    """

    def __init__(self, schema: Any, field: str, under: str = "", first: int = 0, unroll: bool = False) -> None:
        self.definitions: dict[str, Any] = {}
        self._field = field
        self._under = under
        self._schema = schema
        self._first = first
        self._unroll = unroll
        self.has_siblings = False
        self._inside: list[Any] = []  # what is being unrolled
        self._paths: dict[int, Path] = {}
        self._everywhere: dict[int, Path] = {}
        self._is_dynamic = self._is_old = False
        self._specification: Specification[Any] = DRAFT202012
        self._numbers: dict[Any, str] = {}
        self._waiting: deque[tuple[str, Any, Resolver[Any]]] = deque()
        self._count = 0
        self._choose_draft(schema)
        self._check(schema)
        rules = self._specification, not self._is_old
        self._evaluation = Evaluation(self._found, self._key, self._spend, *rules)
        resolver = _resolver(schema, self._specification, field)
        root_key = self._key(schema, resolver)
        self.root = self._flat(schema, resolver)
        if root_key in self._numbers:  # something leads back to it
            self.definitions[self._numbers[root_key]] = self._marked(schema, self.root)
            self.root = placed({"$ref": f"#/$defs/{self._numbers[root_key]}"}, [(("$ref",), self._place(()))])
        while self._waiting:
            number, target, inside = self._waiting.popleft()
            if number not in self.definitions:
                self.definitions[number] = self._marked(target, self._flat(target, inside))

    @property
    def whole(self) -> Any:
        """The schema with its definitions."""
        return {**self.root, "$defs": self.definitions} if self.definitions else self.root

    def _choose_draft(self, schema: Any) -> None:
        if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
            self._specification = DRAFT202012.detect(schema)
            self._is_old = self._specification is not DRAFT202012
            if self._specification is DRAFT3:
                raise self._refusal(("$schema",), "this draft is not supported; draft 4 and later are")

    def _check(self, schema: Any, start: Path = ()) -> None:
        """Look at the value of every keyword, and remember where each schema stands."""
        waiting: list[tuple[Path, Any]] = [(start, schema)]
        drafts, has_lists = list[tuple[Path, Any]](), False
        while waiting:
            path, node = waiting.pop()
            if isinstance(node, bool):
                continue
            if not isinstance(node, dict):
                raise self._refusal(path, f"must be a schema: an object, true or false{_shown(node)}")
            self._paths[id(node)] = path
            node = self._standing(node)
            self._is_dynamic |= not ANCHORS.isdisjoint(node)
            drafts += [((*path, "$schema"), node)] * (bool(path) and "$schema" in node)
            for key, value in node.items():
                allowed = ALLOWED.get(key)
                if allowed is not None and not allowed.hold(value):
                    raise self._refusal((*path, key), f"must be {allowed.words}{_shown(value)}")
                has_lists |= key == "items" and isinstance(value, list)
                waiting += (((*path, key, *rest), each) for rest, each in subschemas(key, value))
        if has_lists and self._specification is DRAFT202012:
            self._specification = DRAFT201909  # the newest in which `items` may be a list
        for path, node in drafts:
            if DRAFT202012.detect(node) is not self._specification:
                raise self._refusal(path, "must be the draft of the whole schema")

    def _flat(self, node: Any, resolver: Resolver[Any]) -> Any:
        """A schema, with `resolver` for what stands directly in it."""
        if isinstance(node, bool):
            return node
        self._spend(1)
        path, made, stood = self._paths[id(node)], dict[str, Any](), dict[Path, str]()
        for key, value in self._standing(node).items():
            if key in REFERENCES:
                part = self._referred(key, node, resolver, "$ref" in made)
            elif key not in UNEVALUATED and _says(key, value, node):
                part = self._keyword(key, value, node, resolver)
            else:
                continue
            if "allOf" in part:
                before = made.get("allOf", [])
                for place in range(len(part["allOf"])):
                    origin = (*path, key, str(place)) if key == "allOf" else (*path, key)
                    stood["allOf", str(len(before) + place)] = self._place(origin)
                part["allOf"] = [*before, *part["allOf"]]
                stood.setdefault(("allOf",), self._place((*path, "allOf" if "allOf" in node else key)))
            elif key in REFERENCES or has_moves(node):
                stood |= {(each,): self._place((*path, key)) for each in part}
            elif key == "items" and isinstance(value, list):
                stood["prefixItems",] = self._place((*path, "items"))
                stood["items",] = self._place((*path, "additionalItems"))
            made |= part
        for key in sorted(UNEVALUATED & self._standing(node).keys()):
            if _says(key, node[key], node):
                self._close(key, node, resolver, made, stood)
        self.has_siblings |= "$ref" in made and self._is_mixed(node)
        own = self._place(path) if stood else ""
        return placed(made, [(steps, place) for steps, place in stood.items() if place != joined(own, *steps)])

    def _referred(self, key: str, node: dict[str, Any], resolver: Resolver[Any], is_second: bool) -> dict[str, Any]:
        """Translate a reference; `is_second`: another one stands in the same schema."""
        path = (*self._paths[id(node)], key)
        found = self._found(key, node, resolver)
        if isinstance(found.contents, bool):
            return {"allOf": [found.contents]}
        if self._unroll and self._is_mixed(node):
            return {"allOf": [self._unrolled(found, path)]}
        part = self._reference(found.contents, found.resolver)
        return {"allOf": [placed(part, [(("$ref",), self._place(path))])]} if is_second else part

    def _standing(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a schema that its draft does not ignore."""
        is_alone = self._specification in REF_ALONE and "$ref" in node
        return {"$ref": node["$ref"]} if is_alone else node

    def _keyword(self, key: str, value: Any, node: dict[str, Any], resolver: Resolver[Any]) -> dict[str, Any]:
        """Translate a keyword that is no reference."""
        path = (*self._paths[id(node)], key)

        def inner(each: Any) -> Any:
            return self._inner(each, resolver)

        if key in FOLLOWED:
            part = translated(key, value, node, inner, self._is_old)
            words = f"{part}{_shown(value)}"
        else:
            is_new = self._specification in SINCE_2019
            part = rewritten(key, value, node, inner, lambda *steps: self._place((*path, *steps)), is_new)
            words = str(part)
        if isinstance(part, str):
            raise self._refusal(path, words)
        return part

    def _close(
        self, key: str, node: dict[str, Any], resolver: Resolver[Any], made: dict[str, Any], stood: dict[Path, str]
    ) -> None:
        """Put `additionalProperties` or `items` in place of a keyword of `UNEVALUATED`."""
        path = (*self._paths[id(node)], key)
        if self._specification not in SINCE_2019:
            raise self._refusal(path, "is not supported before draft 2019-09")
        seen = self._evaluation.of(node, resolver, without=key)
        if seen is None:
            raise self._refusal(path, "is supported where what else is evaluated does not depend on the value")
        part = closed(key, seen, made, lambda: self._inner(node[key], resolver))
        stood |= {(each,): self._place(path) for each in part if each not in made}
        made |= part

    def _spend(self, count: int) -> None:
        """Count schemas, and what is written for keywords of `UNEVALUATED`."""
        self._count += count
        if self._count > MOST_SCHEMAS:
            raise invalid(self._field, f"is too large: more than {MOST_SCHEMAS} schemas, with those referred to")

    def _inner(self, node: Any, resolver: Resolver[Any]) -> Any:
        if not isinstance(node, dict):
            return self._flat(node, resolver)
        resolver = entered(node, resolver, self._specification)
        if self._unroll and self._is_mixed(node):
            place = self._place(self._paths[id(node)])
            return placed(self._reference(node, resolver), [(("$ref",), place)])
        return self._flat(node, resolver)

    def _is_mixed(self, node: dict[str, Any]) -> bool:
        """Return whether a schema has a reference and something next to it."""
        node = self._standing(node)
        references = len(REFERENCES & node.keys())
        return references > 0 and references + sum(_says(key, value, node) for key, value in node.items()) > 1

    def _found(self, key: str, node: dict[str, Any], resolver: Resolver[Any]) -> Resolved[Any]:
        """Return the target of a reference."""
        path, reference = (*self._paths[id(node)], key), node[key]
        if key == "$recursiveRef" and reference != "#":
            raise self._refusal(path, f"must be #{_shown(reference)}")
        try:
            found = lookup_recursive_ref(resolver) if key == "$recursiveRef" else resolver.lookup(reference)
        except (Unresolvable, ValueError, TypeError, AttributeError):
            words = f"{_quoted(reference)} leads to nothing in this schema, and nothing is fetched from elsewhere"
            raise self._refusal(path, words) from None
        if not isinstance(found.contents, dict | bool):
            raise self._refusal(path, f"{_quoted(reference)} does not lead to a schema")
        if id(found.contents) not in self._paths and isinstance(found.contents, dict):
            self._everywhere = self._everywhere or _paths_in(self._schema)
            self._check(found.contents, self._everywhere.get(id(found.contents), path))  # no keyword holds it
        return found

    def _reference(self, target: Any, resolver: Resolver[Any]) -> dict[str, Any]:
        """A reference to the definition that a schema becomes."""
        known = self._key(target, resolver)
        if known not in self._numbers:
            self._numbers[known] = str(self._first + len(self._numbers))
            self._waiting.append((self._numbers[known], target, resolver))
        return {"$ref": f"#/$defs/{self._numbers[known]}"}

    def _unrolled(self, found: Resolved[Any], path: Path) -> Any:
        known = self._key(found.contents, found.resolver)
        if known in self._inside:
            raise self._refusal(path, "leads back to itself")
        if len(self._inside) == MOST_UNROLLED:
            words = f"leads on through more than {MOST_UNROLLED} references with other keywords next to them"
            raise self._refusal(path, f"{words}, in a circle that is not supported")
        self._inside.append(known)
        made = self._flat(found.contents, found.resolver)
        self._inside.pop()
        return self._marked(found.contents, made)

    def _key(self, node: Any, resolver: Resolver[Any]) -> Any:
        """Identify a schema that is referred to; with dynamic anchors, together with the resources that led to it."""
        scope = tuple(dict.fromkeys(uri for uri, _ in resolver.dynamic_scope())) if self._is_dynamic else ()
        return id(node), scope

    def _marked(self, target: Any, made: Any) -> Any:
        """A definition that says where it stood."""
        if isinstance(made, bool):
            return made
        return placed(made, [((), self._place(self._paths[id(target)]))])

    def _place(self, path: Path) -> str:
        """Return the name of a path in comments."""
        return ".".join(filter(None, (self._under, place_in(self._schema, path))))

    def _refusal(self, path: Path, words: str) -> TurnoutError:
        return invalid(".".join(filter(None, (self._field, place_in(self._schema, path)))), words)


def _says(key: str, value: Any, node: dict[str, Any]) -> bool:
    """Return whether a keyword, no reference, restricts the values of a schema."""
    return key in FOLLOWED or (key in UNSUPPORTED and not says_nothing(key, value, node))


def _resolver(schema: Any, specification: Specification[Any], field: str) -> Resolver[Any]:
    """Return the resolver of a whole schema.

    Raises:
        TurnoutError: INVALID_ARGUMENT: an `$id` is no URI.
    """
    if not isinstance(schema, dict):
        return Registry().resolver()
    resource = specification.create_resource(schema)
    try:
        uri = resource.id() or ""
        registry = Registry().with_resources([("", resource), (uri, resource)])
        return registry.crawl().resolver(uri)
    except ValueError as error:
        raise invalid(field, f"an $id in it is no URI: {error}") from None


def _paths_in(schema: Any) -> dict[int, Path]:
    """Where each object stands, in whatever it stands."""
    found = dict[int, Path]()
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, dict):
            found[id(node)] = path
        if isinstance(node, dict | list):
            steps = node.items() if isinstance(node, dict) else enumerate(node)
            waiting += (((*path, str(step)), each) for step, each in steps)
    return found


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def _shown(value: Any) -> str:
    """Return the given value, if it is short."""
    text = json.dumps(value, ensure_ascii=False)
    return f" (got {text})" if len(text) <= MOST_SHOWN else ""
