"""From raw logits to the distribution a token is drawn from, for many rows at once.

Order (the one in `SamplingParams`): logit bias, repetition, presence and frequency penalties, structure, banned
tokens, temperature, top-k, top-p, min-p. Temperature 0 is the one-hot limit.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from decoding.constraints.base import ANY, Mask, keep_allowed
from decoding.sequence import Sequence
from decoding.token_bans import ban

NEG_INF = float("-inf")
BITS_PER_NAT = 1.4426950408889634
# Below it a temperature is as good as greedy, and float32 would soon hold neither it nor a logit divided by it.
LEAST_TEMPERATURE = 1e-6
SORTED = 64  # tokens of a row that are sorted at first, to find its nucleus


@dataclass(frozen=True, slots=True)
class RowContext:
    """Context of a row: the sequence, and the hypothetical tokens (a draft path) after its last one.

    Attributes:
        free: whether it only drafts: what the sequence is constrained to does not hold for it.
    """

    seq: Sequence
    path: tuple[int, ...] = ()
    free: bool = False

    @property
    def position(self) -> int:
        """Absolute position of the token this row chooses."""
        return len(self.seq) + len(self.path)


def entropy_bits(logp: torch.Tensor) -> torch.Tensor:
    """Entropy in bits of log-probabilities in nats: float32 [rows, vocab] -> [rows]. -inf counts as probability 0."""
    nats: torch.Tensor = torch.special.entr(logp.exp()).sum(-1)
    return nats * BITS_PER_NAT


def process(logits: torch.Tensor, rows: Rows[RowContext]) -> torch.Tensor:
    """Apply each row's sampling parameters.

    Args:
        logits: float32 [rows, vocab], raw; not modified.
        rows: whose row is whose.

    Returns:
        float32 [rows, vocab]; softmax of it is the distribution to draw from, excluded tokens are -inf.
        Rows with temperature 0 keep only their arg-max.
    """
    logits = penalise(logits, rows)
    params = [row.seq.sampling for row in rows]
    greedy = [p.greedy for p in params]
    if not all(greedy):
        temperatures = [1.0 if p.greedy else max(p.temperature, LEAST_TEMPERATURE) for p in params]
        temperature = torch.tensor(temperatures, device=logits.device)
        logits = logits / temperature[:, None]
        logits = _truncate(logits, rows)
    if any(greedy):
        best = logits.argmax(-1, keepdim=True)
        only = torch.full_like(logits, NEG_INF).scatter_(-1, best, 0.0)
        logits = torch.where(torch.tensor(greedy, device=logits.device)[:, None], only, logits)
    return logits


def penalise(logits: torch.Tensor, rows: Rows[RowContext]) -> torch.Tensor:
    """Logit bias, penalties, constraints and bans only; returns `logits` itself when no row asks for any."""
    touched = [i for i, row in enumerate(rows) if row.seq.sampling.logit_bias or row.seq.sampling.has_history]
    if touched:
        logits = logits.clone()
    for i in touched:
        _penalise_row(logits[i], rows[i])
    slots, masks = allowed_by_structure(rows)
    if slots:
        logits = keep_allowed(logits, slots, masks)
    banned = [i for i, row in enumerate(rows) if row.seq.sampling.bans_tokens]
    if banned and not touched and not slots:
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


def _penalise_row(row: torch.Tensor, history: RowContext) -> None:
    params, seq = history.seq.sampling, history.seq
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), device=row.device)
    if not params.has_history:
        return
    counts = dict(seq.output_counts)
    for token in history.path:
        counts[token] = counts.get(token, 0) + 1
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(seq.prompt_set | counts.keys()), device=row.device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if counts:
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * times


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Of each row the most probable tokens that together have so much probability; of equal ones, the first.

    Few are enough in most rows, so few are sorted at first. How many are depends on the batch, what is kept does not.

    Args:
        logits: [rows, vocab].
        top_p: [rows].
    """
    vocab = logits.shape[-1]
    whole = logits.logsumexp(-1, keepdim=True)
    size = min(SORTED, vocab)
    while True:
        values = logits.topk(size, dim=-1).values
        mass = (values - whole).exp()
        inside = mass.cumsum(-1) - mass < top_p[:, None]
        if size == vocab or not bool(inside[:, -1].any()):
            break
        size = min(4 * size, vocab)
    count = inside.sum(-1, keepdim=True).clamp(min=1)  # a top_p below what float32 holds is 0 here
    last = values.gather(-1, count - 1)
    dropped = logits < last
    equal = logits == last
    spare = vocab - dropped.sum(-1, keepdim=True) - count  # of those equal to the last, too many
    if bool((spare > 0).any()):
        dropped |= equal & (equal.cumsum(-1) > equal.sum(-1, keepdim=True) - spare)
    return logits.masked_fill(dropped, NEG_INF)


def _places(rows: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows, device=like.device)


def _truncate(logits: torch.Tensor, rows: Rows[RowContext]) -> torch.Tensor:
    params = [row.seq.sampling for row in rows]
    vocab = logits.shape[-1]
    if any(p.top_k for p in params):
        # Ties with the last kept candidate are kept, so that rows do not depend on how a batch is sorted.
        k = [min(p.top_k or vocab, vocab) for p in params]
        limited = [index for index, p in enumerate(params) if p.top_k]
        best = logits.topk(max(k[index] for index in limited), dim=-1).values
        last = torch.full((len(params),), NEG_INF, device=logits.device)
        last[limited] = best[limited, [k[index] - 1 for index in limited]]
        logits = logits.masked_fill(logits < last[:, None], NEG_INF)
    limited = [index for index, p in enumerate(params) if p.top_p < 1.0]
    if limited:
        nucleus = torch.tensor([params[index].top_p for index in limited], device=logits.device)
        kept = _nucleus(logits if len(limited) == len(params) else logits[limited], nucleus)
        logits = kept if len(limited) == len(params) else logits.index_copy(0, _places(limited, logits), kept)
    if any(p.min_p for p in params):
        floor = torch.tensor([p.min_p for p in params], device=logits.device).log()
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], NEG_INF)
    return logits
