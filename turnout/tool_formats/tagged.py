"""Arguments in tags: one for each parameter, whose values are text or JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from turnout.tool_formats.base import BLANKS, BREAK, Literal, before_token, ending_in, json_rule, pattern_of
from turnout.tool_formats.schemas import as_json, kinds_of, listed, parameters_of, resolved, unfinished

# Stand in a tag for a parameter's name, and for whether its value is text (`true`) or JSON (`false`).
KEY, IS_TEXT = "\ue003", "\ue004"
DEFINITIONS = ("$defs", "definitions")  # of a schema
STRING = frozenset({"string"})
_HELD = {KEY: r"(?P<key>[^\n]{1,256}?)", IS_TEXT: "(?P<text>true|false)", BREAK: BLANKS}


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments in tags. Implements `turnout.tool_formats.base.Arguments`.

    Attributes:
        open: tag before a value, with KEY in it.
        close: tag after a value.
        end: what stands behind the last one: how the `close` of the call begins.
        after: what stands behind each `close`.
    """

    open: str
    close: str
    end: str
    after: str = ""

    opens = r"(?=<)"

    @property
    def example(self) -> str:
        """See `Arguments.example`."""
        return self._one("NAME", "VALUE") + "..."

    @property
    def short(self) -> str:
        """See `Arguments.short`."""
        return "...\n"

    @cached_property
    def opening(self) -> Any:
        """Expression of what stands before a value; blanks before it may differ."""
        parts = re.split(f"([{''.join(_HELD)}])", self.open)
        return regex.compile(BLANKS + "".join(_HELD.get(each) or re.escape(each) for each in parts))

    @cached_property
    def ending(self) -> Any:
        """Expression of what stands behind the last value."""
        return regex.compile(BLANKS + re.escape(self.end))

    def written(self, arguments: str) -> str:
        """See `Arguments.written`."""
        return "".join(self._one(name, value) for name, value in json.loads(arguments).items())

    def _one(self, name: str, value: Any) -> str:
        return f"{self._tag(name, isinstance(value, str))}{_text(value)}{self.close}{self.after}".replace(BREAK, "\n")

    def _tag(self, name: str, is_text: bool) -> str:
        return self.open.replace(KEY, name).replace(IS_TEXT, json.dumps(is_text))

    def scanner(self, schema: Any) -> TaggedScanner:
        """See `Arguments.scanner`."""
        return TaggedScanner(self, schema)

    def rules(self, name: str, schema: Any, literal: Literal) -> list[str]:
        """See `Arguments.rules`: parameters come in the order of the schema."""
        given = parameters_of(schema, schema)
        parts, lines = [], []
        for place, (key, value) in enumerate(given.named.items()):
            rule = f"{name}_{place}"
            parts.append(rule if key in given.required else f"{rule}?")
            lines += self._parameter_rules(rule, key, value, schema, literal)
        if given.others is not None:
            parts.append(f"{name}_other*")
            lines += self._parameter_rules(f"{name}_other", KEY, given.others, schema, literal)
        return [f"{name}: {' '.join(parts) or json.dumps('')}", *lines]

    def _parameter_rules(self, name: str, key: str, schema: Any, root: Any, literal: Literal) -> list[str]:
        """Rules for a parameter; of any name where `key` is KEY."""
        kinds = kinds_of(schema, root)
        if IS_TEXT not in self.open or kinds == STRING or "string" not in kinds:
            tag = _tag_rule(self._tag(key, kinds == STRING), literal)
            return [f"{name}: {tag} {name}_value", *self._value_rules(f"{name}_value", schema, root, literal)]
        lines = [f"{name}: {name}_text | {name}_json"]
        for kind, wanted in (("text", STRING), ("json", kinds - STRING)):
            if wanted:
                one = {"allOf": [schema, {"type": sorted(wanted)}]}
                lines.append(f"{name}_{kind}: {_tag_rule(self._tag(key, kind == 'text'), literal)} {name}_{kind}_value")
                lines += self._value_rules(f"{name}_{kind}_value", one, root, literal)
        return lines

    def _value_rules(self, name: str, schema: Any, root: Any, literal: Literal) -> list[str]:
        """Rules for a value and what closes it. Of texts the length is held to, and no pattern."""
        given, close, after = resolved(schema, root), literal(self.close), literal(self.after)
        kinds = kinds_of(given, root)
        if (values := listed(given)) is not None:
            texts = " | ".join(json.dumps(_text(each), ensure_ascii=False) for each in values)
            return [f"{name}: ({texts}) {close} {after}"]
        if "string" not in kinds:
            own = {key: value for key, value in given.items() if key not in DEFINITIONS}
            if '"$ref"' in json.dumps(own):
                own |= {key: root[key] for key in DEFINITIONS if key in root}
            return [f"{name}: {name}_json {close} {after}", f"{name}_json: {json_rule(own)}"]
        terminal = name.upper()
        if "<[" in close:  # a token, which no text has
            lead, rest = before_token(close)
            return [f"{name}: {terminal}{'' if lead else '?'} {rest} {after}", ending_in(terminal, lead)]
        least, most = given.get("minLength", 0), given.get("maxLength")
        if kinds == STRING and (least or most is not None):
            length = f"{{{least},{'' if most is None else most}}}"
            closed = pattern_of(self.close)
            return [
                f"{name}: {name}_text {after}",
                f"{name}_text[lazy]: {terminal}",
                f"{terminal}: /(.|\\n){length}{closed}/ & ~/(.|\\n)*{closed}(.|\\n)+/",
            ]
        return [f"{name}: {name}_text {after}", f"{name}_text[lazy]: /(.|\\n)*/ {close}"]


