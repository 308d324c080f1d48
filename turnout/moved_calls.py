"""What a replica hands to another one of a call that it does not finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnout.cost import Meter


@dataclass(frozen=True, slots=True)
class MovedCache:
    """Keys and values of some of an answer's tokens under one model, on their way to another replica.

    Attributes:
        answer: which answer of the call.
        model: the model's name,
        digest: ... its weights, and how it computes: another model has no use for them.
        start: first token, counted from the start of the prompt.
        ids: all tokens from the start of the prompt to the last of these.
        nbytes: their size.
        kv: a tensor [layers, tokens, 2, kv_heads, head_dim] on the CPU, or where to fetch it.
        longest: most tokens that the answer and its prompt could have there; None: not said.
    """

    answer: int
    model: str
    digest: str
    start: int
    ids: tuple[int, ...]
    nbytes: int
    kv: Any
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """What a replica hands to the next one of a call it does not finish.

    Attributes:
        caches: may be missing, in part or all; what is missing is computed.
        meters: the work done so far, by answer; `stream_meter` is that for streams of contrasts.
    """

    caches: tuple[MovedCache, ...] = ()
    meters: dict[int, Meter] = field(default_factory=dict)
    stream_meter: Meter = field(default_factory=Meter)
