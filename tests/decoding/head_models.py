"""A target with hidden states for tests of draft heads, and heads made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.fakes import TableModel, markov, pair
from decoding.heads import MedusaHeads, RecurrentHead
from decoding.length_heads import Head
from decoding.model import ModelPool, Readout, ReadSpec, Request
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.types import SamplingParams


class StateModel(TableModel):
    """Its logits are its state times 8: the state at a place is one-hot in the token that follows `after` there."""

    def __init__(self, name: str, after: list[int]) -> None:
        size = len(after)
        self.one_hot = torch.eye(size)
        super().__init__(name, lambda tokens: 8.0 * self.one_hot[after[tokens[-1]]], size, 10)

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                row.hidden[-1] = self.next_logits(seq.tokens + list(path)) / 8.0
        return rows

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: list[tuple[int, ...]], want: ReadSpec, normed: bool = False
    ) -> list[Readout]:
        assert normed
        return read(8.0 * states, [RowContext(seq, path) for path in paths], [want] * len(paths))

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return self.one_hot[tokens]


class LawModel(StateModel):
    """Draws each token from a table, by the one before; its state is an eighth of the log-probabilities there."""

    def __init__(self, name: str, probs: torch.Tensor) -> None:
        super().__init__(name, [0] * len(probs))
        self.next_logits = markov(probs)


def shifting_heads(after: list[int], heads: int, first: int = 1) -> MedusaHeads:
    """Heads that know the model: head k applies `after` to what the state says `first` + k times."""
    size = len(after)
    step = torch.zeros(size, size)
    step[after, range(size)] = 1.0
    made = MedusaHeads(size, heads)
    for index, head in enumerate(made.heads):
        head[0].linear.weight.data = 10.0 * torch.linalg.matrix_power(step, first + index)
    return made.requires_grad_(False)


def following_head(after: list[int]) -> RecurrentHead:
    """A recurrent head that knows the model: its state says which token follows the last one."""
    size = len(after)
    made = RecurrentHead(size, size)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    made.token.weight.data[after, range(size)] = 10.0
    made.output.weight.data[:, size:] = torch.eye(size)
    return made.requires_grad_(False)


def knowing_head(probs: torch.Tensor) -> RecurrentHead:
    """A recurrent head that knows a `LawModel`: its state says which token was the last, its matrix is the table."""
    size = len(probs)
    made = RecurrentHead(size, size)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    made.token.weight.data = 10.0 * torch.eye(size)
    made.output.weight.data[:, size:] = probs.log().T / 10.0
    return made.requires_grad_(False)


def save_head(folder: Path, kind: str, head: Head, digest: str, **settings: Any) -> Artifact:
    """An artifact as trainers make them."""
    tensors = {name: each.half() for name, each in head.state_dict().items()}
    artifact = Artifact(kind, "test", {"head": head.settings, **settings}, {"large": digest}, tensors)
    artifact.save(folder / f"{kind}.safetensors")
    return artifact


def pool_of(large: Any, folder: Path) -> ModelPool:
    """The model alone in both roles, with the folder's artifacts."""
    return replace(pair(large, large), artifacts=Artifacts(folder))


async def answer(
    models: ModelPool, method: str, params: dict[str, Any], prompt: list[int], seed: int = 0, **sampling: Any
) -> Sequence:
    """The finished sequence of one request."""
    info = get_method(method)
    seq = Sequence(prompt, SamplingParams(**{"max_tokens": 24, **sampling}), seed)
    async for _ in info.run(Request("r", seq), models, info.parse(params)):
        pass
    models.large.release(seq)
    return seq
