"""Edits of a cached sequence: what stands after them moves along with them, and is not computed again.

Only new tokens are computed, and the last one, whose logits say what comes next; the keys of every run that survives
are rotated by its shift, summed over the edits before it. Source: positional integrity encoding of paper #230, "Let the
Code LLM Edit Itself When You Edit the Code".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.reuse.lookup import take_over
from engine.reuse.reused_spans import Held, Reused, Span
from engine.reuse.settings import MOVED_ONLY
from turnout.errors import invalid, out_of_range


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace tokens start to end - 1 by others: end = start inserts, no tokens delete."""

    start: int
    end: int
    tokens: tuple[int, ...]


def edited(tables: dict[Sequence, BlockTable], seq: Sequence, edits: list[Edit]) -> Sequence:
    """A sequence with some places edited; its first operation computes the new tokens and the last one only.

    Whatever the old sequence's cache lacks by then is computed too: it should not be released before. The new cache is
    inexact behind the first run that moved, and no other sequence finds it there.

    Args:
        tables: a model's caches; the new one is put there.
        seq: the sequence; stays as it is.
        edits: places in `seq`, in any order.

    Returns:
        Prompt and answer with the edits, as a prompt.

    Raises:
        TurnoutError: INVALID_ARGUMENT: edits overlap, or leave nothing; OUT_OF_RANGE: one is outside the sequence.
    """
    ordered = checked(edits, len(seq))
    if not ordered:
        raise invalid("edits", "is empty; at least one edit is needed")
    tokens: list[int] = []
    runs: list[tuple[int, int, int]] = []  # (start, origin, length) of what survives behind the first edit
    at = 0
    for index, edit in enumerate(ordered):
        if index and edit.start > at:
            runs.append((len(tokens), at, edit.start - at))
        tokens += seq.tokens[at : edit.start]
        tokens += edit.tokens
        at = edit.end
    first = ordered[0].start
    if at < len(seq):
        runs.append((len(tokens), at, len(seq) - at))
    tokens += seq.tokens[at:]
    if not tokens:
        raise invalid("edits", "leave no token")
    sharing = replace(seq.sharing, spans=tuple((min(end, first), each) for end, each in seq.sharing.spans))
    twin = Sequence(tokens, seq.sampling, seq.seed, seq.end_ids, None, sharing, seq.tenant, seq.lossy, seq.low_priority)
    twin.owner = seq.owner
    old = tables.get(seq)
    if old is not None:
        tables[twin] = _moved(old, twin, first, runs)
    return twin


def checked(edits: list[Edit], length: int) -> list[Edit]:
    """The edits in order.

    Raises:
        TurnoutError: see `edited`.
    """
    ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
    before = 0
    for edit in ordered:
        if not 0 <= edit.start <= edit.end <= length:
            raise out_of_range("edits", f"tokens {edit.start} to {edit.end}; allowed: 0 to {length}, start before end")
        if edit.start < before:
            raise invalid("edits", f"two of them replace token {edit.start}")
        before = edit.end
    return ordered


def _moved(old: BlockTable, seq: Sequence, first: int, runs: list[tuple[int, int, int]]) -> BlockTable:
    """A cache that shares the prefix of another and takes over the runs."""
    table = old.fork(seq)
    table.truncate(min(first, len(table)))
    spans = [Span(start, origin, length, Held(old)) for start, origin, length in runs]
    if spans:
        take_over(table, Reused(spans, len(seq), MOVED_ONLY))
    return table
