"""Regular expressions in linear time: a text cannot make a rule slow, whatever the pattern.

Python's matcher tries one way after another, and some patterns have exponentially many: a caller who knows a rule could
stop the server with one prompt. RE2 follows all ways at once. Its classes and boundaries know ASCII only, though, and
patterns are to mean what they mean in Python's `re`, in every language. So each character is searched for with its kind
on both sides: `é1 ` is read as `wéw010   `, where `w` is a letter, `0` a digit and a blank white space. Then `\\w` is
three characters the first of which is `w` or `0`, and RE2's own `\\b` between two of these is Python's.

What differs from `re`: where case is ignored, `re` takes `i`, `I`, and the Turkish dotless i (U+0131) and dotted I
(U+0130) for one letter. Here these two match themselves only, as in RE2.
"""

from __future__ import annotations

import re
import warnings
from functools import cached_property

import numpy as np
import numpy.typing as npt
import re2

LONGEST_PATTERN = 500
LONGEST_TEXT = 10_000  # characters looked at
MOST_BYTES = 8 << 20  # of one compiled pattern and what RE2 remembers while it searches
# Kinds. A newline at the very end of a text is a kind of its own: Python's `$` stands before it, too.
LETTER, DIGIT, SPACE, OTHER, LAST_NEWLINE = "w", "0", " ", "-", "\n"
KINDS = frozenset({LETTER, DIGIT, SPACE, OTHER, LAST_NEWLINE})
CATEGORIES = {"w": frozenset({LETTER, DIGIT}), "d": frozenset({DIGIT}), "s": frozenset({SPACE, LAST_NEWLINE})}
CATEGORIES |= {name.upper(): KINDS - kinds for name, kinds in CATEGORIES.items()}
PLACES = {"^": r"(?:\A)", "$": "(?m:$)", r"\A": r"(?:\A)", r"\Z": r"(?:\z)", r"\b": r"(?:\b)", r"\B": r"(?:\B)"}
REFUSED = {
    "(?=": "looks ahead",
    "(?!": "looks ahead",
    "(?<=": "looks back",
    "(?<!": "looks back",
    "(?P=": "refers to a group",
    "(?(": "depends on a group",
    "(?>": "has an atomic group",
}
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|[1-3][0-7]{2}|[1-9][0-9]?|.)"
# Between brackets a digit never refers to a group: `[\1]` is the character 1.
_MEMBER_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|[0-7]{1,3}|.)"
_MEMBER = re.compile(rf"(?P<first>{_MEMBER_ESCAPE}|.)(?:-(?P<last>{_MEMBER_ESCAPE}|[^\]]))?", re.DOTALL)
_TOKEN = re.compile(
    rf"""(?P<escape>{_ESCAPE})
    |\[(?P<negated>\^?)(?P<members>(?:{_MEMBER_ESCAPE}|[^\\])(?:{_MEMBER_ESCAPE}|[^\\\]])*)\]
    |(?P<comment>\(\?\#[^)]*\)) | (?P<flags>\(\?[a-zA-Z-]+[:)]) | (?P<name>\(\?P<[^>]*>)
    |(?P<refused>\(\?(?:P=|<=|<!|[=!(>])) | (?P<group>\(\?:|[()|])
    |(?P<repeat>[*+?]|\{{(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\}})(?P<greed>[?+]?)
    |(?P<place>[\^$]) | (?P<any>\.) | (?P<literal>.)""",
    re.VERBOSE | re.DOTALL,
)


class SearchedText:
    """A text that patterns are searched for in, prepared once for all of them.

    Args:
        text: the first `LONGEST_TEXT` characters are looked at.
    """

    def __init__(self, text: str) -> None:
        self._text = text[:LONGEST_TEXT]

    @cached_property
    def marked(self) -> bytes:
        """Each character between its kind and its kind, in UTF-8."""
        codes = np.frombuffer(self._text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        found = np.empty((len(codes), 3), dtype=np.uint32)
        distinct, places = np.unique(codes, return_inverse=True)
        found[:, 0] = found[:, 2] = _kinds(distinct)[places]
        found[:, 1] = codes
        if self._text.endswith("\n"):
            found[-1, 0] = ord(LAST_NEWLINE)
        return found.tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "replace")


