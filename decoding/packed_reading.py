"""Several continuations of one sequence read in one forward: none sees another, and all begin at the same place."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TypeVar

from decoding.model import Model, Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree

T = TypeVar("T")
MOST_ROWS = 64  # of one forward; backends are fast up to here


async def read_packed(
    model: Model,
    seq: Sequence,
    continuations: Items[tuple[int, ...]],
    want: ReadSpec,
    reduce: Callable[[list[Readout]], T],
    most_rows: int = MOST_ROWS,
) -> list[T]:
    """Read every token of each continuation, in as few forwards as fit (paper #160, Uni-Encoder's mask).

    Args:
        model: reads.
        seq: what they continue; nothing is appended.
        continuations: at least one token each.
        want: what to read after each token.
        reduce: makes what is kept of a continuation from its rows, one per token, which are those of a separate pass:
            hidden states of all tokens of many answers would not fit.
        most_rows: tokens of one forward; a longer continuation is read alone.

    Returns:
        What `reduce` made, by continuation.
    """
    found: dict[int, T] = {}
    most = min(most_rows, model.max_length - len(seq))

    async def read(places: list[int]) -> None:
        if len(places) == 1:
            [place] = places
            rows = await model.extend(seq, continuations[place], want, every=True)
            found[place] = reduce(rows[1:])
            return
        tree = branches([continuations[place] for place in places], model.name)
        rows = await model.expand(seq, tree, 0, want)
        for place in places:
            size = len(continuations[place])
            found[place], rows = reduce(rows[:size]), rows[size:]

    for pack in packs([len(each) for each in continuations], most):
        await read(pack)
    return [found[place] for place in range(len(continuations))]


def branches(continuations: Items[tuple[int, ...]], source: str) -> DraftTree:
    """Build a tree with one branch for each continuation; equal beginnings stay apart."""
    tokens: list[int] = []
    parents: list[int] = []
    for each in continuations:
        for place, token in enumerate(each):
            parents.append(len(tokens) - 1 if place else ROOT)
            tokens.append(token)
    return DraftTree(tuple(tokens), tuple(parents), source)


def packs(sizes: Items[int], most: int) -> list[list[int]]:
    """Distribute items over as few packs as first-fit decreasing finds; an item larger than `most` stands alone."""
    made: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        for index, (used, members) in enumerate(made):
            if used + sizes[place] <= most:
                members.append(place)
                made[index] = used + sizes[place], members
                break
        else:
            made.append((sizes[place], [place]))
    return [sorted(members) for _, members in made]
