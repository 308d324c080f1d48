"""Who finds whose blocks: pairs of sequences that may share and that may not, and the hashes behind it."""

from __future__ import annotations

from collections.abc import Sequence as Spans

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool
from engine.cache.hashes import ContentHashes
from engine.cache.table import BlockTable
from turnout.types import Namespace, SamplingParams, Sharing

SIZE = 4
TOKENS = [(7 * i) % 50 for i in range(41)]
PUBLIC, OTHER_PUBLIC = Namespace("public", "p"), Namespace("public", "q")
TEAM, OTHER_TEAM = Namespace("group", "t"), Namespace("group", "u")
A, B = Namespace("private", "a"), Namespace("private", "b")


class NoTensors:
    """A store for tables that are moved about without a model."""


def sequence(sharing: Sharing, tokens: Spans[int] = TOKENS) -> Sequence:
    return Sequence(tokens, SamplingParams(), seed=0, sharing=sharing)


def found(author: Sharing, reader: Sharing) -> int:
    """Tokens that one finds of what the other computed."""
    pool = BlockPool(32, SIZE)
    table = BlockTable(sequence(author), pool, NoTensors())  # type: ignore[arg-type]
    table.reserve(len(TOKENS))
    table.filled(TOKENS)
    return BlockTable(sequence(reader), pool, NoTensors()).adopt_prefix()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("author", "reader", "tokens"),
    [
        (Sharing(A), Sharing(A), 40),
        (Sharing(A), Sharing(B), 0),
        (Sharing(A), Sharing(Namespace("group", "a")), 0),  # equal ids of different kinds
        (Sharing(TEAM), Sharing(TEAM), 40),
        (Sharing(TEAM), Sharing(OTHER_TEAM), 0),
        (Sharing(TEAM), Sharing(A), 0),
        (Sharing(A, ((20, PUBLIC),)), Sharing(B, ((20, PUBLIC),)), 20),
        (Sharing(A, ((20, PUBLIC),)), Sharing(A, ((20, PUBLIC),)), 40),
        (Sharing(A, ((20, PUBLIC),)), Sharing(B, ((20, OTHER_PUBLIC),)), 0),
        (Sharing(A, ((18, PUBLIC),)), Sharing(B, ((18, PUBLIC),)), 16),  # ends inside a block: that one is private
        (Sharing(A, ((3, PUBLIC),)), Sharing(B, ((3, PUBLIC),)), 0),
        (Sharing(A, ((20, PUBLIC), (32, TEAM))), Sharing(B, ((20, PUBLIC), (32, TEAM))), 32),
        (Sharing(A, ((18, PUBLIC), (30, TEAM))), Sharing(B, ((18, PUBLIC), (30, TEAM))), 28),
        (Sharing(A, ((18, PUBLIC), (19, TEAM))), Sharing(B, ((18, PUBLIC), (19, TEAM))), 16),
        (Sharing(A, ((20, PUBLIC), (32, TEAM))), Sharing(B, ((20, PUBLIC), (32, OTHER_TEAM))), 20),
        (Sharing(A, ((20, PUBLIC),)), Sharing(B), 0),  # who did not begin with it shares nothing of it
        (Sharing(A, ((100, PUBLIC),)), Sharing(B, ((50, PUBLIC),)), 40),  # both spans cover all
    ],
)
def test_blocks_are_found_by_those_who_share_all_of_them(author: Sharing, reader: Sharing, tokens: int) -> None:
    assert found(author, reader) == found(reader, author) == tokens


@pytest.mark.parametrize(("end", "namespace"), [(1, PUBLIC), (18, PUBLIC), (19, TEAM), (30, TEAM), (31, A), (900, A)])
def test_a_piece_belongs_to_the_most_private_span_it_touches(end: int, namespace: Namespace) -> None:
    assert Sharing(A, ((18, PUBLIC), (30, TEAM))).namespace(end) == namespace


@given(st.tuples(st.text(max_size=6), st.text(max_size=6)))
def test_names_do_not_run_into_each_other(ids: tuple[str, str]) -> None:
    policies = ("private", "group", "public")
    names = {Namespace(policy, each) for policy in policies for each in ids}  # type: ignore[arg-type]
    assert len({name.key for name in names}) == len(names)
    assert not any(a.key != b.key and b.key.startswith(a.key) for a in names for b in names)


@pytest.mark.parametrize("start", [0, 12, 40])
def test_tainted_hashes_leave_the_exact_ones_and_never_meet_them_again(start: int) -> None:
    exact, tainted = (ContentHashes(sequence(Sharing(A)), SIZE) for _ in range(2))
    tainted.first(10)
    tainted.taint(start)
    mine, theirs = exact.first(10), tainted.first(10)
    same = [a == b for a, b in zip(mine, theirs, strict=True)]
    assert same == [True] * (start // SIZE) + [False] * (10 - start // SIZE)
    assert len({*mine, *theirs}) == 20 - start // SIZE
    tainted.taint(None)
    assert tainted.first(10) == mine
