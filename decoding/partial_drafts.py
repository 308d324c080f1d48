"""Drafts by a part of the target's own layers, token by token, in the cache of the whole."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Path
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decoding.drafters.base import Candidates
from decoding.lengths.base import Step
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.partial_forward import Exit, LayerSelection, Sketch
from decoding.sequence import Sequence

if TYPE_CHECKING:
    from decoding.model import Model

CHUNK = 128  # tokens that are run through some layers in one forward, where there are many


def draft_want(candidates: Candidates) -> ReadSpec:
    """Return the read specification of a draft's rows for `choose`."""
    drawn = candidates is Candidates.DRAWN
    return ReadSpec(draw=None if drawn else NoiseKind.SAMPLE, probs=drawn)


def choose(row: Readout, seq: Sequence, depth: int) -> int:
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
    model: Model,
    seq: Sequence,
    depth: LayerSelection,
    most: int,
    want: ReadSpec,
    continues: Callable[[Path[Step]], bool],
) -> list[Step]:
    """Draft a chain with some of a model's layers, which see the whole model's cache of the sequence.

    Args:
        model: whose layers.
        seq: of at least two tokens; shorter ones get no draft.
        depth: which layers; skipped ones leave the residual stream as it is.
        most: tokens at most.
        want: what to read, `draft_want` included.
        continues: asked below every token but one that ends the answer.
    """
    path: list[Step] = []
    tokens = [seq.tokens[-1]]
    while len(path) < most and len(seq) > 1:
        [row] = await model.partial_forward(seq, Sketch.chain(len(seq) - 1, tuple(tokens), len(path), depth), want)
        token = choose(row, seq, len(path))
        tokens.append(token)
        path.append(Step(token, row))
        if token in seq.end_ids or not continues(path):
            break
    return path


def chain_proposals(path: Path[Step]) -> list[torch.Tensor | None]:
    """Return the distribution that each token of a chain was drawn from."""
    return [step.row.probs for step in path]


@dataclass(frozen=True, slots=True)
class ExitDraft:
    """A chain drafted behind an early exit.

    Attributes:
        path: the drafted tokens.
        rows: what was read at the sequence's last token and at every drafted one.
    """

    path: list[Step]
    rows: list[Readout]


async def exit_chain(
    model: Model,
    seq: Sequence,
    layer: int,
    most: int,
    wants: tuple[ReadSpec, ReadSpec],
    continues: Callable[[Path[Step]], bool],
    exits: Callable[[int], Exit] | None = None,
) -> ExitDraft:
    """Draft a chain with a model's first layers, whose results verification takes over.

    The last token is run through the layers too: verification continues behind them for every token of the draft, and
    their outputs are known for every token that may be accepted.

    Args:
        model: whose layers.
        seq: of at least two tokens; shorter ones get no draft.
        layer: how many layers run.
        most: tokens at most.
        wants: what to read where a token follows, and at the last one.
        continues: asked below every token but one that ends the answer.
        exits: depth -> what stands between the layers and the head where the token of that depth, from 0, is drafted;
            None: the model's own norm.
    """
    path: list[Step] = []
    rows: list[Readout] = []
    if most < 1 or len(seq) < 2:
        return ExitDraft(path, rows)
    depth, base = LayerSelection(last=layer), len(seq) - 1
    tokens: tuple[int, ...] = (seq.tokens[-1],)
    while len(path) < most and (not path or (path[-1].token not in seq.end_ids and continues(path))):
        exit = exits(len(path)) if exits is not None else None
        [row] = await model.partial_forward(seq, Sketch.chain(base, tokens, len(path), depth, exit), wants[0])
        rows.append(row)
        path.append(Step(choose(row, seq, len(path)), row))
        tokens = (*tokens, path[-1].token)
    rows += await model.partial_forward(seq, Sketch.chain(base, tokens, len(path), depth), wants[1])
    return ExitDraft(path, rows)


async def exit_states(model: Model, seq: Sequence, layer: int, start: int, stop: int) -> torch.Tensor:
    """Return states behind a model's first layers at positions of a sequence that no operation read them at.

    The cache stays as it is; so does what lies behind it.

    Args:
        model: whose layers.
        seq: the sequence.
        layer: how many layers run.
        start: the first place.
        stop: one behind the last place, after `start`.

    Returns:
        float32 [stop - start, hidden], on the CPU.
    """
    want, rows = ReadSpec(draw=None, hidden=frozenset({layer})), []
    if start == 0:  # a sketch stands after at least one token
        first = Sequence(
            seq.tokens[:1],
            seq.sampling,
            seq.seed,
            sharing=seq.sharing,
            tenant=seq.tenant,
            low_priority=seq.low_priority,
        )
        first.owner = seq.owner
        try:
            rows += await model.extend(first, want=want)
        finally:
            charge_helper(seq, first, model)
            model.release(first)
    base = max(start, 1)
    tokens = tuple(seq.tokens[base:stop])
    twin = model.fork(seq)
    try:
        for place in range(0, len(tokens), CHUNK):
            sketch = Sketch.chain(base, tokens[: place + CHUNK], place, LayerSelection(last=layer))
            rows += await model.partial_forward(twin, sketch, want)
    finally:
        charge_helper(seq, twin, model)
        model.release(twin)
    return torch.stack([row.hidden[layer].to("cpu", torch.float32) for row in rows])


def charge_helper(seq: Sequence, helper: Sequence, model: Model) -> None:
    """Charge a helper's work to the sequence, as drafting.

    Args:
        seq: whose meters are charged.
        helper: what stood in for it, with meters of its own; about to be released.
        model: the one that computed.
    """
    mine, theirs = (each.meter.of(model.name, model.num_parameters) for each in (seq, helper))
    mine.forwards += theirs.forwards
    mine.draft_tokens += theirs.processed_tokens
    mine.spared_tokens += theirs.spared_tokens
