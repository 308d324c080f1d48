"""Lookahead: a window of Jacobi trajectories yields n-grams, and the same forward verifies pooled ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.drafters.base import NOTHING, Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import ReadSpec
from decoding.noise import Purpose, noise_key, uniform
from decoding.sequence import Sequence
from decoding.tree import DraftTree, ExtraRows
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult


class LookaheadParams(MethodParams):
    """Parameters of `lookahead`."""

    window: Annotated[int, Field(ge=2, le=64, description="columns of the lookahead window")] = 10
    ngram: Annotated[int, Field(ge=2, le=8, description="tokens of an n-gram, the one it is found by included")] = 3
    guesses: Annotated[int, Field(ge=1, le=64, description="n-grams kept and verified per first token")] = 10
    prompt_ngrams: Annotated[bool, Field(description="whether the prompt's own n-grams are in the pool")] = True


class NgramPool:
    """Continuations by the token before them, the least recently produced ones forgotten.

    Args:
        most: continuations kept per token.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        """One was produced."""
        known = self._after.setdefault(token, OrderedDict())
        known[continuation] = None
        known.move_to_end(continuation)
        if len(known) > self._most:
            known.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations known to follow, the latest first."""
        return list(reversed(self._after.get(token, ())))


class LookaheadDrafter(Drafter):
    """Lookahead decoding (paper #14, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding).

    `rows` are the guessed trajectories of the last rounds: row 0 has W - 1 tokens from the place after the root on,
    row r has W from r places after the root on; while the window fills there are fewer rows, and each is longer. The
    arg-maxes behind the last row, one a column, complete an n-gram per column and become the next row.
    """

    Params = LookaheadParams
    papers = (14,)
    kinds = frozenset({Candidates.FIXED})
    depth = 16
    nodes = 160
    changing = ("want",)
    params: LookaheadParams

    def __init__(self, params: LookaheadParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self.rows: list[list[int]] = []
        self.pool = NgramPool(self.params.guesses)
        self._fed: ExtraRows | None = None
        self._root = 0

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The pooled n-grams after the last token, and the window as extra rows; all of these are nodes of the room.

        Where the window has no place in it, the n-grams known so far are guessed, and none are made.
        """
        if not self.rows:
            self._begin(seq)
        self._root = seq.tokens[-1]
        spare = room.nodes - sum(map(len, self.rows))
        fits = spare >= 0
        guesses = DraftTree.merged(
            (guess[: room.depth] for guess in self.pool.after(self._root)), spare if fits else room.nodes, model.name
        )
        self._fed = window_rows(self.rows, len(guesses)) if fits else None
        self.want = ReadSpec(draw=None, top=1) if fits else NOTHING
        return replace(guesses, extra=self._fed)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Harvest an n-gram from every column, and move the window on; rounds of other drafters teach nothing."""
        fed, self._fed, self.want = self._fed, None, NOTHING  # the window alone is read
        if fed is None or draft.extra is not fed:
            return
        last = len(self.rows[-1])
        ends = verdict.rows[-last:] if len(self.rows) > 1 else [verdict.rows[0], *verdict.rows[-last:]]
        new = [row.top[0][0] for row in ends]
        if len(self.rows) == self.params.ngram - 1:
            for column, token in enumerate(new):
                key = self.rows[0][column - 1] if column else self._root
                self.pool.add(key, (*(row[column] for row in self.rows[1:]), token))
            self.rows = [*(self.rows[1:] or [new]), new][: len(self.rows)]
            self.rows[0] = self.rows[0][1:]
        else:
            self.rows = [row[1:] for row in [*self.rows, new]]

    def _begin(self, seq: Sequence) -> None:
        params = self.params
        prompt = seq.tokens[: seq.num_prompt_tokens]
        if params.prompt_ngrams:
            for start in range(len(prompt) - params.ngram + 1):
                gram = prompt[start : start + params.ngram]
                self.pool.add(gram[0], tuple(gram[1:]))
        draws = (
            uniform(noise_key(seq.seed, index, Purpose.DRAFT)) for index in range(params.window + params.ngram - 3)
        )
        self.rows = [[prompt[int(draw * len(prompt))] for draw in draws]]


def window_rows(rows: list[list[int]], num_nodes: int) -> ExtraRows:
    """The window as extra rows; see `window_layout`."""
    depths, mask = window_layout(tuple(map(len, rows)), num_nodes)
    return ExtraRows(tuple(token for row in rows for token in row), depths, mask)


@lru_cache(maxsize=256)
def window_layout(lengths: tuple[int, ...], num_nodes: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Depths of a window's entries, and what each sees: bool [entries, num_nodes + entries]; always the same tensor.

    Entry i of row 0 sees the entries of row 0 before it; entry i of row r sees the first i entries of row 0 and entry
    i of the rows from 1 to r - 1. Nothing sees a guess under verification, nor is seen by one.

    Args:
        lengths: entries of each row.
        num_nodes: guesses under verification, which come first.
    """
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    mask = torch.zeros(sum(lengths), num_nodes + sum(lengths), dtype=torch.bool)
    depths: list[int] = []
    for index, length in enumerate(lengths):
        for column in range(length):
            mine = mask[starts[index] + column, num_nodes:]
            mine[: column + 1 if index == 0 else column] = True
            for above in range(1, index + 1):
                mine[starts[above] + column] = True
            depths.append(column + max(index - 1, 0))
    return tuple(depths), mask


PART = LookaheadDrafter
