from __future__ import annotations

import random
import re
import time

import pytest

from router.patterns import LONGEST_TEXT, Pattern

PATTERNS = [
    "abc", "a+b", "(a|b)*c$", r"^\d{2,4}x", r"\bfoo\b", "[^a-c]x|y{0,2}z", "a.c", "(?:ab)+?c", "x(a*)*y", "(?i)AbC",
    r"\Aab\Z", "a$", r"\Bb", r" ?\w+\s", r"[\d.]+", "()a", "(a|)b", r"[^\W\d]q", r"a\n?$", "(?:a|b|c){3}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_finds_what_re_finds(pattern: str) -> None:
    chooser = random.Random(1)
    texts = ["".join(chooser.choices("abcxyz 12\nfooABCq.漢é٣_", k=chooser.randint(0, 9))) for _ in range(800)]
    ours = Pattern(pattern)
    assert [ours.found_in(text) for text in texts] == [re.search(pattern, text) is not None for text in texts]


def test_capitals_can_be_ignored() -> None:
    assert Pattern("prove [a-c]", ignore_case=True).found_in("please PROVE B")
    assert not Pattern("prove [a-c]").found_in("please PROVE B")


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*c", r"(.*)(.*)(.*)[xy]", r"(a?){60}a{60}$"])
def test_no_pattern_becomes_slow(pattern: str) -> None:
    text = "a" * (LONGEST_TEXT - 1) + "b"
    ours, started = Pattern(pattern), time.process_time()
    assert not ours.found_in(text)
    assert time.process_time() - started < 5  # `re` takes longer than anybody waits


@pytest.mark.parametrize("pattern", [r"\b(prove|derive)\b", r"(?:\w+ ){0,20}(prove|derive|show that)"])
def test_a_text_of_many_characters_is_one_of_few_kinds(pattern: str) -> None:
    """Steps are found out once for each kind of character, not for each character."""
    chooser = random.Random(2)
    ours = Pattern(pattern)
    for _ in range(3):
        assert not ours.found_in("".join(chr(chooser.randint(0x4E00, 0x9FFF)) for _ in range(LONGEST_TEXT)))
    assert len(ours._kept) < 100


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "no regular expression: missing )"),
        (r"(a)\1", "groupref, which cannot be searched for in linear time"),
        ("(?=a)b", "assert"),
        ("(?<!a)b", "assert_not"),
        ("a++", "possessive"),
        ("(?m)^a", "no flag but i"),
        ("(?i:a)b", "flags for the whole only"),
        ("((a{50}){50}){50}", "too large"),
        ("a{99999999999}", "no regular expression"),
    ],
)
def test_what_cannot_be_fast_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Pattern(pattern)
