"""Features of a prompt for a probe: the small model's last hidden state, and a few cheap numbers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from decoding.model import Readout

FEATURES = ("log_prompt_tokens", "entropy_bits", "margin_nats", "top_logprob")


def features_of(row: Readout, num_prompt_tokens: int) -> dict[str, float]:
    """The numbers in `FEATURES`.

    Args:
        row: the small model's reading after the prompt, with entropy and the two most probable tokens.
        num_prompt_tokens: length of the prompt.

    Returns:
        Natural logarithm of the length; entropy of the first token in bits; how far the most probable token is ahead
        of the next one, and its log-probability, both in nats.

    Raises:
        ValueError: entropy or the most probable tokens were not read.
    """
    if row.entropy_bits is None or not row.top:
        raise ValueError("the small model must read entropy and the two most probable tokens after the prompt")
    best = row.top[0][1]
    second = row.top[1][1] if len(row.top) > 1 else -math.inf
    margin = min(best - second, 100.0)  # a token that no other competes with: finite, so that it can be averaged
    return {
        "log_prompt_tokens": math.log(num_prompt_tokens),
        "entropy_bits": row.entropy_bits,
        "margin_nats": margin,
        "top_logprob": best,
    }


def state_of(row: Readout) -> npt.NDArray[np.float32]:
    """The hidden state before the head, after the last norm: float32 [width]."""
    state: npt.NDArray[np.float32] = row.hidden[-1].to("cpu", torch.float32).numpy()
    return state


def inputs_of(
    hidden: npt.NDArray[np.float32], features: dict[str, float], names: tuple[str, ...] = FEATURES
) -> npt.NDArray[np.float32]:
    """What the network is fed: float32 [width + len(names)]."""
    return np.append(hidden, [features[name] for name in names]).astype(np.float32)
