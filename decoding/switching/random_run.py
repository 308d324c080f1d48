"""Switch at random, with a chosen share and mean run length: the baseline a rule with an idea has to beat."""

from __future__ import annotations

from typing import Literal

from decoding.model import Decision, Readout, ReadSpec
from decoding.noise import Purpose, noise_key, uniform
from decoding.state import Stateful
from decoding.switching.base import Role, other

Start = Literal["small", "large", "drawn"]

# What a share read from a curve may be off by.
ROUNDING = 1e-9


def mean_runs(share: float, mean_run: float, min_stay: int) -> dict[Role, float]:
    """Mean run length of each model, in tokens; empty where only one of them ever writes.

    Raises:
        ValueError: a model's mean run would be shorter than `min_stay`.
    """
    if share in (0.0, 1.0):
        return {}
    means: dict[Role, float] = {"large": 2.0 * share * mean_run, "small": 2.0 * (1.0 - share) * mean_run}
    for role, mean in means.items():
        if mean < min_stay - ROUNDING:
            raise ValueError(
                f"with this share and mean_run, runs of the {role} model average {mean:g} tokens, "
                f"below min_stay ({min_stay})"
            )
    return means


class RandomRunSwitch(Stateful):
    """Alternating runs of random length, made with keyed noise.

    A run lasts `min_stay` tokens and then ends before each further token with a fixed chance, so its length is
    `min_stay` plus a geometric number. The two chances are set so that runs of the large and the small model
    average 2 * share * mean_run and 2 * (1 - share) * mean_run tokens: together `mean_run` on average, and
    in the long run `share` of the tokens by the large model. Where the first run is drawn, it is the large model's with
    chance `share`, and so is each token. With a given start short answers have less of the other model: a rule that
    always starts with one model is to be compared with random runs that do so too.

    Args:
        share: of tokens written by the large model, 0 to 1; at 0 and 1 one model writes everything.
        mean_run: mean run length over both models, tokens.
        min_stay: shortest run, tokens, at least 1; no model's mean run may be shorter.
        seed: of the keyed noise.
        position: absolute position of the first token.
        start: who writes first; drawn: the large model with chance `share`. At a share of 0 or 1 it does not matter.
    """

    name = "random_run"
    want = ReadSpec()
    changing = ("active", "position", "stay")

    def __init__(
        self, *, share: float, mean_run: float, min_stay: int, seed: int, position: int, start: Start = "drawn"
    ) -> None:
        if min_stay < 1:
            raise ValueError("min_stay must be at least 1")
        means = mean_runs(share, mean_run, min_stay)
        self.leave = {role: 1.0 / (mean - min_stay + 1.0) for role, mean in means.items()}
        self.min_stay = min_stay
        self.seed = seed
        self.position = position
        self.stay = 0
        self.active: Role
        if start == "drawn" or not means:
            first = uniform(noise_key(seed, position, Purpose.SWITCH, lane=1))
            self.active = "large" if first < share else "small"
        else:
            self.active = start

    def observe(self, token: int, row: Readout) -> Decision:
        """See `SwitchRule.observe`."""
        self.position += 1
        self.stay += 1
        if self.stay < self.min_stay:
            return Decision.GO_ON
        if uniform(noise_key(self.seed, self.position, Purpose.SWITCH)) >= self.leave.get(self.active, 0.0):
            return Decision.GO_ON
        self.active = other(self.active)
        self.stay = 0
        return Decision.STOP


RULE = RandomRunSwitch
