"""Small trained networks that say whether text is right, from hidden states of a model that has read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decoding.length_heads import Head
from decoding.model import Readout, ReadSpec

LAST = -1
LEAST_LOGPROB = -30.0
# What `step_features` reads at the root and after every token of a step.
STEP_WANT = ReadSpec(draw=None, entropy=True, unmasked=True, logits=True, hidden=frozenset({LAST}))


def step_features(rows: list[Readout], step: tuple[int, ...]) -> torch.Tensor:
    """Return the features that a reward is read from.

    The state after a step knows what was said, but hardly how it came about; how far its tokens were expected does.

    Args:
        rows: [len(step) + 1] what `STEP_WANT` read: before the first token of the step, and after each.
        step: its tokens.

    Returns:
        float32 [hidden + 3] on the CPU: the last hidden state after the step; the least and the mean log-probability of
        its tokens, nats; the highest entropy they were chosen at, bits. The last three are 0 where it has no tokens.
    """
    state = rows[-1].hidden[LAST].to("cpu", torch.float32)
    if not step:
        return torch.cat([state, torch.zeros(3)])
    logits = torch.stack([row.logits for row in rows[:-1] if row.logits is not None]).float()
    picked = torch.tensor(step, device=logits.device)
    logprobs = logits.log_softmax(-1).gather(1, picked[:, None])[:, 0].clamp_min(LEAST_LOGPROB).cpu()
    highest = max(row.entropy_bits or 0.0 for row in rows[:-1])
    return torch.cat([state, torch.stack([logprobs.min(), logprobs.mean(), torch.tensor(highest)])])


class StateHead(Head):
    """One number for a hidden state: standardised, then linear, or with one hidden layer between.

    Args:
        width: of the hidden states.
        hidden: width of the layer between; 0: none.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, width: int, hidden: int = 0) -> None:
        super().__init__()
        self._settings = {"width": width, "hidden": hidden}
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.first = nn.Linear(width, hidden) if hidden else None
        self.last = nn.Linear(hidden or width, 1)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return self._settings

    def standardise(self, states: torch.Tensor) -> None:
        """Take mean and spread from float32 [n, width]; dimensions that hardly vary are not blown up."""
        self.mean.copy_(states.mean(0))
        self.spread.copy_(states.std(0).clamp_min(1e-3))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [n, width] -> logits [n]."""
        states = (states - self.mean) / self.spread
        if self.first is not None:
            states = nn.functional.silu(self.first(states))
        logits: torch.Tensor = self.last(states)
        return logits.squeeze(-1)

    def probability(self, state: torch.Tensor) -> float:
        """For one state [width], on any device."""
        return float(self(state[None].to("cpu", torch.float32)).sigmoid())
