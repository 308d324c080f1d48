"""Tool formats: how families of models write calls of functions among their text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import regex

from turnout.structure import JSON_FORM
from turnout.tool_formats.json_scanner import JsonScanner
from turnout.tools import ToolCall

# Stand in a syntax for a function's name, an id or number of the call, and a line break that may be missing.
NAME, ID, BREAK = "\ue000", "\ue001", "\ue002"
NAME_PATTERN = r"(?P<name>[a-zA-Z0-9_.\-]{1,64})"
ID_PATTERN = r"[a-zA-Z0-9]{1,32}"
BLANKS = r"\s{0,16}"
MARKED = ":marked"  # behind a format's name: only calls that begin with a mark
JSON_SIGNS = frozenset("{}[],:")
_PIECES = re.compile(r"\s+|\S")

Literal = Callable[[str], str]  # writes a text, maybe with special tokens in it, as part of a rule


class Scanner(Protocol):
    """Scanner of one call's arguments, fed with pieces of text.

    Attributes:
        done: whether the arguments have ended; what follows them is not taken.
        failed: whether what came next can be no part of them.
        out: what the last text adds to them, as JSON.
        held: what was taken and is in no `out` so far: the beginning of a value that is given whole.
    """

    done: bool
    failed: bool
    out: str
    held: str

    def feed(self, text: str) -> int:
        """Take the next text; return how many of its characters are taken. The rest is given again, with more."""
        ...


class Arguments(Protocol):
    """One way to write the arguments of a call."""

    @property
    def opens(self) -> str:
        """Expression that looks ahead at how they begin."""
        ...

    @property
    def example(self) -> str:
        """What describes them to a model."""
        ...

    @property
    def short(self) -> str:
        """What stands for them where they do not matter."""
        ...

    def written(self, arguments: str) -> str:
        """Write arguments, given as JSON, as a model does."""
        ...

    def scanner(self, schema: Any) -> Scanner:
        """Make a scanner of arguments with a schema; {}: it is not known."""
        ...

    def rules(self, name: str, schema: Any, literal: Literal) -> list[str]:
        """Rules of a grammar, of which the first is called `name`, for arguments that fit a schema."""
        ...


class JsonArguments:
    """Arguments as JSON. Implements `Arguments`."""

    opens = r"(?=\{)"
    example = '{"NAME": VALUE, ...}'
    short = "{...}"

    def written(self, arguments: str) -> str:
        """See `Arguments.written`."""
        return arguments

    def scanner(self, schema: Any) -> Scanner:
        """See `Arguments.scanner`."""
        return JsonScanner()

    def rules(self, name: str, schema: Any, literal: Literal) -> list[str]:
        """See `Arguments.rules`."""
        return [f"{name}: {json_rule(schema)}"]


JSON = JsonArguments()
CALL = ToolCall("", "f", '{"a": "b", "c": 1}')  # has all that calls are written with


@dataclass(frozen=True)
class CallSyntax:
    """One way to write calls: `begin`, then for each call `open`, its arguments and `close`, then `end`.

    Attributes:
        open: text before a call's arguments, with NAME in it, and ID where the call has one.
        close: text after the arguments.
        begin: text before the first call.
        separator: text between two calls.
        end: text after the last call.
        mark: what the first call begins with, after which nothing else can follow; "": calls begin with JSON, and only
            at the beginning of an answer.
        ignored: expression of what may stand between a call's arguments and `close`, and says nothing.
        arguments: how arguments are written.
    """

    open: str
    close: str = ""
    begin: str = ""
    separator: str = ""
    end: str = ""
    mark: str = ""
    ignored: str = ""
    arguments: Arguments = JSON

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as a model does."""
        return self.framed([(call.name, self.arguments.written(call.arguments)) for call in calls])

    def framed(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write calls by name and arguments, which are written already."""
        each = [
            f"{self.open.replace(NAME, name).replace(ID, str(place))}{arguments}{self.close}"
            for place, (name, arguments) in enumerate(calls)
        ]
        return f"{self.begin}{self.separator.join(each)}{self.end}".replace(BREAK, "\n")

    @cached_property
    def first(self) -> Any:
        """Expression of what stands before the first call's arguments; blanks may differ from what is written."""
        start = "" if self.mark else rf"\A{BLANKS}"
        whole = lenient(self.begin + self.open)
        whole = whole if self.mark[:1].isspace() else whole.removeprefix(BLANKS)
        return regex.compile(rf"{start}{whole}{BLANKS}{self.arguments.opens}")

    @cached_property
    def following(self) -> Any:
        """Expression of what stands between two calls."""
        return regex.compile(rf"{lenient(self.separator + self.open)}{BLANKS}{self.arguments.opens}")

    @cached_property
    def closing(self) -> Any:
        """Expression of what ends a call."""
        return regex.compile(self.ignored + lenient(self.close))

    @cached_property
    def ending(self) -> Any:
        """Expression of what ends all calls."""
        return regex.compile(lenient(self.end))


@dataclass(frozen=True)
class ToolFormat:
    """A tool format: how a family of models writes calls.

    Attributes:
        name: as in `pools.*.tool_format`.
        syntaxes: ways that are read; the first one is how calls are described and written.
        signs: texts all of which stand in the chat templates of the family; empty: none shows it.
        tokens: tokens all of which the vocabularies of the family have; empty: none shows it.
        special: special tokens that stand in the text of an answer, besides those that calls are written with.
        short_ids: whether ids of calls are nine letters and digits.
        single: whether an answer has one call at most.
        thinks: whether its grammar has the thinking as well, so that calls may follow that in the model's own way.
        markup: expression of what stands in an answer and is not said; None: nothing. Its group `channel` tells
            whether what follows is thought (`analysis`).
    """

    name: str
    syntaxes: tuple[CallSyntax, ...]
    signs: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    short_ids: bool = False
    single: bool = False
    thinks: bool = False
    markup: Any = None

    @property
    def marked(self) -> ToolFormat:
        """The format where an answer may be JSON of its own: only calls with a mark before them are calls."""
        kept = tuple(each for each in self.syntaxes if each.mark)
        return self if len(kept) == len(self.syntaxes) else replace(self, name=self.name + MARKED, syntaxes=kept)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as a model does."""
        return self.syntaxes[0].written(calls)

    def shows(self, token: str) -> bool:
        """Return whether an answer's text has a special token by its name: calls could not be read without."""
        return token in self.special or token in self._example

    @cached_property
    def _example(self) -> str:
        return "".join(each.written([CALL]) for each in self.syntaxes)

    def text_rules(self, literal: Literal) -> list[str]:
        """Rules for `text`, what is said instead of a call or before it, and TEXT, the same without special tokens."""
        bare = any(not each.mark for each in self.syntaxes)
        return ["text: TEXT", r"TEXT: /([^{](.|\n)*)?/" if bare else r"TEXT: /(.|\n)*/"]

    def answer_rule(self, literal: Literal) -> str:
        """Return the right-hand side of the rule for an answer that is `answer` by itself."""
        return "answer"

    def before_calls(self, literal: Literal) -> str:
        """Return what may stand before calls that must come, as part of a rule."""
        return ""


def json_rule(schema: Any) -> str:
    """Return the right-hand side of a rule for JSON that fits a schema."""
    return f"%json {json.dumps({'x-guidance': JSON_FORM, **schema}, ensure_ascii=False)}"


def pattern_of(text: str) -> str:
    """Return a text as part of a terminal's expression."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def before_token(literal: str) -> tuple[str, str]:
    """Cut a literal before its first special token: return the text before that, if any, and the rule of the rest."""
    before, token, rest = literal.partition("<[")
    return (json.loads(before), token + rest) if token and before else ("", literal)


def ending_in(terminal: str, text: str) -> str:
    """Return the rule for a terminal that is any text and ends in some, behind which a special token stands.

    The text is no literal of its own: a lexer that takes the longest terminal would never get to it.
    """
    return f"{terminal}: /(.|\\n){'*' if text else '+'}{pattern_of(text)}/"


def lenient(text: str) -> str:
    """An expression of a piece of a syntax: with other blanks, and blanks around signs of JSON; none at its end."""
    made: list[str] = []

    def blanks() -> None:
        if not made or made[-1] != BLANKS:
            made.append(BLANKS)

    for piece in _PIECES.findall(text):
        if piece.isspace() or piece == BREAK:
            blanks()
        elif piece in JSON_SIGNS:
            blanks()
            made.append(re.escape(piece))
            blanks()
        else:
            made.append({NAME: NAME_PATTERN, ID: ID_PATTERN}.get(piece) or re.escape(piece))
    return "".join(made[:-1] if made[-1:] == [BLANKS] else made)
