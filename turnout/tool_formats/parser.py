"""The parser of answers that may call functions: one for all formats, fed with text as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from turnout.tool_formats.base import CallSyntax, Scanner, ToolFormat


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is no part of a call; `thought`: it is the model's thinking."""

    text: str
    thought: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """The beginning of a call of a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next part of a call's arguments, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a call.

    Attributes:
        broken: its text so far, which is no call, where the arguments are cut or no JSON; "": it is a call.
        rest: of that the end which no `Argued` has given.
    """

    broken: str = ""
    rest: str = ""


AT_A_TIME = 2048  # characters: what a step searches and moves stays small however long an answer is
NO_FUNCTIONS: Mapping[str, Any] = MappingProxyType({})
Event = Said | Called | Argued | Ended


class CallParser:
    """Parser of one answer. What it gives does not depend on how the text is cut into pieces.

    Args:
        form: how calls are written.
        functions: JSON schemas of arguments by function, as far as they are known: what is no JSON is read by them.
    """

    def __init__(self, form: ToolFormat, functions: Mapping[str, Any] = NO_FUNCTIONS) -> None:
        self._form = form
        self._functions = functions
        self._text = ""  # not yet given
        self._begun = False
        self._thinks = False
        self._syntax: CallSyntax | None = None  # of the calls it is among
        self._scanner: Scanner | None = None
        self._closed = False  # the last call is
        self._raw = ""  # text of the call
        self._moved = False  # whether the last step changed anything

    def feed(self, text: str, final: bool = False) -> list[Event]:
        """Take the next text; return what is known by it.

        Args:
            text: may be empty.
            final: whether the answer ends with it.
        """
        starts = range(0, len(text) or 1, AT_A_TIME)
        pieces = ((text[start : start + AT_A_TIME], final and start == starts[-1]) for start in starts)
        return [event for piece in pieces for event in self._fed(*piece)]

    def _fed(self, text: str, final: bool) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while True:
            found = list(self._step(final))
            events += found
            if not found and not self._moved:
                break
        if final and self._scanner is not None:
            taken = self._take(len(self._text))
            events.append(Ended(self._raw + taken, self._scanner.held + taken))
            self._scanner = None
        if final and self._text:
            events.append(self._said(len(self._text)))
        return events

    def _step(self, final: bool) -> Iterator[Event]:
        self._moved = False
        if self._scanner is not None:
            yield from self._arguments(self._scanner)
        elif self._syntax is None:
            yield from self._search(final)
        elif not self._closed:
            self._close(self._syntax, final)
        else:
            yield from self._between(self._syntax, final)

    def _search(self, final: bool) -> Iterator[Event]:
        """Give what is said up to what may be a call or markup."""
        if not self._text:
            return
        found: list[tuple[Any, CallSyntax | None]] = [
            (match, syntax)
            for syntax in self._form.syntaxes
            if (syntax.mark or not self._begun) and (match := syntax.first.search(self._text, partial=not final))
        ]
        if self._form.markup is not None and (match := self._form.markup.search(self._text, partial=not final)):
            found.append((match, None))
        if not found:
            yield self._said(len(self._text))
            return
        match, syntax = min(found, key=lambda each: (each[0].start(), each[0].partial))
        if match.start():
            yield self._said(match.start())
        elif match.partial:
            return
        elif syntax is not None:
            yield self._call(syntax, match)
        else:
            channel = match.groupdict().get("channel")
            self._thinks = self._thinks if channel is None else channel == "analysis"
            self._take(match.end())

    def _arguments(self, scanner: Scanner) -> Iterator[Event]:
        self._raw += self._take(scanner.feed(self._text))
        if scanner.out:
            yield Argued(scanner.out)
        if scanner.done:
            self._scanner, self._closed = None, False
            yield Ended()
        elif scanner.failed:
            self._scanner = self._syntax = None
            yield Ended(self._raw)

    def _close(self, syntax: CallSyntax, final: bool) -> None:
        match = syntax.closing.match(self._text, partial=not final)
        if match is None:
            self._syntax, self._moved = None, True
        elif not match.partial:
            self._take(match.end())
            self._closed = self._moved = True

    def _between(self, syntax: CallSyntax, final: bool) -> Iterator[Event]:
        """Go on after a call: with another one, or after all of them."""
        found = [each.match(self._text, partial=not final) for each in (syntax.following, syntax.ending)]
        following, ending = found
        if following is not None and not following.partial:
            yield self._call(syntax, following)
        elif following is not None and (ending is None or not syntax.end):
            return  # it may become one
        elif ending is None or not ending.partial:
            self._take(ending.end() if ending is not None else 0)
            self._syntax, self._moved = None, True

    def _call(self, syntax: CallSyntax, match: Any) -> Event:
        schema = self._functions.get(match["name"], {})
        self._syntax, self._scanner = syntax, syntax.arguments.scanner(schema)
        self._raw, self._begun = self._take(match.end()), True
        return Called(match["name"])

    def _said(self, length: int) -> Event:
        self._begun = True
        return Said(self._take(length), self._thinks)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._moved = self._moved or length > 0
        return taken
