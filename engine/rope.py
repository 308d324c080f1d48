"""Rotary embeddings whose frequencies depend on the length of a sequence: LongRoPE and dynamic NTK scaling.

Hugging Face takes them by the longest position of a batch, so that one request would change another's, and a growing
answer its own past. Here they are fixed for each sequence, by the greatest length that it can reach, and its cached
blocks are found only by sequences with the same (`BlockPool.rope_length`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
MOST_KEPT = 256  # lengths whose frequencies are kept


def rope_variants(rope: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of every kind of layer, from `rope_parameters` of a configuration."""
    rope = rope or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]


def depends_on_length(config: Any) -> bool:
    """Whether the frequencies of a configuration depend on the length of a sequence."""
    rope = getattr(config, "rope_parameters", None)
    return any(variant.get("rope_type") in LENGTH_DEPENDENT for variant in rope_variants(rope))


def unfit_rope(config: Any) -> str | None:
    """Say why length-dependent frequencies of a configuration cannot be had; None: they can, or there are none."""
    rope = getattr(config, "rope_parameters", None) or {}
    if depends_on_length(config) and "rope_type" not in rope:
        kinds = ", ".join(sorted({str(variant.get("rope_type")) for variant in rope_variants(rope)}))
        return f"rotary scaling by kind of layer ({kinds}) is not supported"
    return None


def context_length(config: Any) -> int:
    """Tokens that the positions of a configuration allow; dynamic scaling multiplies what it was trained with."""
    length: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    return int(length * (rope.get("factor") or 1.0)) if rope.get("rope_type") == "dynamic" else length


class LengthRotary(nn.Module):
    """A model's rotary embedding, with the frequencies of a given length for each row.

    Args:
        rotary: the model's module, which computes angles from `inv_freq`; taken over.
        config: the model's configuration; `depends_on_length`.

    Attributes:
        trained: the length up to which its frequencies are the usual ones.
    """

    def __init__(self, rotary: Any, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        self._rotary, self._config = rotary, config
        self._kind: str = rope["rope_type"]
        self.trained: int = config.max_position_embeddings
        if self._kind == "longrope":
            self.trained = rope["original_max_position_embeddings"]
        self._kept = OrderedDict[int, torch.Tensor]()
        self._usual: torch.Tensor = rotary.original_inv_freq
        rotary.rope_type = "default"  # its own update, by the longest position of a batch, is off

    def length_of(self, longest: int) -> int:
        """The length whose frequencies a sequence gets that can reach `longest` tokens; 0: the usual ones."""
        if longest <= self.trained:
            return 0
        return longest if self._kind == "dynamic" else self.trained + 1

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, lengths: npt.NDArray[np.int64] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Compute what the model's module does, cos and sin [1, T, rotated].

        Args:
            hidden: gives dtype and device.
            positions: int64 [1, T].
            lengths: [T] of `length_of`; None: all 0.
        """
        found = [0] if lengths is None else np.unique(lengths).tolist()
        if lengths is None or len(found) == 1:
            return self._at(found[0], hidden, positions)
        whole: list[torch.Tensor] = []
        for length in found:
            rows = torch.from_numpy(np.flatnonzero(lengths == length)).to(positions.device)
            parts = self._at(length, hidden, positions[:, rows])
            whole = whole or [part.new_empty(1, positions.shape[1], *part.shape[2:]) for part in parts]
            for tensor, part in zip(whole, parts, strict=True):
                tensor[:, rows] = part
        return tuple(whole)

    def _at(self, length: int, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._rotary.inv_freq = self._frequencies(length, positions.device)
        angles: tuple[torch.Tensor, ...] = self._rotary(hidden, positions)
        return angles

    def _frequencies(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the frequencies of a length; the first call for each computes them as Hugging Face does."""
        if not length:
            return self._usual.to(device)
        if length not in self._kept:
            of = torch.tensor(length, device=device)
            self._kept[length], _ = ROPE_INIT_FUNCTIONS[self._kind](self._config, device, seq_len=of)
        self._kept.move_to_end(length)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[length]


def length_notes(name: str, rotary: Any, max_length: int) -> list[str]:
    """What the operator of a model is to know: requests that set no limit can reach the whole context."""
    if not isinstance(rotary, LengthRotary) or max_length <= rotary.trained:
        return []
    return [
        f"{name}: requests without max_tokens get the rotary frequencies of long texts, however short they are; for"
        " those of short ones, set the pool's max_answer_tokens,"
        f" or models.{name}.max_length to {rotary.trained} or less"
    ]
