"""What a model answers to prompts, with what it knew at every token: the data that draft heads learn from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from decoding.model import Model, Readout, ReadSpec
from training.length_data import Source
from turnout.types import Sharing

FORMAT = "answers/2"
SHARD = 64  # prompts answered together, and kept in one file


@dataclass(frozen=True)
class Answers:
    """Answers, one after the other.

    Attributes:
        lengths: int64 [answers], tokens of each.
        tokens: int64 [n], all of them.
        states: float16 [n, hidden], after the last norm, out of which each token was chosen.
        top_ids: int64 [n, k], the most probable tokens there, best first; k may be 0.
        top_logprobs: float32 [n, k], their raw log-probabilities in nats.
        places: int64 [answers], how many states behind an exit layer each has: one for every token of prompt and
            answer but the last; empty where none were asked for.
        exits: float16 [sum of places, hidden], these states.
    """

    lengths: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    places: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    exits: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float16))

    @classmethod
    def joined(cls, parts: list[Answers]) -> Answers:
        """All of several."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def save(self, path: Path) -> None:
        """Replace a safetensors file in one rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file(vars(self), partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Answers:
        """Read what `save` wrote."""
        return cls(**load_file(path))


async def distil(
    model: Model,
    source: Source,
    top: int = 0,
    folder: Path | None = None,
    exit_layer: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Let a model answer prompts.

    Args:
        model: stays as it is.
        source: prompts, and how they are answered; the same source gives the same answers.
        top: how many of the most probable tokens are kept at each place.
        folder: where shards are kept: an interrupted run continues after the last, and what has been answered once, by
            this model and in this way, is not answered again. None: nowhere.
        exit_layer: the layer behind which states are kept as well; None: none.
        advance: called with (answered prompts, all prompts).
    """
    count = len(source.prompts)
    shards = []
    for start in range(0, count, SHARD):
        indices = range(start, min(start + SHARD, count))
        name = f"{source.shard_key(model, indices, format=FORMAT, top=top, exit_layer=exit_layer)}.safetensors"
        path = folder / name if folder is not None else None
        if path is not None and path.exists():
            shard = Answers.load(path)
        else:
            answering = (_answer(model, source, index, top, exit_layer) for index in indices)
            shard = Answers.joined(await asyncio.gather(*answering))
            if path is not None:
                shard.save(path)
        shards.append(shard)
        advance(indices.stop, count)
    return Answers.joined(shards)


async def _answer(model: Model, source: Source, index: int, top: int, exit_layer: int | None) -> Answers:
    """One answer, and then, in one forward, what the model reads along it."""
    seq, again = source.sequence(index), source.sequence(index)
    exits = frozenset({exit_layer} if exit_layer is not None else ())
    if exits:  # what is found in the cache cannot be read
        again.sharing = Sharing.private(f"states {index}")
    try:
        segment = await model.decode(seq)
        tokens = [token.id for token in segment.tokens]
        want = ReadSpec(draw=None, hidden=exits | {-1}, before=exits, top=top)
        rows = await model.extend(again, tuple(tokens[:-1]), want, every=True)
    finally:
        model.release(seq)
        model.release(again)
    best = [row.top[:top] for row in rows]
    k = min(map(len, best))
    return Answers(
        lengths=torch.tensor([len(tokens)]),
        tokens=torch.tensor(tokens),
        states=torch.stack([row.hidden[-1].to("cpu", torch.float16) for row in rows]),
        top_ids=torch.tensor([[token for token, _ in each[:k]] for each in best], dtype=torch.int64),
        top_logprobs=torch.tensor([[logprob for _, logprob in each[:k]] for each in best], dtype=torch.float32),
        **(_exits(rows, exit_layer) if exit_layer is not None else {}),
    )


def _exits(rows: list[Readout], layer: int) -> dict[str, torch.Tensor]:
    """The states behind a layer at all places of a prompt and its answer."""
    parts = [*rows[0].before.get(layer, ()), *(row.hidden[layer] for row in rows)]
    states = torch.stack([each.to("cpu", torch.float16) for each in parts])
    return {"places": torch.tensor([len(parts)]), "exits": states}