def _tag_rule(tag: str, literal: Literal) -> str:
    """Return a tag as part of a rule; it has any name where KEY stands in it."""
    before, key, after = tag.partition(KEY)
    return f"{literal(before)} /[a-zA-Z0-9_.\\-]{{1,64}}/ {literal(after)}" if key else literal(tag)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class TaggedScanner:
    """Scanner of arguments in tags. Implements `turnout.tool_formats.base.Scanner`.

    A value is text where its tag or its schema says so, and given as it comes; any other is given when it is whole.

    Args:
        tags: how they are written.
        schema: of the arguments.
    """

    __slots__ = ("_given", "_kinds", "_schema", "_sep", "_tags", "done", "failed", "held", "out")

    def __init__(self, tags: TaggedArguments, schema: Any) -> None:
        self.done = self.failed = False
        self.out = self.held = ""  # held: of a value that is not text
        self._tags = tags
        self._schema = schema
        self._given = parameters_of(schema, schema)
        self._kinds: frozenset[str] | None = None  # of the value that is open
        self._sep = "{"

    def feed(self, text: str) -> int:
        """See `Scanner.feed`."""
        self.out, at, before = "", 0, -1
        while at != before and not (self.done or self.failed):
            before = at
            at = self._between(text, at) if self._kinds is None else self._value(text, at, self._kinds)
        return at

    def _between(self, text: str, at: int) -> int:
        """Take the tag of a parameter, or blanks before the call's end; return how far that is."""
        tags = self._tags
        opening, ending = (each.match(text, at, partial=True) for each in (tags.opening, tags.ending))
        if opening is not None and not opening.partial:
            name, found = opening["key"], opening.groupdict()
            self.out += f"{self._sep}{json.dumps(name, ensure_ascii=False)}: "
            self._sep = ", "
            self._kinds = kinds_of(self._given.named.get(name, self._given.others), self._schema)
            if "text" in found:
                self._kinds = STRING if found["text"] == "true" else (self._kinds - STRING)
            self.out += '"' * (self._kinds == STRING)
            return int(opening.end())
        if ending is not None and not ending.partial:
            self.out += "{}" if self._sep == "{" else "}"
            self.done = True
            return int(ending.end()) - len(tags.end)
        self.failed = opening is None and ending is None
        return at

    def _value(self, text: str, at: int, kinds: frozenset[str]) -> int:
        """Take of a value what is known to belong to it, and its end."""
        close = self._tags.close
        found = text.find(close, at)
        end = found if found >= 0 else len(text) - unfinished(text[at:], close)
        if kinds == STRING:
            self.out += json.dumps(text[at:end], ensure_ascii=False)[1:-1] + '"' * (found >= 0)
        else:
            self.held += text[at:end]
            self.out += as_json(self.held, kinds) if found >= 0 else ""
        if found < 0:
            return end
        self._kinds, self.held = None, ""
        return end + len(close)
