"""Draft heads on a model's last hidden state: the networks that trainers fit and drafters ask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoding.length_heads import Head


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b), which begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        return states + nn.functional.silu(self.linear(states))


def _blocks(width: int, count: int) -> nn.Sequential:
    """Blocks one after the other, each with weights of its own."""
    return nn.Sequential(*(ResidualBlock(width) for _ in range(count)))


class MedusaHeads(Head):
    """Independent heads, each with blocks of its own (paper #191, Medusa).

    The state that chose the pending token goes in. Out of head k, from 0, comes a state that an output matrix turns
    into logits of the token k + 1 places after the pending one: the model's own, shared and frozen, or one of each
    head, as in the paper. With blocks that are still the identity, and the model's matrix or copies of it, every head
    says what the model said.

    Args:
        width: of the hidden states.
        heads: how many places ahead.
        blocks: residual blocks of each head.
        vocab_size: tokens that the heads' own matrices tell apart; 0: they share the model's.

    Attributes:
        outputs: the matrix of each head; None where they share the model's.
    """

    def __init__(self, width: int, heads: int = 4, blocks: int = 1, vocab_size: int = 0) -> None:
        super().__init__()
        self._settings = {"width": width, "heads": heads, "blocks": blocks, "vocab_size": vocab_size}
        self.heads = nn.ModuleList(_blocks(width, blocks) for _ in range(heads))
        self.outputs: nn.ModuleList | None = None
        if vocab_size:
            self.outputs = nn.ModuleList(nn.Linear(width, vocab_size, bias=False) for _ in range(heads))

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return self._settings

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [..., width], after the last norm -> [..., heads, width], ready for the output matrix."""
        return torch.stack([head(states) for head in self.heads], -2)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [..., width], after the last norm -> [..., heads, vocab_size], by the heads' own matrices."""
        assert self.outputs is not None
        pairs = zip(self.heads, self.outputs, strict=True)
        return torch.stack([output(head(states)) for head, output in pairs], -2)


class RecurrentHead(Head):
    """Recurrent cell over drafted tokens, given a fixed hidden state (paper #115, ReDrafter).

    s_0 = 0; s_i = SiLU(W e(x_{i-1}) + U s_{i-1} + b), with x_0 the pending token and e the model's own embedding;
    logits of x_i come from [h; s_i] through residual blocks and a matrix.

    Args:
        width: of hidden states and embeddings.
        vocab_size: tokens it tells apart.
        blocks: residual blocks before the matrix.
    """

    def __init__(self, width: int, vocab_size: int, blocks: int = 1) -> None:
        super().__init__()
        self._settings = {"width": width, "vocab_size": vocab_size, "blocks": blocks}
        self.token = nn.Linear(width, width)
        self.recurrence = nn.Linear(width, width, bias=False)
        self.blocks = _blocks(2 * width, blocks)
        self.output = nn.Linear(2 * width, vocab_size, bias=False)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return self._settings

    def start(self, count: int) -> torch.Tensor:
        """The state before the pending token: float32 [count, width]."""
        return torch.zeros(count, self.recurrence.in_features)

    def advance(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """States after one more token each: states and embeddings [n, width] -> [n, width]."""
        return nn.functional.silu(self.token(embeddings) + self.recurrence(states))

    def logits(self, hidden: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Hidden states and recurrent states, both [..., width] -> logits of the next token [..., vocab_size]."""
        logits: torch.Tensor = self.output(self.blocks(torch.cat([hidden, states], -1)))
        return logits
