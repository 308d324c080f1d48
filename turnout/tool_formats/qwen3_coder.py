"""Qwen3-Coder and Qwen3.5: a tag for the function and one for each parameter, whose values are text or JSON."""

from __future__ import annotations

import json
from typing import Any

import regex

from turnout.tool_formats.base import NAME, CallSyntax, Literal, ToolFormat, json_rule
from turnout.tool_formats.schemas import as_json, kinds_of, listed, parameters_of, resolved, unfinished

CLOSE = "\n</parameter>\n"
END = "</function>"
DEFINITIONS = ("$defs", "definitions")  # of a schema
OPENING = regex.compile(r"\s{0,16}<parameter=([^\n]{1,256}?)>\n")
ENDING = regex.compile(rf"\s{{0,16}}{END}")


class TaggedArguments:
    """Arguments in tags. Implements `turnout.tool_formats.base.Arguments`."""

    opens = r"(?=<)"
    example = f"<parameter=NAME>\nVALUE{CLOSE}..."
    short = "...\n"

    def written(self, arguments: str) -> str:
        """See `Arguments.written`."""
        values = json.loads(arguments).items()
        return "".join(f"<parameter={name}>\n{_text(value)}{CLOSE}" for name, value in values)

    def scanner(self, schema: Any) -> TaggedScanner:
        """See `Arguments.scanner`."""
        return TaggedScanner(schema)

    def rules(self, name: str, schema: Any, literal: Literal) -> list[str]:
        """See `Arguments.rules`: parameters come in the order of the schema."""
        given = parameters_of(schema, schema)
        parts, lines = [], []
        for place, (key, value) in enumerate(given.named.items()):
            rule = f"{name}_{place}"
            parts.append(rule if key in given.required else f"{rule}?")
            lines.append(f"{rule}: {literal(f'<parameter={key}>' + chr(10))} {rule}_value")
            lines += _value_rules(f"{rule}_value", value, schema)
        if given.others is not None:
            parts.append(f"{name}_other*")
            lines.append(f'{name}_other: "<parameter=" /[a-zA-Z0-9_.\\-]{{1,64}}/ ">\\n" {name}_other_value')
            lines += _value_rules(f"{name}_other_value", given.others, schema)
        return [f"{name}: {' '.join(parts) or json.dumps('')}", *lines]


def _value_rules(name: str, schema: Any, root: Any) -> list[str]:
    """Rules for a value and what closes it. Of texts the length is held to, and no pattern."""
    given, close = resolved(schema, root), json.dumps(CLOSE)
    if (values := listed(given)) is not None:
        texts = " | ".join(json.dumps(_text(each), ensure_ascii=False) for each in values)
        return [f"{name}: ({texts}) {close}"]
    kinds = kinds_of(given, root)
    if "string" not in kinds:
        own = {key: value for key, value in given.items() if key not in DEFINITIONS}
        if '"$ref"' in json.dumps(own):
            own |= {key: root[key] for key in DEFINITIONS if key in root}
        return [f"{name}: {name}_json {close}", f"{name}_json: {json_rule(own)}"]
    least, most = given.get("minLength", 0), given.get("maxLength")
    if kinds == {"string"} and (least or most is not None):
        length = f"{{{least},{'' if most is None else most}}}"
        closed = r"\n<\/parameter>\n"
        terminal = name.upper()
        return [
            f"{name}[lazy]: {terminal}",
            f"{terminal}: /(.|\\n){length}{closed}/ & ~/(.|\\n)*{closed}(.|\\n)+/",
        ]
    return [f"{name}[lazy]: /(.|\\n)*/ {close}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class TaggedScanner:
    """Scanner of arguments in tags. Implements `turnout.tool_formats.base.Scanner`.

    A value is text where its schema says so, and given as it comes; any other is given when it is whole.

    Args:
        schema: of the arguments.
    """

    __slots__ = ("_given", "_kinds", "_schema", "_sep", "done", "failed", "held", "out")

    def __init__(self, schema: Any) -> None:
        self.done = self.failed = False
        self.out = self.held = ""  # held: of a value that is not text
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
        """Take the tag of a parameter, or blanks before the function's end; return how far that is."""
        opening, ending = (each.match(text, at, partial=True) for each in (OPENING, ENDING))
        if opening is not None and not opening.partial:
            name = opening[1]
            self.out += f"{self._sep}{json.dumps(name, ensure_ascii=False)}: "
            self._sep = ", "
            self._kinds = kinds_of(self._given.named.get(name, self._given.others), self._schema)
            self.out += '"' * (self._kinds == {"string"})
            return int(opening.end())
        if ending is not None and not ending.partial:
            self.out += "{}" if self._sep == "{" else "}"
            self.done = True
            return int(ending.end()) - len(END)
        self.failed = opening is None and ending is None
        return at

    def _value(self, text: str, at: int, kinds: frozenset[str]) -> int:
        """Take of a value what is known to belong to it, and its end."""
        found = text.find(CLOSE, at)
        end = found if found >= 0 else len(text) - unfinished(text[at:], CLOSE)
        if kinds == {"string"}:
            self.out += json.dumps(text[at:end], ensure_ascii=False)[1:-1] + '"' * (found >= 0)
        else:
            self.held += text[at:end]
            self.out += as_json(self.held, kinds) if found >= 0 else ""
        if found < 0:
            return end
        self._kinds, self.held = None, ""
        return end + len(CLOSE)


TAGS = CallSyntax(
    mark="<tool_call>",
    open=f"<tool_call>\n<function={NAME}>\n",
    close=f"{END}\n</tool_call>",
    separator="\n",
    arguments=TaggedArguments(),
)
FORMAT = ToolFormat("qwen3_coder", (TAGS,), signs=("<tool_call>", "<function=", "<parameter="))
