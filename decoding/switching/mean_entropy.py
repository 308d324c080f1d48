"""Switch by the rolling mean of the active model's entropy."""

from __future__ import annotations

from collections import deque
from typing import Literal

from decoding.drift import Recorder
from decoding.model import Decision, Readout, ReadSpec
from decoding.state import Stateful
from decoding.switching.base import Role, other

Effect = Literal["next", "current"]


class MeanEntropySwitch(Stateful):
    """Paper #2 (Entropy Adaptive Decoding): large while the mean of the last entropies is above a threshold.

    Entropies are in bits, before temperature, pushed once per forward of the active model; where a structure holds,
    they are of the tokens it allows. A forced token, the only one allowed, says nothing about the model: its entropy
    neither enters the window nor switches. The mean is of what the window holds while it is not yet full. A switch is
    possible once the active model has written `min_stay` tokens since it became active, forced ones included; tokens
    count when they are kept, so runs are never shorter.

    Args:
        window: entropies in the rolling mean.
        min_stay: tokens a model writes before it may hand over, at least 1.
        min_stay_small: the same of the small model, which may be 0: with `current` the first token that it proposes
            may then be dropped. None is `min_stay`, as published; but a small model that must stay writes what it
            is unsure of as well, and the more of that the lower the threshold, which hands over to it more often.
        threshold: small hands over above this mean, in bits.
        threshold_down: large hands back at or below this mean, in bits; None is `threshold`.
        active: who writes first.
        effect: `next` keeps the token whose entropy tipped the mean; `current` drops it and the other model
            chooses it again.
        effect_back: the same where the large model hands back; None is `effect`. With `next` it is not asked for a
            token that is only looked at and dropped.
        clear: empty the window at a switch; None does so when a stay is shorter than the window, where one mean would
            otherwise mix two models' entropies.
        tally: gets every mean of the small model at which it might have handed over, if given.
    """

    name = "mean_entropy"
    want = ReadSpec(entropy=True)
    changing = ("active", "entropies", "stay", "tally")

    def __init__(
        self,
        *,
        window: int,
        min_stay: int,
        min_stay_small: int | None = None,
        threshold: float,
        threshold_down: float | None = None,
        active: Role = "small",
        effect: Effect = "next",
        effect_back: Effect | None = None,
        clear: bool | None = None,
        tally: Recorder | None = None,
    ) -> None:
        if min_stay < 1:
            raise ValueError("min_stay must be at least 1")
        self.active: Role = active
        self.min_stay: dict[Role, int] = {"large": min_stay, "small": min_stay}
        if min_stay_small is not None:
            self.min_stay["small"] = min_stay_small
        self.threshold = threshold
        self.threshold_down = threshold if threshold_down is None else threshold_down
        self.drops: dict[Role, bool] = {"small": effect == "current", "large": (effect_back or effect) == "current"}
        self.clear = min(self.min_stay.values()) < window if clear is None else clear
        self.tally = tally
        self.entropies: deque[float] = deque(maxlen=window)
        self.stay = 0

    def observe(self, token: int, row: Readout) -> Decision:
        """See `SwitchRule.observe`."""
        if row.entropy_bits is None:
            raise ValueError("mean_entropy needs the entropy of every row")
        if row.forced:
            self.stay += 1
            return Decision.GO_ON
        self.entropies.append(row.entropy_bits)
        drops = self.drops[self.active]
        kept = self.stay if drops else self.stay + 1
        if kept < self.min_stay[self.active] or not self._tips(sum(self.entropies) / len(self.entropies)):
            self.stay += 1
            return Decision.GO_ON
        self.active = other(self.active)
        self.stay = 0
        if self.clear:
            self.entropies.clear()
        return Decision.DROP if drops else Decision.STOP

    def _tips(self, mean: float) -> bool:
        if self.active == "large":
            return mean <= self.threshold_down
        if self.tally is not None:
            self.tally.add(mean)
        return mean > self.threshold


RULE = MeanEntropySwitch
