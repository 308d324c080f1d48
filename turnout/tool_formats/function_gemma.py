"""FunctionGemma: `call:NAME{...}` between markers; keys are bare, and texts stand between `<escape>` markers."""

from __future__ import annotations

import json
from typing import Any

import regex

from turnout.tool_formats.base import NAME, CallSyntax, Literal, ToolFormat, json_rule
from turnout.tool_formats.schemas import KINDS, as_json, kinds_of, listed, parameters_of, resolved, unfinished

BEGIN, END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
KEY = regex.compile(r"\s{0,16}([^:,{}\[\]\n]{1,256}?)\s{0,16}:")
BARE = regex.compile(r"([^,\]}\[{<]{1,4096})(?=[,\]}])")
BLANKS = " \t\r\n"
MAX_DEPTH = 256
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class EscapedArguments:
    """Arguments with bare keys. Implements `turnout.tool_formats.base.Arguments`.

    Args:
        escape: what stands before and after a text.
    """

    opens = r"(?=\{)"
    short = "{...}"

    def __init__(self, escape: str) -> None:
        self._escape = escape
        self.example = f"{{NAME:VALUE,NAME:{escape}TEXT{escape}}}"

    def written(self, arguments: str) -> str:
        """See `Arguments.written`."""
        return _written(json.loads(arguments), self._escape)

    def scanner(self, schema: Any) -> EscapedScanner:
        """See `Arguments.scanner`."""
        return EscapedScanner(self._escape)

    def rules(self, name: str, schema: Any, literal: Literal) -> list[str]:
        """See `Arguments.rules`."""
        return _Rules(name, schema, literal, self._escape).lines


def _written(value: Any, escape: str) -> str:
    match value:
        case str():
            return f"{escape}{value}{escape}"
        case dict():
            # In the order of the template, which sorts them.
            members = sorted(value.items(), key=lambda each: each[0].lower())
            return f"{{{','.join(f'{key}:{_written(each, escape)}' for key, each in members)}}}"
        case list():
            return f"[{','.join(_written(each, escape) for each in value)}]"
        case _:
            return json.dumps(value)


