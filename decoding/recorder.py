"""Reading entropy and log-probability of every token of a stretch, without a say in when it ends."""

from __future__ import annotations

from math import nan

from decoding.model import Decision, Readout, ReadSpec, StopCondition
from decoding.state import Stateful


class Watch(Stateful):
    """A stop rule that never stops: what it wants is read, and comes back with the tokens.

    Attributes:
        allowed: log-probability, in nats, of all tokens that a structure allowed together, token by token; NaN where it
            allowed one only, which the model did not choose. Empty where no structure holds.
    """

    name = "watch"
    want = ReadSpec(draw=None, entropy=True, logprob=True)
    changing = ("allowed",)

    def __init__(self) -> None:
        self.allowed: list[float] = []

    def observe(self, token: int, row: Readout) -> Decision:
        """Go on."""
        if row.allowed_logprob is not None:
            self.allowed.append(nan if row.forced else row.allowed_logprob)
        return Decision.GO_ON


def watched() -> StopCondition:
    """To the end of the answer; every token carries its entropy (bits) and log-probability (nats)."""
    return StopCondition((Watch(),))
