"""From logits to rows: the one place where tokens are drawn and distributions measured, for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from decoding.best_tokens import best_tokens
from decoding.constraints.base import is_forced
from decoding.lazy_constraints import exclude_refused, lazy_rows, unbound
from decoding.logits import (
    BITS_PER_NAT,
    allowed_by_structure,
    certainty,
    choice_scores,
    entropy_bits,
    keep_allowed,
    process,
)
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.processors.base import NEG_INF
from decoding.row_context import RowContext
from decoding.step_states import StepStates

PAIRED = ("top", "top_processed", "processed_of")  # fields of ids with their log-probabilities


def read(
    logits: torch.Tensor, histories: list[RowContext], wants: list[ReadSpec], states: StepStates | None = None
) -> list[Readout]:
    """Read what each row asks for, and nothing else; small results reach the host in one copy.

    The arg-max of processed logits plus noise keyed by (seed, position, purpose), or also by round (see `NoiseKind`),
    is the drawn token, so a row's outcome does not depend on the batch it is in. Log-probabilities and top are of the
    raw logits, but for those that are said to be processed; the entropy is too, but where a structure holds it is that
    of the tokens it allows (see `ReadSpec.entropy`).

    Args:
        logits: float32 [rows, vocab], raw; not modified.
        histories: whose row is whose.
        wants: what to read; `hidden` is not looked at, hidden states are filled in by the caller, which holds them.
        states: hidden states that processors read.

    Returns:
        One `Readout` per row. `logits` and `probs` stay on their device; `Readout.logits` is a view of `logits`, or of
        a copy where some rows are read over a part of the vocabulary.
    """
    if any(want.among is not None for want in wants):
        logits = _cut_down(logits, wants)
        histories = [
            each if want.among is None else replace(each, free=True)
            for each, want in zip(histories, wants, strict=True)
        ]
    rows = [Readout() for _ in wants]
    host = _HostCopy()
    greedy: list[int] = []
    sampled: list[int] = []
    for index, want in enumerate(wants):
        if want.chooses:
            (greedy if histories[index].seq.sampling.greedy else sampled).append(index)
        if want.logits:
            rows[index].logits = logits[index]
    tokens: list[tuple[list[int], torch.Tensor]] = []
    if greedy:
        tokens.append((greedy, _take_best(logits, greedy, histories, wants, rows, host, states)))
    if sampled:
        tokens.append((sampled, _sample(logits, sampled, histories, wants, rows, host, states)))
    measured = [index for index, want in enumerate(wants) if want.measures]
    if measured:
        _measure(logits, measured, histories, wants, tokens, rows, host)
    host.deliver(rows)
    for row, want in zip(rows, wants, strict=True):
        if len(row.top) > want.top:
            row.top = row.top[: want.top]
        if want.weighs:
            row.top_processed = row.top_processed[: want.top_processed]
            row.processed_of = row.processed_of[: len(want.processed_of)]
    return rows


@dataclass(slots=True)
class _HostCopy:
    """Collects small results of all rows, to be copied from the device together."""

    where: list[tuple[str, list[int]]] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)

    def add(self, name: str, rows: list[int], values: torch.Tensor) -> None:
        """Put values[i] ([n], [n, 1]; of `PAIRED`, [n, 2k]: values and ids) into field `name` of row rows[i]."""
        self.where.append((name, rows))
        self.parts.append(values)

    def deliver(self, rows: list[Readout]) -> None:
        if not self.parts:
            return
        # float64 holds token ids and float32 numbers exactly.
        flat = torch.cat([part.reshape(-1).to(torch.float64) for part in self.parts]).tolist()
        offset = 0
        for (name, where), part in zip(self.where, self.parts, strict=True):
            values = flat[offset : offset + part.numel()]
            offset += part.numel()
            if name == "token":
                for index, value in zip(where, values, strict=True):
                    rows[index].token = int(value)
            elif name in PAIRED:
                width = part.shape[1] // 2
                for slot, index in enumerate(where):
                    start = slot * 2 * width
                    ids = map(int, values[start + width : start + 2 * width])
                    setattr(rows[index], name, tuple(zip(ids, values[start : start + width], strict=True)))
            else:
                for index, value in zip(where, values, strict=True):
                    setattr(rows[index], name, value)


def _cut_down(logits: torch.Tensor, wants: list[ReadSpec]) -> torch.Tensor:
    """A copy in which ids that a row is not to be read over are impossible."""
    cut = logits.clone()
    for among in dict.fromkeys(want.among for want in wants):
        if among is not None:
            rows = torch.tensor([row for row, want in enumerate(wants) if want.among is among], device=logits.device)
            ids = among.ids.to(logits.device)
            cut[rows] = NEG_INF
            cut[rows[:, None], ids] = logits[rows[:, None], ids]
    return cut


def _measure_entropy(
    logp: torch.Tensor,
    where: list[int],
    histories: list[RowContext],
    wants: list[ReadSpec],
    rows: list[Readout],
    host: _HostCopy,
) -> None:
    """Entropy of rows logp, float32 [len(where), vocab]: over the tokens a structure allows, where one holds."""
    bound: list[int] = []
    masks = []
    for slot, mask in zip(*allowed_by_structure([histories[index] for index in where]), strict=True):
        rows[where[slot]].forced = is_forced(mask, logp.shape[1], histories[where[slot]].seq.end_ids)
        if not wants[where[slot]].unmasked:
            bound.append(slot)
            masks.append(mask)
    if bound:
        allowed = keep_allowed(_pick(logp, bound), list(range(len(bound))), masks)
        together = allowed.logsumexp(-1)
        host.add("allowed_logprob", [where[slot] for slot in bound], together)
        logp = logp.index_copy(0, torch.tensor(bound, device=logp.device), allowed - together[:, None])
    host.add("entropy_bits", where, entropy_bits(logp))


def _pick(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _picked(states: StepStates | None, rows: list[int], wants: list[ReadSpec]) -> StepStates | None:
    return states if states is None or len(rows) == len(wants) else states.picked(rows)


def _take_best(
    logits: torch.Tensor,
    where: list[int],
    histories: list[RowContext],
    wants: list[ReadSpec],
    rows: list[Readout],
    host: _HostCopy,
    states: StepStates | None,
) -> torch.Tensor:
    """Greedy rows: the most probable token. Returns int64 [len(where)]."""
    asked = [histories[i] for i in where]
    lazy = lazy_rows(asked, [wants[i] for i in where])
    scores = exclude_refused(
        choice_scores(_pick(logits, where), unbound(asked, lazy), _picked(states, where, wants)), lazy
    )
    best = best_tokens(scores)
    _report(where, wants, scores, best, host)
    _weigh(where, wants, scores, host)
    sharp = [slot for slot, index in enumerate(where) if wants[index].probs]
    if sharp:
        hot = torch.zeros((len(sharp), logits.shape[1]), dtype=torch.float32, device=logits.device)
        hot.scatter_(1, _pick(best, sharp)[:, None], 1.0)
        for probs, slot in zip(hot, sharp, strict=True):
            rows[where[slot]].probs = probs
    return best


def _sample(
    logits: torch.Tensor,
    where: list[int],
    histories: list[RowContext],
    wants: list[ReadSpec],
    rows: list[Readout],
    host: _HostCopy,
    states: StepStates | None,
) -> torch.Tensor:
    """Rows with a temperature: keyed Gumbel-max. Returns int64 [len(where)], -1 where no token was wanted."""
    asked = [histories[i] for i in where]
    lazy = lazy_rows(asked, [wants[i] for i in where])
    processed = process(_pick(logits, where), unbound(asked, lazy), _picked(states, where, wants))
    _weigh(where, wants, processed, host)
    soft = [slot for slot, index in enumerate(where) if wants[index].probs]
    if soft:
        for probs, slot in zip(_pick(processed, soft).softmax(-1), soft, strict=True):
            rows[where[slot]].probs = probs
    drawn = [slot for slot, index in enumerate(where) if wants[index].draw is not None]
    if not drawn:
        return torch.full((len(where),), -1, dtype=torch.int64, device=logits.device)
    keys: list[int] = []
    for slot in drawn:
        history, draw = histories[where[slot]], wants[where[slot]].draw
        assert draw is not None
        keys.append(_key(history, draw))
    scores = _pick(processed, drawn) + _noise(keys, logits)
    scores = exclude_refused(scores, {place: lazy[slot] for place, slot in enumerate(drawn) if slot in lazy})
    chosen = best_tokens(scores)
    _report([where[slot] for slot in drawn], wants, scores, chosen, host)
    noted = [place for place, slot in enumerate(drawn) if wants[where[slot]].surprise]
    if noted:
        law = _pick(processed, [drawn[place] for place in noted]).log_softmax(-1)
        named = law.gather(1, _pick(chosen, noted)[:, None])[:, 0]
        host.add("surprise_bits", [where[drawn[place]] for place in noted], -named * BITS_PER_NAT)
    if len(drawn) == len(where):
        return chosen
    tokens = torch.full((len(where),), -1, dtype=torch.int64, device=logits.device)
    tokens[drawn] = chosen
    return tokens


def _noise(keys: list[int], like: torch.Tensor) -> torch.Tensor:
    """[len(keys), vocab]; rows of one key, as the nodes of a tree at one depth have, are made once."""
    first = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    noise = gumbel(list(first), like.shape[1], like.device)
    if len(first) == len(keys):
        return noise
    return noise[torch.tensor([first[key] for key in keys], device=like.device)]


def _key(history: RowContext, draw: NoiseKind) -> int:
    seq = history.seq
    seed = round_seed(seq.seed, len(seq)) if draw is NoiseKind.ROUND else seq.seed
    return noise_key(seed, history.position, Purpose.SAMPLE if draw is NoiseKind.SAMPLE else Purpose.DRAFT)


def _report(
    where: list[int], wants: list[ReadSpec], scores: torch.Tensor, chosen: torch.Tensor, host: _HostCopy
) -> None:
    """Send tokens to the host, and margins where they are wanted."""
    drawn = [slot for slot, index in enumerate(where) if wants[index].draw is not None]
    if drawn:
        host.add("token", [where[slot] for slot in drawn], _pick(chosen, drawn))
    close = [slot for slot in drawn if wants[where[slot]].margin]
    if close:
        best = _pick(scores, close).topk(2, dim=-1).values
        host.add("margin", [where[slot] for slot in close], best[:, 0] - best[:, 1])


def _weigh(where: list[int], wants: list[ReadSpec], scores: torch.Tensor, host: _HostCopy) -> None:
    """Log-probabilities of the processed distribution: the greatest ones, and those of given ids."""
    slots = [slot for slot, index in enumerate(where) if wants[index].weighs]
    if not slots:
        return
    logp, rows = torch.log_softmax(_pick(scores, slots), dim=-1), [where[slot] for slot in slots]
    if most := max(wants[index].top_processed for index in rows):
        top = logp.topk(min(most, logp.shape[1]), dim=-1)
        host.add("top_processed", rows, torch.cat([top.values.double(), top.indices.double()], 1))
    if longest := max(len(wants[index].processed_of) for index in rows):
        padded = [[*wants[index].processed_of, *[0] * (longest - len(wants[index].processed_of))] for index in rows]
        ids = torch.tensor(padded, device=logp.device)
        host.add("processed_of", rows, torch.cat([logp.gather(1, ids).double(), ids.double()], 1))


def _measure(
    logits: torch.Tensor,
    where: list[int],
    histories: list[RowContext],
    wants: list[ReadSpec],
    tokens: list[tuple[list[int], torch.Tensor]],
    rows: list[Readout],
    host: _HostCopy,
) -> None:
    """Entropy in bits of what may follow; log-probability of the chosen token, top and certainty of the raw logits."""
    logp = torch.log_softmax(_pick(logits, where), dim=-1)
    mixed = [slot for slot, index in enumerate(where) if wants[index].entropy]
    if mixed:
        _measure_entropy(_pick(logp, mixed), [where[slot] for slot in mixed], histories, wants, rows, host)
    ranked = [slot for slot, index in enumerate(where) if wants[index].top]
    if ranked:
        top = _pick(logp, ranked).topk(min(max(want.top for want in wants), logits.shape[1]), dim=-1)
        host.add("top", [where[slot] for slot in ranked], torch.cat([top.values.double(), top.indices.double()], 1))
    sure = [slot for slot, index in enumerate(where) if wants[index].certainty]
    if sure:
        host.add("certainty", [where[slot] for slot in sure], certainty(_pick(logp, sure)))
    slot_of = {index: slot for slot, index in enumerate(where)}
    for group, chosen in tokens:
        asked = [slot for slot, index in enumerate(group) if wants[index].logprob and wants[index].draw is not None]
        if asked:
            named = [group[slot] for slot in asked]
            theirs = _pick(logp, [slot_of[index] for index in named])
            host.add("logprob", named, theirs.gather(1, _pick(chosen, asked)[:, None]))
