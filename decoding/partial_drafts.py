"""Drafts by a part of the target's own layers, token by token, in the cache of the whole."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Path
from typing import TYPE_CHECKING

import torch

from decoding.drafters.base import Candidates
from decoding.lengths.base import Step
from decoding.model import Draw, Row, Want
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.sequence import Sequence
from decoding.sketch import Depth, Sketch

if TYPE_CHECKING:
    from decoding.model import Model


def draft_want(candidates: Candidates) -> Want:
    """What a draft's rows must say for `choose`."""
    drawn = candidates is Candidates.DRAWN
    return Want(draw=None if drawn else Draw.SAMPLE, probs=drawn)


def choose(row: Row, seq: Sequence, depth: int) -> int:
    """The next token: drawn with noise of the draft's own, or the one the target's noise would choose.

    Args:
        row: read with `draft_want`.
        seq: what the draft continues.
        depth: of the token in the draft, from 0.
    """
    if row.probs is None:
        return row.token
    key = noise_key(round_seed(seq.seed, len(seq)), len(seq) + depth, Purpose.DRAFT)
    return int((row.probs.log() + gumbel([key], row.probs.numel(), row.probs.device)[0]).argmax())


async def partial_chain(
    model: Model, seq: Sequence, depth: Depth, most: int, want: Want, goes_on: Callable[[Path[Step]], bool]
) -> list[Step]:
    """A chain drafted by some of a model's layers, which see the whole model's cache of the sequence.

    Args:
        model: whose layers.
        seq: of at least two tokens; shorter ones get no draft.
        depth: which layers; skipped ones leave the residual stream as it is.
        most: tokens at most.
        want: what to read, `draft_want` included.
        goes_on: asked below every token.
    """
    path: list[Step] = []
    tokens = [seq.tokens[-1]]
    while len(path) < most and len(seq) > 1:
        [row] = await model.sketch(seq, Sketch.chain(len(seq) - 1, tuple(tokens), len(path), depth), want)
        token = choose(row, seq, len(path))
        tokens.append(token)
        path.append(Step(token, row))
        if not goes_on(path):
            break
    return path


def chain_proposals(path: Path[Step]) -> list[torch.Tensor | None]:
    """What each token of a chain was drawn from."""
    return [step.row.probs for step in path]
