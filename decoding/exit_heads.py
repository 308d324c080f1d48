"""Exit heads between an early exit and a model's output matrix: a trained layer with keys and values of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decoding.length_heads import Head


class ExitCache:
    """Keys and values of an exit head at the places of one sequence, in a row.

    Args:
        kv_heads: of the head.
        head_dim: of the head.
        start: the first place.
    """

    def __init__(self, kv_heads: int, head_dim: int, start: int) -> None:
        self.start = self.end = start
        self._held = torch.empty(2, kv_heads, 64, head_dim)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of the next n places, [kv_heads, n, head_dim] each; all there are, as views."""
        used = self.end - self.start
        count = used + keys.shape[1]
        if count > self._held.shape[2]:
            grown = self._held.new_empty(*self._held.shape[:2], 2 * count, self._held.shape[3])
            grown[:, :, :used] = self._held[:, :, :used]
            self._held = grown
        self._held[0, :, used:count], self._held[1, :, used:count] = keys, values
        self.end = self.start + count
        return self._held[0, :, :count], self._held[1, :, :count]

    def truncate(self, end: int) -> None:
        """Forget the places from `end` on."""
        self.end = max(self.start, min(self.end, end))


class ExitHead(Head):
    """One layer on the states behind an early exit, and a last norm; the model's own output matrix follows.

    RMSNorm, causal attention with rotary positions, residual; then, where it has an MLP, RMSNorm, gated MLP,
    residual: a decoder layer (paper #33, EESD). Without the MLP it is the adapter of paper #157, Kangaroo. What the
    sub-layers add begins at zero, so that an untrained head says what the model's head says at the exit.

    Args:
        width: of the states.
        heads: of the attention.
        kv_heads: heads of keys and values; divides `heads`.
        head_dim: of each, even.
        inner: width of the MLP; 0: none.
        theta: base of the rotary positions.
        epsilon: of the norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inner: int = 0,
        theta: float = 10_000.0,
        epsilon: float = 1e-6,
    ) -> None:
        super().__init__()
        shape = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "inner": inner}
        self._settings: dict[str, Any] = {**shape, "theta": theta, "epsilon": epsilon}
        self.kv_heads, self.head_dim, self._theta = kv_heads, head_dim, theta
        self._angles = torch.zeros(0, 2, 1, head_dim)
        self.before_attention = nn.RMSNorm(width, epsilon)
        # Queries, keys and values, in this order.
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.attended = nn.Linear(heads * head_dim, width, bias=False)
        nn.init.zeros_(self.attended.weight)
        if inner:
            self.before_mlp = nn.RMSNorm(width, epsilon)
            self.gate = nn.Linear(width, inner, bias=False)
            self.up = nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)
            nn.init.zeros_(self.down.weight)
        self.norm = nn.RMSNorm(width, epsilon)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return self._settings

    def cache(self, start: int) -> ExitCache:
        """An empty cache that begins at a place."""
        return ExitCache(self.kv_heads, self.head_dim, start)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Whole sequences from place 0: float32 [b, n, width] -> ready for the output matrix [b, n, width]."""
        queries, keys, values = (each.transpose(1, 2) for each in self._project(states, 0))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self._finish(states, mixed.transpose(1, 2))

    @torch.no_grad()
    def extend(self, states: torch.Tensor, cache: ExitCache) -> torch.Tensor:
        """The next places of one sequence: float32 [n, width] -> [n, width]; their keys and values are kept."""
        place = cache.end
        queries, keys, values = (each.transpose(0, 1) for each in self._project(states, place))
        seen, known = cache.append(keys, values)
        # [kv_heads, heads of each, n, head_dim]
        groups = queries.reshape(self.kv_heads, -1, len(states), self.head_dim)
        scores = groups @ seen[:, None].transpose(-1, -2) * self.head_dim**-0.5
        if len(states) > 1:
            later = torch.arange(cache.start, cache.end) > torch.arange(place, cache.end)[:, None]
            scores.masked_fill_(later, float("-inf"))
        mixed = (scores.softmax(-1) @ known[:, None]).flatten(0, 1)
        return self._finish(states, mixed.transpose(0, 1))

    def _project(self, states: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., n, width] from a place on -> queries, keys, values [..., n, heads, head_dim]."""
        end = place + states.shape[-2]
        if end > len(self._angles):
            self._angles = self._turns(max(2 * end, 256))
        cos, sin = self._angles[place:end].unbind(1)
        qkv = self.qkv(self.before_attention(states)).unflatten(-1, (-1, self.head_dim))
        turning, values = qkv.split([qkv.shape[-2] - self.kv_heads, self.kv_heads], -2)
        turned = turning * cos + turning.roll(self.head_dim // 2, -1) * sin
        queries, keys = turned.split([turned.shape[-2] - self.kv_heads, self.kv_heads], -2)
        return queries, keys, values

    def _turns(self, count: int) -> torch.Tensor:
        """cos and signed sin of the first places' angles: [count, 2, 1, head_dim]."""
        rates = self._theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(count)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)[:, :, None]

    def _finish(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """States and what attention mixed [..., n, heads, head_dim] -> what goes into the output matrix."""
        states = states + self.attended(mixed.flatten(-2))
        if self._settings["inner"]:
            normed = self.before_mlp(states)
            states = states + self.down(F.silu(self.gate(normed)) * self.up(normed))
        result: torch.Tensor = self.norm(states)
        return result
