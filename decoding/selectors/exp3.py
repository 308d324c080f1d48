"""Arms drawn by exponential weights, for gains that drift or are set against us."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decoding.noise import Purpose, noise_key, uniform
from decoding.selectors._bandit import Bandit
from decoding.sequence import Sequence


@dataclass(slots=True)
class Exp3State:
    """Importance-weighted sums; each pull counts 1 / (the probability it was drawn with).

    Attributes:
        weights: [arms] sum over an arm's pulls.
        gains: [arms] the same sum with each pull's gain.
        rounds: pulls of all arms.
        width: largest gain a round can bring, as far as is known.
    """

    weights: list[float]
    gains: list[float]
    rounds: int = 0
    width: float = 0.0


class Exp3(Bandit[Exp3State]):
    """EXP3Spec (seed 44, BanditSpec): arm i with a probability proportional to exp(-eta_n sum of its weighted losses).

    The loss of a round is (L - gain) / L, in [0, 1], weighted by 1 / (probability of its arm); with K arms, the rate
    in round n is eta_n = sqrt(ln K / (n K)). L is the largest gain known so far; losses of the past are scaled to it
    as well.
    """

    seeds = (44,)

    def fresh(self, num_arms: int) -> Exp3State:
        """Nothing pulled."""
        return Exp3State([0.0] * num_arms, [0.0] * num_arms)

    def rank(self, seq: Sequence) -> list[int]:
        """The drawn arm, then the others by falling probability."""
        probs = self.probabilities()
        left = uniform(noise_key(seq.seed, len(seq), Purpose.SELECT))
        drawn = len(probs) - 1
        for arm, prob in enumerate(probs):
            left -= prob
            if left < 0.0:
                drawn = arm
                break
        # Kept until the round has been seen: other answers of the tenant may learn in between.
        self._chance = probs[drawn]
        others = sorted((arm for arm in range(len(probs)) if arm != drawn), key=probs.__getitem__, reverse=True)
        return [drawn, *others]

    def probabilities(self) -> list[float]:
        """Probability of each arm in the coming round; sums to 1."""
        state, num_arms = self.state, len(self.state.weights)
        rate = math.sqrt(math.log(num_arms) / ((state.rounds + 1) * num_arms))
        width = state.width or 1.0
        losses = [weight - gain / width for weight, gain in zip(state.weights, state.gains, strict=True)]
        least = min(losses)
        scores = [math.exp(-rate * (loss - least)) for loss in losses]
        total = sum(scores)
        return [score / total for score in scores]

    def learn(self, arm: int, gain: float) -> None:
        """Weigh a pull by the probability it had."""
        self.state.rounds += 1
        self.state.weights[arm] += 1.0 / self._chance
        self.state.gains[arm] += gain / self._chance


PART = Exp3
