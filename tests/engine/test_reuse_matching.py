"""What two prompts have in common, and which prompts are looked at (seed 222, KVShare): by tokens alone, no model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.reuse.index import PromptIndex, SeenPrompt
from engine.reuse.matcher import Run, common_runs, window_hashes
from tests.properties import cases
from turnout.types import BlockHash, Namespace

SIZE = 16
MINE, THEIRS, PUBLIC = Namespace("private", "a"), Namespace("private", "b"), Namespace("public", "p")


def tokens(seed: int, count: int, vocab: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def runs(target: np.ndarray, source: np.ndarray, least: int = SIZE) -> list[Run]:
    return common_runs(target, source, np.ones(len(source), dtype=np.bool_), least)


def test_moved_and_reordered_pieces_are_found_whole() -> None:
    a, b, c, new = tokens(1, 100), tokens(2, 150), tokens(3, 80), tokens(4, 37)
    source = np.concatenate([a, b, c])
    target = np.concatenate([new, c, b[20:], new[:11], a])
    assert runs(target, source) == [Run(37, 250, 80), Run(117, 120, 130), Run(258, 0, 100)]


def test_a_changed_token_ends_a_run_and_the_rest_is_another() -> None:
    source = tokens(5, 200)
    target = source.copy()
    target[90] += 1
    assert runs(target, source) == [Run(0, 0, 90), Run(91, 91, 109)]


def test_of_equal_places_the_longest_is_taken_and_then_the_one_that_goes_on() -> None:
    piece, tail = tokens(6, 40), tokens(7, 60)
    source = np.concatenate([piece, tokens(8, 10), piece, tail])
    assert runs(np.concatenate([piece, tail]), source) == [Run(0, 50, 100)]
    # A text that repeats itself is one run, not many.
    again = np.tile(tokens(9, 8), 300)
    assert runs(again, again) == [Run(0, 0, 2400)]


@pytest.mark.parametrize("least", [2, 3, 16, 64])
def test_shorter_runs_are_left_alone(least: int) -> None:
    source = tokens(10, 300)
    target = np.concatenate([source[100 : 100 + least], tokens(11, 5) + 10_000, source[200 : 200 + least - 1]])
    assert runs(target, source, least) == [Run(0, 100, least)]


@cases(200)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.booleans(), min_size=60, max_size=60),
    st.integers(1, 6),
)
def test_runs_are_equal_disjoint_available_and_complete(
    mine: list[int], theirs: list[int], available: list[bool], least: int
) -> None:
    target, source = np.array(mine, dtype=np.int64), np.array(theirs, dtype=np.int64)
    may = np.array(available[: len(source)], dtype=np.bool_)
    found = common_runs(target, source, may, least)
    end = 0
    for run in found:
        assert run.start >= end
        end = run.start + run.length
        assert run.length >= least
        assert may[run.origin : run.origin + run.length].all()
        assert (target[run.start : end] == source[run.origin : run.origin + run.length]).all()
    covered = np.zeros(len(target), dtype=np.bool_)
    for run in found:
        covered[run.start : run.start + run.length] = True
    for start in range(len(target) - least + 1):
        if covered[start : start + least].any():
            continue
        for origin in range(len(source) - least + 1):
            assert not (
                may[origin : origin + least].all() and (target[start : start + least] == source[origin:][:least]).all()
            ), "a run was missed"


def test_equal_windows_hash_equal_and_others_do_not() -> None:
    line = np.concatenate([tokens(12, 500), tokens(13, 10), tokens(12, 500)])
    hashes = window_hashes(line, 8)
    assert len(hashes) == len(line) - 7
    assert (hashes[:493] == hashes[510:]).all()
    assert len(np.unique(hashes[:510])) == 510
    assert len(window_hashes(line[:5], 8)) == 0


def seen(line: np.ndarray, *namespaces: Namespace) -> SeenPrompt:
    """Its blocks belong to these; the last one's is that of all others too."""
    count = len(line) // SIZE
    owners = (*namespaces, *[namespaces[-1]] * count)[:count]
    hashes = tuple(
        BlockHash(f"{owner}{line[: (index + 1) * SIZE].tolist()}".encode()) for index, owner in enumerate(owners)
    )
    return SeenPrompt(line[: count * SIZE], hashes, owners)