class _Rules:
    """Rules for arguments. Of texts no length or pattern is held to, and of lists no length.

    Args:
        name: of the first rule.
        root: schema of the arguments.
        literal: writes a text as part of a rule.
        mark: what stands before and after a text.

    Attributes:
        lines: the rules.
    """

    def __init__(self, name: str, root: Any, literal: Literal, mark: str) -> None:
        self._name, self._root, self._literal, self._mark = name, root, literal, mark
        self._known: dict[str, str] = {}  # rules by schema, which may refer to itself
        escape = literal(mark)
        text = f"{name}_text"
        if escape.startswith("<["):  # a token, which no text has
            own = [f"{text}: {escape} {text.upper()}? {escape}", rf"{text.upper()}: /(.|\n)+/"]
        else:
            own = [f"{text}: {escape} {text}_rest", rf"{text}_rest[lazy]: /(.|\n)*/ {escape}"]
        self.lines: list[str] = []
        first = self._object(root)
        self.lines = [f"{name}: {first}", *own, *self.lines]

    def _new(self) -> str:
        return f"{self._name}_v{len(self._known)}"

    def _value(self, schema: Any) -> str:
        """Return the name of the rule for a value."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            self._known[key] = self._new()
            self.lines.append(f"{self._known[key]}: {' | '.join(self._ways(schema))}")
        return self._known[key]

    def _ways(self, schema: Any) -> list[str]:
        given = resolved(schema, self._root)
        if (values := listed(given)) is not None:
            return [self._literal(_written(each, self._mark)) for each in values]
        for keyword in ("anyOf", "oneOf"):
            if keyword in given:
                return [self._value(each) for each in given[keyword]]
        ways = []
        kinds = kinds_of(given, self._root)
        for kind in sorted(kinds - {"integer"} if "number" in kinds else kinds):
            match kind:
                case "string":
                    ways.append(f"{self._name}_text")
                case "array":
                    item = self._value(given.get("items", True))
                    ways.append(f'"[" ({item} ("," {item})*)? "]"')
                case "object":
                    ways.append(self._object(given))
                case _:
                    bounds = {key: given[key] for key in BOUNDS if key in given}
                    rule = self._leaf({"type": kind, **bounds})
                    ways.append(rule)
        return ways

    def _leaf(self, schema: dict[str, Any]) -> str:
        key = f"leaf {json.dumps(schema)}"
        if key not in self._known:
            self._known[key] = self._new()
            self.lines.append(f"{self._known[key]}: {json_rule(schema)}")
        return self._known[key]

    def _object(self, schema: Any) -> str:
        """Return the name of the rule for an object, whose members come sorted."""
        key = f"object {json.dumps(schema, sort_keys=True)}"
        if key in self._known:
            return self._known[key]
        name = self._known[key] = self._new()
        given = parameters_of(schema, self._root)
        members = sorted(given.named, key=str.lower)
        self.lines.append(f'{name}: "{{" {name}_first0 "}}"')
        for place, member in enumerate(members):
            one = f"{self._literal(member + ':')} {self._value(given.named[member])}"
            after, more = f"{name}_more{place + 1}", f'"," {one}'
            optional = member not in given.required
            self.lines.append(f"{name}_first{place}: {one} {after}" + f" | {name}_first{place + 1}" * optional)
            if place:
                self.lines.append(f"{name}_more{place}: {f'({more})?' if optional else more} {after}")
        last = len(members)
        if given.others is not None:
            other = f'/[a-zA-Z0-9_.\\-]{{1,64}}/ ":" {self._value(given.others)}'
            self.lines.append(f'{name}_first{last}: ({other} ("," {other})*)?')
            self.lines += [f'{name}_more{last}: ("," {other})*'] if last else []
        else:
            self.lines.append(f'{name}_first{last}: ""')
            self.lines += [f'{name}_more{last}: ""'] if last else []
        return name


class EscapedScanner:
    """Scanner of arguments with bare keys. Implements `turnout.tool_formats.base.Scanner`.

    Args:
        escape: what stands before and after a text.
    """

    __slots__ = ("_closers", "_escape", "_state", "done", "failed", "held", "out")

    def __init__(self, escape: str) -> None:
        self._escape = escape
        self.done = self.failed = False
        self.out = self.held = ""
        self._closers: list[str] = []  # of objects and lists that are open, the innermost last
        self._state = "value"

    def feed(self, text: str) -> int:
        """See `Scanner.feed`."""
        self.out, at, before = "", 0, ("", -1)
        while (self._state, at) != before and not (self.done or self.failed):
            before = (self._state, at)
            if self._state == "text":
                at = self._text(text, at)
                continue
            while at < len(text) and text[at] in BLANKS:
                at += 1
            if at < len(text):
                at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        char, state = text[at], self._state
        if state in ("first", "after") and char == self._closers[-1]:
            self._closers.pop()
            self.out += char
            self._state, self.done = "after", not self._closers
            return at + 1
        if state == "after":
            if char != ",":
                return self._fail(at)
            self.out += ", "
            self._state = "key" if self._closers[-1] == "}" else "value"
            return at + 1
        if state == "key" or (state == "first" and self._closers[-1] == "}"):
            return self._key(text, at)
        return self._value(text, at)

    def _key(self, text: str, at: int) -> int:
        match = KEY.match(text, at, partial=True)
        if match is None:
            return self._fail(at)
        if match.partial:
            return at
        name = match[1].removeprefix(self._escape).removesuffix(self._escape)
        self.out += f"{json.dumps(name, ensure_ascii=False)}: "
        self._state = "value"
        return int(match.end())

    def _value(self, text: str, at: int) -> int:
        char, rest = text[at], text[at : at + len(self._escape)]
        if char in "{[":
            if len(self._closers) == MAX_DEPTH:
                return self._fail(at)
            self._closers.append("}" if char == "{" else "]")
            self.out += char
            self._state = "first"
            return at + 1
        if not self._closers:
            return self._fail(at)
        if rest == self._escape:
            self.out += '"'
            self._state = "text"
            return at + len(self._escape)
        if self._escape.startswith(rest):
            return at
        match = BARE.match(text, at, partial=True)
        if match is None:
            return self._fail(at)
        if match.partial:
            return at
        self.out += as_json(match[1].strip(), KINDS)
        self._state = "after"
        return int(match.end())

    def _text(self, text: str, at: int) -> int:
        found = text.find(self._escape, at)
        end = found if found >= 0 else len(text) - unfinished(text[at:], self._escape)
        self.out += json.dumps(text[at:end], ensure_ascii=False)[1:-1]
        if found < 0:
            return end
        self.out += '"'
        self._state = "after"
        return end + len(self._escape)

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


CALL = CallSyntax(mark=BEGIN, open=f"{BEGIN}call:{NAME}", close=END, arguments=EscapedArguments(ESCAPE))
FORMAT = ToolFormat("function_gemma", (CALL,), signs=(BEGIN, ESCAPE), tokens=(BEGIN, ESCAPE))
