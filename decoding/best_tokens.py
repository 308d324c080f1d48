"""The best token of each row, found as fast on a processor as on a device."""

from __future__ import annotations

import torch


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """Return int64 [rows], the first of each row's greatest scores, of float32 [rows, vocab].

    The same as `scores.argmax(-1)`, which on a processor takes several times as long as numpy's.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(scores.detach().numpy().argmax(-1))