def found(index: PromptIndex, line: np.ndarray, *owners: Namespace, least: float = 0.2, most: int = 3) -> list[int]:
    """First tokens of the prompts found."""
    similar = index.similar(line, lambda namespace: namespace in owners, least, most)
    return [int(prompt.tokens[0]) for prompt in similar]


def test_the_most_similar_prompt_comes_first_and_others_not_at_all() -> None:
    index = PromptIndex(100, 1_000_000)
    base = tokens(20, 800)
    half = np.concatenate([tokens(21, 400), base[:400]])
    tenth = np.concatenate([tokens(22, 720), base[:80]])
    for line in (half, tenth, base, *(tokens(30 + i, 800) for i in range(20))):
        index.add(seen(line, MINE))
    wanted = np.concatenate([tokens(23, 64), base[:736]])
    assert found(index, wanted, MINE) == [int(base[0]), int(half[0])]
    assert found(index, wanted, MINE, most=1) == [int(base[0])]
    assert found(index, wanted, MINE, least=0.02)[2:] == [int(tenth[0])]
    assert found(index, tokens(24, 600), MINE, least=0.01) == []


def test_nobody_finds_what_is_not_theirs() -> None:
    index = PromptIndex(100, 1_000_000)
    line = tokens(40, 320)
    index.add(seen(line, THEIRS))
    assert found(index, line, MINE, PUBLIC) == []
    assert found(index, line, THEIRS) == [int(line[0])]


def test_a_prompt_is_found_through_the_part_that_may_be_seen_only() -> None:
    index = PromptIndex(100, 1_000_000)
    public, private = tokens(41, 10 * SIZE), tokens(42, 10 * SIZE)
    index.add(seen(np.concatenate([public, private]), *[PUBLIC] * 10, THEIRS))
    assert found(index, public, MINE, PUBLIC) == [int(public[0])]
    assert found(index, private, MINE, PUBLIC, least=0.01) == []
    assert found(index, private, THEIRS) == [int(public[0])]


def test_the_longest_unused_is_forgotten_and_a_namespace_cannot_push_out_another() -> None:
    index = PromptIndex(3, 1_000_000)
    lines = [tokens(50 + i, 160) for i in range(4)]
    kept = tokens(60, 160)
    index.add(seen(kept, THEIRS))
    for line in lines[:3]:
        index.add(seen(line, MINE))
    assert found(index, lines[0], MINE) == [int(lines[0][0])]  # used: the next one is now the longest unused
    index.add(seen(lines[3], MINE))
    assert [bool(found(index, line, MINE)) for line in lines] == [True, False, True, True]
    assert found(index, kept, THEIRS) == [int(kept[0])]
    assert len(index) == 4
    index.add(seen(lines[3], MINE))
    assert len(index) == 4


def test_memory_is_bounded_and_whoever_has_most_of_it_gives_way() -> None:
    index = PromptIndex(100, 10 * 160)
    few = tokens(80, 160)
    index.add(seen(few, THEIRS))
    many = [tokens(81 + i, 160) for i in range(12)]
    for line in many:
        index.add(seen(line, MINE))
    assert len(index) == 10
    assert found(index, few, THEIRS) == [int(few[0])]
    assert [bool(found(index, line, MINE)) for line in many] == [False] * 3 + [True] * 9
    huge = tokens(99, 11 * 160)
    index.add(seen(huge, PUBLIC))
    assert found(index, huge, PUBLIC) == []
    assert len(index) == 10


def test_a_prompt_shorter_than_what_is_compared_is_harmless() -> None:
    index = PromptIndex(3, 1_000_000)
    index.add(SeenPrompt(tokens(70, 4), (BlockHash(b"x"),), (MINE,)))
    assert found(index, tokens(70, 4), MINE, least=0.0) == []
    assert found(index, tokens(70, 40), MINE, least=0.0) == []
