"""Regular expressions in linear time: a text cannot make a rule slow, whatever the pattern.

Python's matcher tries one way after another, and some patterns have exponentially many: a caller who knows a rule could
stop the server with one prompt. Here all ways are followed at once (Thompson's construction), and what was found out
is kept as an automaton that is built while it runs. Patterns mean what they mean in Python's `re`; references to
groups, looking around and possessive repetition are refused, because no such automaton can express them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONGEST_PATTERN = 500
LONGEST_TEXT = 10_000  # characters looked at
MOST_STATES = 250
MOST_KEPT = 4_000  # steps of the automaton remembered
MOST_CHARACTERS = 50_000  # characters whose class is remembered

Test = Callable[[str], bool]
_CATEGORIES: dict[Any, Test] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
}
_NEGATED = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}
_PLACES = {ops.AT_BEGINNING, ops.AT_BEGINNING_STRING, ops.AT_END, ops.AT_END_STRING}
_PLACES |= {ops.AT_BOUNDARY, ops.AT_NON_BOUNDARY}


@dataclass(slots=True)
class _State:
    """Where a match can stand: what it waits for, and where it goes on."""

    test: int | None = None  # number of a test that the next character must pass
    place: Any = None  # a place in the text, such as its end
    then: list[int] = field(default_factory=list)


# Characters that pass the same tests are one to the automaton: bit n of a class is set where test n is passed.
Class = int
END: Class = -1
WORD: Class = 1  # bit of the first test of every pattern
Surroundings = tuple[
    Class, Class, bool
]  # of the characters before and after (END at an end); whether only "\n" follows
Step = tuple[frozenset[int], Class]  # states, and the character before


class Pattern:
    """A regular expression, searched for anywhere in the first `LONGEST_TEXT` characters of a text.

    Args:
        text: as for `re.search`.
        ignore_case: whether capitals and small letters are the same.

    Raises:
        ValueError: no regular expression, one that cannot be searched for in linear time, or too large a one.
    """

    def __init__(self, text: str, ignore_case: bool = False) -> None:
        try:
            parsed = parser.parse(text, re.IGNORECASE if ignore_case else 0)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression: {error}") from None
        flags = parsed.state.flags
        self._ignore_case = bool(flags & re.IGNORECASE)
        if flags & ~(re.IGNORECASE | re.UNICODE):
            raise ValueError("may set no flag but i")
        self._states = [_State()]  # the first is where a match ends
        self._tests: dict[str, Test] = {"": _CATEGORIES[ops.CATEGORY_WORD]}
        self._first = self._sequence(parsed, 0)
        self._classes: dict[str, Class] = {}
        self._kept: dict[tuple[Step, Surroundings], Step | None] = {}

    def found_in(self, text: str) -> bool:
        """Whether it matches anywhere in the text."""
        text = text[:LONGEST_TEXT]
        step: Step | None = (frozenset((self._first,)), END)
        for place in range(len(text) + 1):
            after = self._class_of(text[place]) if place < len(text) else END
            assert step is not None
            step = self._advance(step, after, place == len(text) - 1 and text[place] == "\n")
            if step is None:
                return True
        return False

    def _class_of(self, character: str) -> Class:
        found = self._classes.get(character)
        if found is None:
            found = sum(1 << number for number, test in enumerate(self._tests.values()) if test(character))
            if len(self._classes) >= MOST_CHARACTERS:
                self._classes.clear()
            self._classes[character] = found
        return found

    def _advance(self, step: Step, after: Class, last_line_end: bool) -> Step | None:
        """The states after one more character; None where a match has ended before it."""
        around = (step[1], after, last_line_end)
        key = (step, around)
        try:
            return self._kept[key]
        except KeyError:
            found = self._follow(step[0], around)
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()  # another thread may search at the same time, and finds out anew
        self._kept[key] = found
        return found

    def _follow(self, states: Iterable[int], around: Surroundings) -> Step | None:
        after = around[1]
        # A match may begin at every place.
        waiting, seen, reached = [*states, self._first], set[int](), set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            if number == 0:
                return None
            state = self._states[number]
            if state.test is not None:
                if after != END and after >> state.test & 1:
                    reached.update(state.then)
            elif state.place is None or _stands(state.place, around):
                waiting += state.then
        return frozenset(reached), after

    def _add(self, *then: int, test: int | None = None, place: Any = None) -> int:
        if len(self._states) >= MOST_STATES:
            raise ValueError(f"is too large: repetitions counted out, at most {MOST_STATES} steps")
        self._states.append(_State(test, place, list(then)))
        return len(self._states) - 1

    def _sequence(self, parsed: Any, then: int) -> int:
        """Build from the end: the state from which `parsed` leads to `then`."""
        for kind, value in reversed(list(parsed)):
            then = self._element(kind, value, then)
        return then

    def _element(self, kind: Any, value: Any, then: int) -> int:
        if kind in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            name = f"{kind} {value}"
            self._tests.setdefault(name, self._character(kind, value))
            return self._add(then, test=list(self._tests).index(name))
        if kind is ops.AT and value in _PLACES:
            return self._add(then, place=value)
        if kind is ops.BRANCH:
            return self._add(*(self._sequence(branch, then) for branch in value[1]))
        if kind is ops.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise ValueError("may set flags for the whole only")
            return self._sequence(inner, then)
        if kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, then)
        raise ValueError(f"uses {str(kind).lower()}, which cannot be searched for in linear time")

    def _repeat(self, least: int, most: Any, inner: Any, then: int) -> int:
        if most is ops.MAXREPEAT:
            loop = self._add(then)
            self._states[loop].then.append(self._sequence(inner, loop))
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(end, self._sequence(inner, then))
        for _ in range(least):
            then = self._sequence(inner, then)
        return then

    def _character(self, kind: Any, value: Any) -> Test:
        if kind is ops.ANY:
            return lambda c: c != "\n"
        if kind is ops.IN:
            return self._fold(_one_of(value))
        literal = self._fold(lambda c: ord(c) == value)
        return literal if kind is ops.LITERAL else lambda c: not literal(c)

    def _fold(self, test: Test) -> Test:
        if not self._ignore_case:
            return test
        return lambda c: test(c) or any(len(other) == 1 and test(other) for other in (c.lower(), c.upper()))


def _one_of(items: Any) -> Test:
    """The test for a character class."""
    negated = bool(items) and items[0][0] is ops.NEGATE
    tests = [_member(kind, value) for kind, value in items[int(negated) :]]
    return lambda c: any(test(c) for test in tests) is not negated


def _member(kind: Any, value: Any) -> Test:
    if kind is ops.LITERAL:
        return lambda c: ord(c) == value
    if kind is ops.RANGE:
        low, high = value
        return lambda c: low <= ord(c) <= high
    if value in _NEGATED:
        inside = _CATEGORIES[_NEGATED[value]]
        return lambda c: not inside(c)
    return _CATEGORIES[value]


def _stands(place: Any, around: Surroundings) -> bool:
    before, after, last_line_end = around
    if place in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
        return before == END
    if place is ops.AT_END_STRING:
        return after == END
    if place is ops.AT_END:
        return after == END or last_line_end
    boundary = (before != END and before & WORD) != (after != END and after & WORD)
    return boundary is (place is ops.AT_BOUNDARY)
