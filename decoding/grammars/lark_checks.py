"""Finds grammars in Lark's notation whose `start` no text ever completes: rules that lead back to rules alone."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

START = "start"
MOST_NESTED = 64
DIRECTIVES = ("%import", "%ignore", "%declare")
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|\#[^\n]*)|(?P<end>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?![*+?/])(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>)
    |(?P<arrow>->[ \t]*\w+)|(?P<range>\.\.)|(?P<number>-?\d+)
    |(?P<embedded>%(?:json|regex)\b)|(?P<directive>%\w+)|(?P<name>[?!]?[A-Za-z_]\w*)|(?P<sign>[:|()\[\]{}*+?~,.@=])""",
    re.VERBOSE,
)


class _UnknownError(Exception):
    """Notation that is not understood here; the library says whether it is any."""


@dataclass(slots=True)
class _Node:
    """Can be completed once any, or all, of its parts can; `above` are those it is a part of."""

    waits_for: int
    above: list[_Node] = field(default_factory=list)


def barren(grammar: str) -> str | None:
    """Why no text ever completes a grammar; None where one does, or may.

    Linear in its length. Rules that stand elsewhere, and notation that is not understood here, count as completed.
    """
    try:
        rules = _Reader(_tokens(grammar)).rules()
    except _UnknownError:
        return None
    work = deque(node for node in rules.nodes if node.waits_for <= 0)
    done = set(map(id, work))
    while work:
        for above in work.popleft().above:
            above.waits_for -= 1
            if above.waits_for <= 0 and id(above) not in done:
                done.add(id(above))
                work.append(above)
    start = rules.named.get(START)
    if start is None or id(start) in done:
        return None
    return "its rules lead back to themselves, so that every text would be infinite"


def with_schemas(grammar: str, made: Callable[[Any], Any]) -> str:
    """A grammar with each JSON schema in it replaced; as it was where its notation is not understood.

    Args:
        grammar: in Lark's notation.
        made: gives the schema that stands for another one.
    """
    places: list[tuple[int, int]] = []
    try:
        _tokens(grammar, places)
    except _UnknownError:
        return grammar
    for start, end in reversed(places):
        schema = json.dumps(made(json.loads(grammar[start:end])), ensure_ascii=False)
        grammar = f"{grammar[:start]}{schema}{grammar[end:]}"
    return grammar


def _tokens(grammar: str, places: list[tuple[int, int]] | None = None) -> list[tuple[str, str]]:
    """Kind and text of each; JSON and regular expressions that are put into a grammar count as texts.

    Args:
        grammar: in Lark's notation.
        places: gets where each JSON schema begins and ends.
    """
    found: list[tuple[str, str]] = []
    at, decoder = 0, json.JSONDecoder()
    while at < len(grammar):
        token = _TOKEN.match(grammar, at)
        if token is None or token.lastgroup is None:
            raise _UnknownError
        at = token.end()
        if token.lastgroup == "embedded":
            at += len(grammar[at:]) - len(grammar[at:].lstrip())
            start = at
            try:
                _, at = decoder.raw_decode(grammar, at)
            except (ValueError, RecursionError):
                raise _UnknownError from None
            if places is not None and token[0] == "%json":
                places.append((start, at))
            found.append(("text", ""))
        elif token.lastgroup == "directive":
            if token[0] not in DIRECTIVES:
                raise _UnknownError
            end = grammar.find("\n", at)
            at = end if end >= 0 else len(grammar)
        elif token.lastgroup != "skip":
            found.append((token.lastgroup, token[0]))
    return found


class _Reader:
    """Makes nodes of tokens.

    Args:
        tokens: of a grammar.

    Attributes:
        nodes: all of them.
        named: those that stand for a rule or terminal.
    """

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.nodes: list[_Node] = []
        self.named: dict[str, _Node] = {}
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def rules(self) -> _Reader:
        """Read everything."""
        defined: set[str] = set()
        while self._at < len(self._tokens):
            if self._kind() == "end":
                self._at += 1
                continue
            name = self._take("name").lstrip("?!")
            while (self._kind(), self._text()) != ("sign", ":"):  # attributes and priorities
                if self._kind() in ("end", ""):
                    raise _UnknownError
                self._at += 1
            self._at += 1
            if name in defined:
                raise _UnknownError
            defined.add(name)
            self._made(any_of=[self._choice(nested=False)], node=self._of(name))
        for name, node in self.named.items():
            if name not in defined:
                node.waits_for = 0
        return self

    def _choice(self, nested: bool) -> _Node:
        ways = [self._row(nested)]
        while True:
            place = self._at
            while self._kind() == "end":
                self._at += 1
            if self._text() != "|" or self._kind() != "sign":
                self._at = self._at if nested else place
                return self._made(any_of=ways)
            self._at += 1
            ways.append(self._row(nested))

    def _row(self, nested: bool) -> _Node:
        parts: list[_Node] = []
        while True:
            kind, text = self._kind(), self._text()
            if kind == "end" and nested:
                self._at += 1
            elif kind in ("end", "") or (kind == "sign" and text in "|)]"):
                return self._made(all_of=parts)
            elif kind == "arrow":
                self._at += 1
            else:
                parts.append(self._repeated())

    def _repeated(self) -> _Node:
        part = self._part()
        while self._kind() == "sign" and self._text() in "*?+~{":
            sign = self._text()
            self._at += 1
            least = {"*": 0, "?": 0, "+": 1}.get(sign)
            if least is None:
                least = self._least(sign)
            part = part if least else self._made(all_of=[])
        return part

    def _least(self, sign: str) -> int:
        """Of `~n`, `~n..m`, `{n}`, `{n,}`, `{,m}` and `{n,m}`."""
        least = int(self._take("number")) if self._kind() == "number" else 0
        while self._kind() in ("range", "number") or (sign == "{" and self._text() == ","):
            self._at += 1
        if sign == "{" and self._take("sign") != "}":
            raise _UnknownError
        return least

    def _part(self) -> _Node:
        kind, text = self._kind(), self._text()
        self._at += 1
        if kind == "text":
            if self._kind() == "range":
                self._at += 1
                self._take("text")
            return self._made(all_of=[])
        if kind == "name":
            return self._of(text)
        if kind == "sign" and text in "([":
            self._depth += 1
            if self._depth > MOST_NESTED:
                raise _UnknownError
            inner = self._choice(nested=True)
            self._depth -= 1
            if self._take("sign") != {"(": ")", "[": "]"}[text]:
                raise _UnknownError
            return inner if text == "(" else self._made(all_of=[])
        raise _UnknownError

    def _made(
        self, any_of: list[_Node] | None = None, all_of: list[_Node] | None = None, node: _Node | None = None
    ) -> _Node:
        parts = (any_of or []) + (all_of or [])
        made = node or _Node(0)
        made.waits_for = 1 if any_of is not None else len(parts)
        for part in parts:
            part.above.append(made)
        if node is None:
            self.nodes.append(made)
        return made

    def _of(self, name: str) -> _Node:
        if name not in self.named:
            self.named[name] = _Node(1)
            self.nodes.append(self.named[name])
        return self.named[name]

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _text(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            raise _UnknownError
        self._at += 1
        return self._tokens[self._at - 1][1]
