"""Bans of tokens, on logits that are written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decoding.constraints.base import Constraint
from decoding.logits import choice_scores
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.token_bans import is_banned
from turnout.types import SamplingParams, Token

END, VOCAB = 0, 8


def row(path: tuple[int, ...] = (), written: tuple[int, ...] = (), **sampling: Any) -> RowContext:
    seq = Sequence([5, 6], SamplingParams(**sampling), 0, (END,))
    for token in written:
        seq.append(Token(token, "m"))
    return RowContext(seq, path)


def left(*rows: RowContext) -> list[set[int]]:
    """The tokens that may follow, by row."""
    raw = torch.arange(VOCAB, dtype=torch.float32).expand(len(rows), VOCAB)
    made = choice_scores(raw, rows)
    assert raw[0].tolist() == list(range(VOCAB))
    found = [{token for token in range(VOCAB) if value[token] != -torch.inf} for value in made]
    assert all(made[i, token] == token for i, kept in enumerate(found) for token in kept)
    return found


ALL = set(range(VOCAB))


class Fixed(Constraint):
    """A structure that allows the same tokens everywhere."""

    end_ids, vocab_size, failure, remembers = frozenset({END}), VOCAB, "", True

    def __init__(self, allowed: set[int]) -> None:
        self._mask = np.packbits([token in allowed for token in range(VOCAB)], bitorder="little")

    def masks(self, answer: list[int], paths: Any) -> list[Any]:
        return [self._mask for _ in paths]

    def accepts(self, tokens: list[int]) -> bool:
        return True

    def clone(self) -> Fixed:
        return self


@pytest.mark.parametrize(
    ("structure", "sampling", "kept"),
    [
        ({END, 2}, {"min_tokens": 3}, {2}),
        ({END}, {"min_tokens": 3}, {END}),
        ({2, 3}, {"allowed_token_ids": (3, 4)}, {3}),
        ({2, 3}, {"allowed_token_ids": (4,)}, {2, 3}),
        ({2, 3}, {"bad_word_ids": ((2,),)}, {3}),
    ],
)
def test_a_structure_comes_first(structure: set[int], sampling: dict[str, Any], kept: set[int]) -> None:
    asked = row(**sampling)
    asked.seq.constraint = Fixed(structure)
    assert left(asked, row()) == [kept, ALL]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (row(min_tokens=2), ALL - {END}),
        (row(min_tokens=2, written=(3,)), ALL - {END}),
        (row(min_tokens=2, path=(3,)), ALL - {END}),
        (row(min_tokens=2, written=(3,), path=(4,)), ALL),
        (row(min_tokens=1, stop_token_ids=(7,)), ALL - {END, 7}),
        (row(min_tokens=1, stop_token_ids=(7,), ignore_eos=True), ALL - {7}),
        (row(allowed_token_ids=(2, 3)), {2, 3}),
        (row(bad_word_ids=((4,), (2, 3))), ALL - {4}),
        (row(bad_word_ids=((4,), (2, 3)), written=(2,)), ALL - {4, 3}),
        (row(bad_word_ids=((4,), (2, 3)), written=(1,), path=(2,)), ALL - {4, 3}),
        (row(bad_word_ids=((1, 2, 3),), written=(1,), path=(2,)), ALL - {3}),
        (row(bad_word_ids=((1, 2, 3),), written=(2,)), ALL),
        (row(bad_word_ids=((6, 3),)), ALL),  # the prompt is no part of the answer
        (row(allowed_token_ids=(END, 2), bad_word_ids=((2,),)), {END}),
        # What would leave nothing gives way.
        (row(allowed_token_ids=(END,), min_tokens=3), {END}),
        (row(allowed_token_ids=(2,), bad_word_ids=((2,),), min_tokens=3), {2}),
    ],
)
def test_what_is_left(asked: RowContext, kept: set[int]) -> None:
    [found, untouched] = left(asked, row())
    assert found == kept
    assert untouched == ALL
    banned = {token for token in range(VOCAB) if is_banned(asked.seq, asked.path, token)}
    assert banned == ALL - kept or banned == ALL