class Pattern:
    """A regular expression, searched for anywhere in a text.

    Args:
        text: as for `re.search`.
        ignore_case: whether capitals and small letters are the same.

    Raises:
        ValueError: no regular expression, one that cannot be searched for in linear time, or too large a one.
    """

    def __init__(self, text: str, ignore_case: bool = False) -> None:
        try:
            with warnings.catch_warnings(action="ignore"):  # of what a later Python may read differently
                flags = re.compile(text, re.IGNORECASE if ignore_case else 0).flags
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression: {error}") from None
        if flags & ~(re.IGNORECASE | re.UNICODE):
            raise ValueError("may set no flag but i")
        options = re2.Options()
        options.case_sensitive = not flags & re.IGNORECASE
        options.dot_nl, options.never_capture, options.log_errors = True, True, False
        options.max_mem = MOST_BYTES
        try:
            self._compiled = re2.compile(rf"\A(?:...)*?(?:{_marked(text)})", options)
        except re2.error as error:
            said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(_reason(said)) from None

    def found_in(self, text: SearchedText) -> bool:
        """Whether it matches anywhere in the text."""
        return self._compiled.search(text.marked) is not None


def _reason(said: str) -> str:
    """Say why RE2 does not take a pattern, by its message."""
    if "repetition size" in said or "too large" in said:
        return "is too large: at most 1000 repetitions, and few of what is large itself"
    return "is not supported by RE2, which searches for it in linear time"


def _kinds(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """List the kinds of some characters, by their numbers."""
    found = np.full(len(codes), ord(OTHER), dtype=np.uint8)
    characters = codes.tobytes().decode("utf-32-le", "surrogatepass")
    for category, kind in ((r"\w", LETTER), (r"\d", DIGIT), (r"\s", SPACE)):
        for run in re.finditer(f"{category}+", characters):
            found[run.start() : run.end()] = ord(kind)
    return found


def _marked(pattern: str) -> str:
    """A pattern that Python accepts, for RE2 and texts with the kinds of their characters."""
    return "".join(map(_token, _TOKEN.finditer(pattern)))


def _token(token: re.Match[str]) -> str:
    text, kind = token[0], token.lastgroup
    if token["members"] is not None:
        return _class(token["members"], bool(token["negated"]))
    match kind:
        case "escape" if text[1] in "123456789" and len(text) < 4:
            raise ValueError("refers to a group, which cannot be searched for in linear time")
        case "escape" | "place":
            return PLACES.get(text) or _class(text, negated=False)
        case "any":
            return r"(?:.[^\n].)"
        case "literal":
            return _class(f"\\{text}" if text in "[]\\^-" else text, negated=False)
        case "group":
            return "(?:" if text == "(" else text
        case "name":
            return "(?:"
        case "flags" if text.endswith(":"):
            raise ValueError("may set flags for the whole only")
        case "refused":
            raise ValueError(f"{REFUSED[text]}, which cannot be searched for in linear time")
        case "greed":
            if token["greed"] == "+":
                raise ValueError("has a possessive repetition, which cannot be searched for in linear time")
            return text.replace("{,", "{0,")
    return ""


def _class(members: str, negated: bool) -> str:
    """One character that is among some, or is not; as what stands between brackets."""
    kinds, characters = frozenset[str](), ""
    for member in _MEMBER.finditer(members):
        first, last = member["first"], member["last"]
        if first[0] == "\\" and first[1:] in CATEGORIES:
            kinds |= CATEGORIES[first[1:]]
        else:
            characters += _character(first) + (f"-{_character(last)}" if last else "")
    if negated:
        return f"(?:{_one_of(KINDS - kinds)}{f'[^{characters}]' if characters else '.'}.)"
    ways = [f"{_one_of(kinds)}.."] * bool(kinds) + [f".[{characters}]."] * bool(characters)
    return f"(?:{'|'.join(ways)})"


def _one_of(kinds: frozenset[str]) -> str:
    """A class of kinds, which ignoring capitals does not widen: no kind is a capital."""
    return f"[{''.join(map(_hex, sorted(kinds)))}]" if kinds else r"[^\x00-\x{10FFFF}]"


def _character(text: str) -> str:
    """One character of a class, escaped or not, for RE2."""
    if text[0] != "\\" or len(text) == 1:
        return _hex(text)
    if text == r"\b":
        return _hex("\b")
    if text[1] in "abfnrtvxuUN01234567":
        return _hex(text.encode().decode("unicode_escape"))
    return _hex(text[1:])


def _hex(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
