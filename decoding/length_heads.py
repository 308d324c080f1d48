"""Small trained networks that length policies ask whether drafting on is worth it."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import nn

from decoding.artifacts import Artifact
from decoding.model import Readout


class Head(nn.Module):
    """A network that is stored with the settings it is built from."""

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Return the network an artifact holds, the same one each time; its weights are the artifact's own."""
        head = artifact.networks.get(cls)
        if not isinstance(head, cls):
            with torch.device("meta"):
                head = cls(**artifact.settings["head"])
            head.load_state_dict(artifact.tensors, assign=True)
            artifact.networks[cls] = head.requires_grad_(False).eval()
        return head

    @property
    def settings(self) -> dict[str, Any]:
        """Settings to build it from."""
        raise NotImplementedError


class ContinueHead(Head):
    """Acceptance classifier of a drafted token, from its distribution and place in the draft (paper #73, DISCO).

    Args:
        top: how many of the largest probabilities it sees.
        hidden: width of its one hidden layer.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, top: int, hidden: int) -> None:
        super().__init__()
        self.top = top
        self.register_buffer("mean", torch.zeros(top + 2))
        self.register_buffer("spread", torch.ones(top + 2))
        self.first = nn.Linear(top + 2, hidden)
        self.last = nn.Linear(hidden, 1)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return {"top": self.top, "hidden": self.first.out_features}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """float32 [n, top + 2], see `features_of` -> logit of acceptance [n]."""
        logits: torch.Tensor = self.last(self.first((features - self.mean) / self.spread).relu())
        return logits.squeeze(-1)

    def probability(self, row: Readout, index: int) -> float:
        """Chance that the token drawn from a row, `index` tokens deep in the draft, is accepted."""
        features = torch.tensor([features_of(row, index, self.top)])
        return float(self(features).sigmoid())


def features_of(row: Readout, index: int, top: int) -> list[float]:
    """Return the features of a drafted token for `ContinueHead`.

    Args:
        row: the draft's reading the token was chosen from: raw entropy, and the most probable tokens.
        index: its depth in the draft, 1 for the first.
        top: how many of the largest probabilities.

    Returns:
        [top + 2]: these probabilities, falling, 0 where the vocabulary is smaller; entropy in bits; the index.

    Raises:
        ValueError: the drafter did not read what is needed.
    """
    if row.entropy_bits is None or not row.top:
        raise ValueError("the draft model must read entropy and the most probable tokens of every drafted token")
    probs = [math.exp(logprob) for _, logprob in row.top[:top]]
    return [*probs, *[0.0] * (top - len(probs)), row.entropy_bits, float(index)]


class AcceptanceHead(Head):
    """Acceptance of a drafted token from the draft's hidden state at it (paper #105, SpecDec++).

    Residual blocks x + SiLU(Wx + b), then two logits: rejected, accepted.

    Args:
        width: of the hidden states.
        depth: blocks.
        shared: whether all blocks are one and the same, as in the paper's code.
    """

    def __init__(self, width: int, depth: int = 3, shared: bool = False) -> None:
        super().__init__()
        self.depth = depth
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(1 if shared else depth))
        self.last = nn.Linear(width, 2)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return {"width": self.last.in_features, "depth": self.depth, "shared": len(self.blocks) != self.depth}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, width] -> logits [n, 2]: rejected, accepted."""
        for index in range(self.depth):
            hidden = hidden + nn.functional.silu(self.blocks[index % len(self.blocks)](hidden))
        logits: torch.Tensor = self.last(hidden)
        return logits

    def probability(self, hidden: torch.Tensor) -> float:
        """Chance that the token with hidden state [width], on any device, is accepted."""
        return float(self(hidden[None].to("cpu", torch.float32)).softmax(-1)[0, 1])
