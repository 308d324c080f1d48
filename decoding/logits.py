"""From raw logits to the distribution a token is drawn from, for many rows at once.

Order (the one in `SamplingParams`): logit bias, repetition, presence and frequency penalties, structure, banned
tokens, temperature, top-k, top-p, min-p; processors of the request's own come last in their stage. Temperature 0 is the
one-hot limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from functools import cache

import numpy as np
import torch

from decoding.best_tokens import best_tokens
from decoding.constraints.base import ALL, ANY, EIGHT, Mask
from decoding.processor_chain import apply, chain_of
from decoding.processors.base import NEG_INF
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.step_states import StepStates
from decoding.token_bans import ban

BITS_PER_NAT = 1.4426950408889634
LEAST_LOGPROB = -100.0


def entropy_bits(logp: torch.Tensor) -> torch.Tensor:
    """Entropy in bits of log-probabilities in nats: float32 [rows, vocab] -> [rows]. -inf counts as probability 0."""
    surprise = logp.clamp_min(LEAST_LOGPROB).neg_()
    return logp.exp().mul_(surprise).sum(-1) * BITS_PER_NAT  # `torch.special.entr` takes several times as long


def certainty(logp: torch.Tensor) -> torch.Tensor:
    """KL(uniform || p) in nats, of log-probabilities in nats: float32 [rows, vocab] -> [rows] (paper #215).

    A log-probability below `LEAST_LOGPROB` counts as that, so that one impossible token does not make it infinite.
    """
    return -logp.clamp_min(LEAST_LOGPROB).mean(-1) - math.log(logp.shape[-1])


def process(logits: torch.Tensor, rows: Rows[RowContext], states: StepStates | None = None) -> torch.Tensor:
    """Apply each row's sampling parameters.

    Args:
        logits: float32 [rows, vocab], raw; not modified.
        rows: whose row is whose.
        states: hidden states that processors read.

    Returns:
        float32 [rows, vocab]; softmax of it is the distribution to draw from, excluded tokens are -inf.
        Rows with temperature 0 keep only their arg-max.
    """
    logits = choice_scores(logits, rows, states)
    greedy = [row.seq.sampling.greedy for row in rows]
    if any(greedy):
        best = best_tokens(logits)[:, None]
        only = torch.full_like(logits, NEG_INF).scatter_(-1, best, 0.0)
        logits = torch.where(torch.tensor(greedy, device=logits.device)[:, None], only, logits)
    return logits


def choice_scores(logits: torch.Tensor, rows: Rows[RowContext], states: StepStates | None = None) -> torch.Tensor:
    """As `process`, but rows with temperature 0 keep all scores, of which the greatest is taken.

    What leaves the best token the best is not applied to those. Returns `logits` itself where no row asks for anything.
    """
    raw, chains = logits, [chain_of(row.seq) for row in rows]
    logits = apply(logits, raw, rows, [chain.before for chain in chains], states)
    logits = _allowed_only(logits, rows, is_own=logits is not raw)
    pairs = zip(rows, chains, strict=True)
    after = [chain.after_greedy if row.seq.sampling.greedy else chain.after for row, chain in pairs]
    return apply(logits, raw, rows, after, states)


def _allowed_only(logits: torch.Tensor, rows: Rows[RowContext], is_own: bool) -> torch.Tensor:
    """Exclude what structures and bans exclude; in place where the logits are `is_own`."""
    slots, masks = allowed_by_structure(rows)
    if slots:
        logits = keep_allowed(logits, slots, masks)
    banned = [i for i, row in enumerate(rows) if row.seq.sampling.bans_tokens]
    if banned and not is_own and not slots:
        logits = logits.clone()
    for i in banned:
        ban(logits[i], rows[i].seq, rows[i].path)
    return logits


def bound_rows(rows: Rows[RowContext]) -> dict[Sequence, list[int]]:
    """Places of the rows that a structure holds for, by whose they are."""
    found: dict[Sequence, list[int]] = {}
    for i, row in enumerate(rows):
        if row.seq.constraint is not None and not row.free:
            found.setdefault(row.seq, []).append(i)
    return found


def allowed_by_structure(rows: Rows[RowContext]) -> tuple[list[int], list[Mask]]:
    """Places of the rows that a structure restricts, and the mask of each; see `Constraint.masks`."""
    slots: list[int] = []
    masks: list[Mask] = []
    for seq, places in bound_rows(rows).items():
        assert seq.constraint is not None
        for i, mask in zip(places, seq.constraint.masks(seq.answer, [rows[i].path for i in places]), strict=True):
            if mask is not None and mask is not ANY:
                slots.append(i)
                masks.append(mask)
    return slots, masks


def keep_allowed(logits: torch.Tensor, slots: list[int], masks: list[Mask]) -> torch.Tensor:
    """Return a copy of logits with -inf for tokens that may not follow.

    Args:
        logits: float32 [rows, vocab], finite or -inf.
        slots: rows that are constrained.
        masks: for each of them; their lengths may differ, from each other and from vocab.
    """
    rows, vocab = logits.shape
    packed = np.full((rows, -(-vocab // EIGHT)), ALL, dtype=np.uint8)
    for slot, mask in zip(slots, masks, strict=True):
        kept = mask[: packed.shape[1]]
        packed[slot, : kept.size] = kept
        packed[slot, kept.size :] = 0
    # Added up from a table of eight numbers for every byte: comparing and choosing costs five times as much.
    places = torch.from_numpy(packed.reshape(-1)).to(logits.device).int()
    bias = _bias(logits.device).index_select(0, places).view(rows, -1)[:, :vocab]
    return bias.add_(logits)


@cache
def _bias(device: torch.device) -> torch.Tensor:
    """Return float32 [256, 8]: the bias of each of a byte's bits, 0 or -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, 0.0, -np.inf).astype(np.float32)).to(device)
