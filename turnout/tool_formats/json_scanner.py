"""A scanner of JSON that comes in pieces: where one value ends, or where it is no JSON."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_CHARS = frozenset("+-.0123456789eE")
LITERALS = ("true", "false", "null")
BLANKS = frozenset(" \t\n\r")
ESCAPES = frozenset('"\\/bfnrt')
HEX = frozenset("0123456789abcdefABCDEF")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
MAX_DEPTH = 256


class JsonScanner:
    """Scanner of one JSON value, fed with pieces of text.

    Attributes:
        done: whether the value has ended; what follows it is not taken.
        failed: whether what came next can be no part of it.
        out: what was taken of the last text.
        held: empty: all that is taken is given.
    """

    __slots__ = ("_closers", "_hex", "_seen", "_state", "done", "failed", "held", "out")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.out = self.held = ""
        self._closers: list[str] = []  # of objects and lists that are open, the innermost last
        self._state = "value"
        self._seen = ""  # of a number or literal
        self._hex = 0  # digits that an escape still needs

    def feed(self, text: str) -> int:
        """Take the next text; return how many of its characters belong to the value."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._state == "string":
                end = PLAIN.match(text, at)
                assert end is not None
                at = end.end()
                if at == len(text):
                    break
            if self._step(text[at]):
                at += 1
        self.out = text[:at]
        return at

    def _step(self, char: str) -> bool:
        """Take a character; False where it is not taken: it ends what is before it, or fails."""
        match self._state:
            case "string" | "name":
                return self._in_string(char)
            case "escape" | "name escape":
                return self._in_escape(char)
            case "word":
                return self._in_word(char)
        if char in BLANKS:
            return True
        match self._state:
            case "value" | "first value":
                return self._begin(char)
            case "first name" | "next name":
                if char == '"':
                    self._state = "name"
                    return True
                return self._close(char) if self._state == "first name" else self._fail()
            case "colon":
                if char != ":":
                    return self._fail()
                self._state = "value"
                return True
        if char == ",":  # after a value within another one
            self._state = "next name" if self._closers[-1] == "}" else "value"
            return True
        return self._close(char)

    def _begin(self, char: str) -> bool:
        if char in "{[":
            if len(self._closers) == MAX_DEPTH:
                return self._fail()
            self._closers.append("}" if char == "{" else "]")
            self._state = "first name" if char == "{" else "first value"
        elif char == '"':
            self._state = "string"
        elif char in "-0123456789tfn":
            self._seen, self._state = char, "word"
        else:
            return self._close(char) if self._state == "first value" else self._fail()
        return True

    def _in_string(self, char: str) -> bool:
        if char == '"':
            if self._state == "name":
                self._state = "colon"
            else:
                self._end()
        elif char == "\\":
            self._state = "escape" if self._state == "string" else "name escape"
        elif char < " ":
            return self._fail()
        return True

    def _in_escape(self, char: str) -> bool:
        if self._hex:
            if char not in HEX:
                return self._fail()
            self._hex -= 1
        elif char == "u":
            self._hex = 4
        elif char not in ESCAPES:
            return self._fail()
        if not self._hex:
            self._state = "string" if self._state == "escape" else "name"
        return True

    def _in_word(self, char: str) -> bool:
        numeric = self._seen[0] in NUMBER_CHARS
        seen = self._seen + char
        if (numeric and char in NUMBER_CHARS) or (not numeric and any(each.startswith(seen) for each in LITERALS)):
            self._seen = seen
            return True
        if not (NUMBER.fullmatch(self._seen) if numeric else self._seen in LITERALS):
            return self._fail()
        self._end()
        return False

    def _close(self, char: str) -> bool:
        if not self._closers or char != self._closers[-1]:
            return self._fail()
        self._closers.pop()
        self._end()
        return True

    def _end(self) -> None:
        self.done = not self._closers
        self._state = "after"

    def _fail(self) -> bool:
        self.failed = True
        return False
