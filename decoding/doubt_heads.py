"""Heads that read doubt from hidden states: a linear probe, and a discrete key-value bottleneck."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import nn
from torch.nn.functional import one_hot

from decoding.length_heads import Head
from decoding.model import Model, ReadSpec
from decoding.sequence import Sequence

EMA_DECAY = 0.9


async def prompt_state(model: Model, seq: Sequence, layers: Items[int]) -> torch.Tensor:
    """Read the last token of a sequence: float32 [layers x hidden] on the CPU, in the order of the layers."""
    [row] = await model.extend(seq, want=ReadSpec(draw=None, hidden=frozenset(layers)))
    return torch.cat([row.hidden[layer].float().cpu() for layer in layers])


async def answer_state(model: Model, seq: Sequence, answer: tuple[int, ...], layers: Items[int]) -> torch.Tensor:
    """Read the second-to-last token of an answer to a sequence, or the prompt's last; as `prompt_state`."""
    [row] = await model.extend(seq, answer[:-1], ReadSpec(draw=None, hidden=frozenset(layers)))
    return torch.cat([row.hidden[layer].float().cpu() for layer in layers])


class BottleneckHead(Head):
    """Discrete key-value bottleneck (paper #72): quantised projections of a frozen state fetch trainable values.

    Each of `codebooks` codebooks projects the state by a fixed random matrix to `key_size` numbers, finds the nearest
    of its `keys` keys, and fetches that key's value. The mean of the values, through a softmax, is the law over the
    classes. Keys are placed by `place_keys` on states without labels, then frozen; only fetched values learn.

    Args:
        width: of the states.
        classes: how many.
        codebooks: how many.
        keys: of each codebook.
        key_size: numbers of a key.
        seed: of the projections.
    """

    mean: torch.Tensor
    spread: torch.Tensor
    projections: torch.Tensor
    keys: torch.Tensor

    def __init__(
        self, width: int, classes: int = 2, codebooks: int = 64, keys: int = 64, key_size: int = 8, seed: int = 0
    ) -> None:
        super().__init__()
        self._settings = {"width": width, "classes": classes, "codebooks": codebooks}
        self._settings |= {"keys": keys, "key_size": key_size, "seed": seed}
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.register_buffer("projections", torch.zeros(codebooks, width, key_size))
        self.register_buffer("keys", torch.zeros(codebooks, keys, key_size))
        self.values = nn.Parameter(torch.zeros(codebooks, keys, classes))

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return self._settings

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [n, width] -> [n, codebooks, key_size]."""
        return torch.einsum("nw,cwk->nck", (states - self.mean) / self.spread, self.projections)

    def codes(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [n, width] -> the nearest key of each codebook, int64 [n, codebooks]."""
        projected = self.project(states).transpose(0, 1)
        return torch.cdist(projected, self.keys).argmin(-1).T

    def place_keys(self, states: torch.Tensor, passes: int = 20) -> None:
        """Draw the projections, and place the keys on unlabelled states by exponential moving averages.

        Keys begin at states drawn at random. A key that no state fetches in a pass is put onto a random state.

        Args:
            states: float32 [n, width].
            passes: over all of them.
        """
        generator = torch.Generator().manual_seed(int(self._settings["seed"]))
        self.mean.copy_(states.mean(0))
        self.spread.copy_(states.std(0).clamp_min(1e-3))
        scale = self.projections.shape[1] ** -0.5
        self.projections.copy_(torch.randn(self.projections.shape, generator=generator) * scale)
        projected = self.project(states).transpose(0, 1)  # [codebooks, n, key_size]
        count, keys = len(states), self.keys.shape[1]
        for book, found in zip(self.keys, projected, strict=True):
            start = torch.randperm(count, generator=generator)[:keys].repeat(-(-keys // count))[:keys]
            book.copy_(found[start])
        for _ in range(passes):
            codes = torch.cdist(projected, self.keys).argmin(-1)
            used = torch.zeros(self.keys.shape[:2]).scatter_add_(1, codes, torch.ones(codes.shape))
            at = codes[..., None].expand_as(projected)
            means = torch.zeros_like(self.keys).scatter_add_(1, at, projected) / used.clamp_min(1.0)[..., None]
            moved = EMA_DECAY * self.keys + (1.0 - EMA_DECAY) * means
            spare = projected[:, torch.randint(count, (keys,), generator=generator)]
            self.keys.copy_(torch.where(used[..., None] > 0, moved, spare))

    def usage(self, states: torch.Tensor) -> float:
        """Perplexity of the histogram of fetched keys, as a share of the keys, averaged over the codebooks."""
        counts = one_hot(self.codes(states), self.keys.shape[1]).float().mean(0)
        return float(torch.special.entr(counts).sum(-1).exp().mean() / self.keys.shape[1])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [n, width] -> logits [n, classes]; only the fetched values get a gradient."""
        codes = self.codes(states)
        books = torch.arange(codes.shape[1], device=codes.device)
        fetched: torch.Tensor = self.values[books, codes]  # [n, codebooks, classes]
        return fetched.mean(1)

    def learn(self, states: torch.Tensor, labels: torch.Tensor, rate: float = 1.0) -> float:
        """Take one step of gradient descent on labelled states as they come, int64 [n]; returns the loss, nats."""
        self.values.requires_grad_(True)
        loss = nn.functional.cross_entropy(self(states), labels)
        [gradient] = torch.autograd.grad(loss, [self.values])
        with torch.no_grad():
            # A value is a `codebooks`-th part of the logit: without the factor steps would shrink with their number.
            self.values.sub_(rate * self.values.shape[0] * gradient)
        return float(loss.detach())

    def probability(self, state: torch.Tensor) -> float:
        """Probability of the last class, for one state [width]."""
        return float(self(state[None].to("cpu", torch.float32)).detach().softmax(-1)[0, -1])
