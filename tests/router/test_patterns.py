from __future__ import annotations

import random
import re

import numpy as np
import numpy.typing as npt
import pytest
import re2

from router import patterns
from router.patterns import LONGEST_PATTERN, LONGEST_TEXT, Pattern, SearchedText

ALPHABET = "abcxyz 12\nfooABCq.-]漢é٣_\\\b\0\u2028\x1cÉ\u017fK\x01😀"
PATTERNS = [
    "abc", "a+b", "(a|b)*c$", r"^\d{2,4}x", r"\bfoo\b", "[^a-c]x|y{0,2}z", "a.c", "(?:ab)+?c", "x(a*)*y", "(?i)AbC",
    r"\Aab\Z", "a$", r"\Bb", r" ?\w+\s", r"[\d.]+", "()a", "(a|)b", r"[^\W\d]q", r"a\n?$", "(?:a|b|c){3}",
    r"\bécrire|é\b", r"[\w-]+q", "[]a]q", "[^]a]b", "a{,2}b", "a{b|x{1", r"\x41|\u6f22|\N{BULLET}|\101", r"[\b]a",
    "a$\n", "^$", "(a$)*", r"[\]\\-]x", "(?P<n>a)b", "(?#c)a", r"[^\D]", r"\W\W", r"[\S\s]", r"\S{3}", r"a\Z",
    r"(^|\s)a", "\0", r"[a\-c]x", r"[\w.-]{3}", r"\0", "[[:a]", "[a-]q", r"[\W\w]", r"[^\W\w]", r"[^\W\d_]",
    r"(\bx)?y", r"[\u0100-\u017f]", "(?i)[é-ü]", r"(?i)\bk", "(?i)[^k]s", r"[\x00-\x1f]", r"\b\w", r"\d\B", "a??b",
    "x*", r"[\1]a", r"[^\1\12]", r"[\18]+", r"[\0-\1]x?", r"[\101\1012]b", "[^a]😀", r"\W\b", "[😀a]",
]  # fmt: skip


def found(pattern: Pattern, text: str) -> bool:
    return pattern.found_in(SearchedText(text))


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_finds_what_re_finds(pattern: str) -> None:
    chooser = random.Random(1)
    texts = ["".join(chooser.choices(ALPHABET, k=chooser.randint(0, 9))) for _ in range(300)]
    ours = Pattern(pattern)
    assert [text for text in texts if found(ours, text) != (re.search(pattern, text) is not None)] == []


@pytest.mark.parametrize("category", [r"\w", r"\d", r"\s", r"\W", r"\D", r"\S", r"\b", "."])
def test_classes_hold_what_they_hold_in_re(category: str) -> None:
    """Every character there is, one in three hundred at a time."""
    every, ours = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000], Pattern(f"^{category}")
    some = every[random.Random(4).randrange(300) :: 300] + every[:0x400]
    assert [char for char in some if found(ours, char) != bool(re.match(category, char))] == []


def test_kinds_are_looked_up_for_the_characters_of_a_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up, kinds = list[int](), patterns._kinds

    def counted(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        looked_up.append(len(codes))
        return kinds(codes)

    monkeypatch.setattr(patterns, "_kinds", counted)
    assert found(Pattern(r"\bb\b"), "a😀b" * 1000)
    assert looked_up == [3]


def test_turkish_letters_match_themselves_only() -> None:
    """As the module says; everything else is as in `re` where capitals are ignored."""
    dotless, dotted = "\u0131", "\u0130"
    turkish = f"{dotless}{dotted}iI"
    matched = {one: [other for other in turkish if found(Pattern(one, ignore_case=True), other)] for one in turkish}
    assert matched == {dotless: [dotless], dotted: [dotted], "i": ["i", "I"], "I": ["i", "I"]}
    some = [char for code in range(0x250) if (char := chr(code)) not in turkish]
    for char in some:
        ours, theirs = Pattern(re.escape(char), ignore_case=True), re.compile(re.escape(char), re.IGNORECASE)
        near = {char.lower(), char.upper(), char.title(), char.swapcase(), "a", "\u017f", "K", "μ"}
        assert [each for each in near if found(ours, each) != (theirs.search(each) is not None)] == [], char


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("invalid repetition size: {1001}", "too large"),
        ("pattern too large - compile failed", "too large"),
        ("invalid escape sequence", "not supported by RE2"),
    ],
)
def test_a_pattern_is_called_too_large_where_re2_says_so(
    said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise re2.error(said.encode())

    monkeypatch.setattr(re2, "compile", refuse)
    with pytest.raises(ValueError, match=reason):
        Pattern("a")


def test_capitals_can_be_ignored() -> None:
    assert found(Pattern("prove [a-c]", ignore_case=True), "please PROVE B")
    assert found(Pattern(r"\bécrire", ignore_case=True), "à ÉCRIRE")
    assert not found(Pattern("prove [a-c]"), "please PROVE B")


def test_the_first_characters_of_a_text_are_looked_at() -> None:
    assert found(Pattern("b$"), "a" * (LONGEST_TEXT - 1) + "bc")
    assert not found(Pattern("c"), "a" * LONGEST_TEXT + "c")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a|a)*c",
        r"(.*)(.*)(.*)[xy]",
        r"(a?){60}a{60}$",
        "(" * 100 + "a" + "+)" * 100 + "c",
        "(a|b|ab)*c" * 40,
    ],
)
def test_no_pattern_becomes_slow(pattern: str) -> None:
    """Each would take `re` longer than the age of the world; they end because the search is linear."""
    assert len(pattern) <= LONGEST_PATTERN
    assert not found(Pattern(pattern), "a" * (LONGEST_TEXT - 1) + "b")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "no regular expression: missing )"),
        (r"(a)\1", "refers to a group, which cannot be searched for in linear time"),
        ("(?P<n>a)(?P=n)", "refers to a group"),
        ("(a)?(?(1)b|c)", "depends on a group"),
        ("(?=a)b", "looks ahead"),
        ("(?!a)b", "looks ahead"),
        ("(?<=a)b", "looks back"),
        ("(?<!a)b", "looks back"),
        ("(?>a)b", "atomic group"),
        ("a++", "possessive"),
        ("a{2}+", "possessive"),
        ("(?m)^a", "no flag but i"),
        ("(?a)b", "no flag but i"),
        ("(?i:a)b", "flags for the whole only"),
        ("((a{50}){50}){50}", "too large"),
        ("a{1001}", "too large"),
        ("a{99999999999}", "no regular expression"),
    ],
)
def test_what_cannot_be_fast_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Pattern(pattern)
