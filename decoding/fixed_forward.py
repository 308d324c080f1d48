"""The operation of forwards of one fixed shape: its logits are the same to the bit each time, whatever else runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decoding.operations import Operation


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Result of a forward of a fixed shape.

    Attributes:
        logits: float32 [lanes, vocab_size] on the CPU, the raw logits after each lane's token.
        numerics: what computed them: only where it is equal are the logits of equal tokens equal to the bit.
    """

    logits: torch.Tensor
    numerics: str


@dataclass(frozen=True, slots=True)
class FixedForward(Operation[FixedRows]):
    """Feed one token to each of some lanes, in a forward that holds nothing else.

    Lanes are token streams of their own, as long as each other; they have nothing to do with the tokens of the
    sequence, which only owns their cache until it is released. Logits move in their last bits with the shape of a
    batch, the number of threads, and with how cached keys came to be. Here all of that is fixed: the lanes are fed
    alone, one token each, on one CPU thread, and neither take over nor publish cached blocks.

    Attributes:
        tokens: [lanes] the next token of each lane, at least two lanes: the kernels for one row alone are others.
        place: tokens that each lane has before it; 0 begins all lanes anew.
        longest: tokens that a lane may have; the same in all operations on a sequence.

    Raises:
        TurnoutError: RESOURCE_EXHAUSTED: the cache has no room for the lanes; INVALID_ARGUMENT: the model is split over
            several processes.
    """

    name: ClassVar[str] = "fixed_forward"
    fills_cache: ClassVar[bool] = False
    tokens: tuple[int, ...]
    place: int
    longest: int
