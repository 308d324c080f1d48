"""Answers prompt by prompt: for a page those on which ways differ most, within its size; for a program all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from experiments.grid.cells import Record
from experiments.reports.table import Group

SHOWN_PROMPTS = 12  # of a group
PAGE_BYTES = 4 << 20  # of all answers on a page
LONGEST = 4000  # characters of an answer on a page
LONGEST_NOTE = 400
PIECE_BYTES = 80  # of markup around a piece or a way


def shown_answers(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For each group the prompts on which ways differ most, with what every way answered, as far as a page can hold.

    Ways with the same answer, score and note stand together. Each entry says how many ways found no place.
    """
    found = []
    for group in groups:
        left = PAGE_BYTES // len(groups)
        for key in _by_difference(group)[:SHOWN_PROMPTS]:
            entry, taken = _entry(group, key, left)
            left -= taken
            if not entry["ways"]:
                break
            found.append(entry)
    return found


def every_answer(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Each prompt and seed, those first on which ways differ most, with all that is known of each way's answer."""
    for group in groups:
        for seed, prompt in _by_difference(group):
            ways = {column.label: column.records.get((seed, prompt)) for column in group.columns.values()}
            yield {
                "dataset": group.dataset,
                "pool": group.pool,
                "load": group.load,
                "prompt": prompt,
                "seed": seed,
                "ways": {label: asdict(record) for label, record in ways.items() if record is not None},
            }


def _by_difference(group: Group) -> list[tuple[int, str]]:
    """(seed, prompt) of all, by how far the scores lie apart."""
    scores: dict[tuple[int, str], list[float]] = {}
    for column in group.columns.values():
        for key, record in column.records.items():
            scores.setdefault(key, []).append(record.score or 0.0)
    return sorted(scores, key=lambda key: -float(np.std(scores[key])))


def _entry(group: Group, key: tuple[int, str], room: int) -> tuple[dict[str, Any], int]:
    """A prompt with the ways that fit into a number of bytes, and the bytes taken."""
    together: dict[Any, list[str]] = {}
    for column in group.columns.values():
        if (record := column.records.get(key)) is not None:
            together.setdefault(_same(record), []).append(column.label)
    ways, taken, without = list[dict[str, Any]](), 0, 0
    for (score, note, pieces), labels in together.items():
        kept, cut = _shortened(pieces)
        size = _bytes(", ".join(labels)) + _bytes(note) + sum(_bytes(source + text) for source, _, text in kept)
        if without or taken + size > room:
            without += len(labels)
            continue
        taken += size
        ways.append({"labels": labels, "score": score, "note": note, "pieces": kept, "cut": cut})
    seed, prompt = key
    return {"group": group.name, "prompt": prompt, "seed": seed, "ways": ways, "without": without}, taken


def _same(record: Record) -> tuple[float | None, str, tuple[tuple[str, str, str], ...]]:
    """What makes two answers one on the page."""
    return record.score, (record.note or record.error)[:LONGEST_NOTE], tuple(record.pieces)


def _shortened(pieces: Sequence[tuple[str, str, str]]) -> tuple[list[tuple[str, str, str]], int]:
    """Pieces of the first characters, and how many characters are cut off."""
    kept, room = list[tuple[str, str, str]](), LONGEST
    for source, kind, text in pieces:
        if room > 0:
            kept.append((source, kind, text[:room]))
        room -= len(text)
    return kept, max(-room, 0)


def _bytes(text: str) -> int:
    """Of a text on a page, its markup included."""
    return len(escape(text).encode()) + PIECE_BYTES
