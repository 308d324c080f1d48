"""Arms drawn by exponential weights, for gains that drift or are set against us."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import ref

from decoding.noise import Purpose, noise_key, uniform
from decoding.selectors._bandit import Bandit
from decoding.sequence import Sequence
from decoding.stores import Stores


@dataclass(slots=True)
class Exp3State:
    """Importance-weighted sums; each pull counts 1 / (the probability it was drawn with).

    Attributes:
        weights: [arms] sum over an arm's pulls.
        gains: [arms] the same sum with each pull's gain.
        rounds: pulls of all arms.
        width: largest gain a round can bring, as far as is known.
        draws: how often an arm was drawn.
        drawn: the arm that was drawn last.
        chance: the probability it was drawn with.
        drawer: whose answer it was drawn for; None: there was none yet.
    """

    weights: list[float]
    gains: list[float]
    rounds: int = 0
    width: float = 0.0
    draws: int = 0
    drawn: int = 0
    chance: float = 1.0
    drawer: ref[Exp3] | None = None


class Exp3(Bandit[Exp3State]):
    """EXP3Spec (seed 44, BanditSpec): arm i with a probability proportional to exp(-eta_n sum of its weighted losses).

    The loss of a round is (L - gain) / L, in [0, 1], weighted by 1 / (probability of its arm); with K arms, the rate
    in round n is eta_n = sqrt(ln K / (n K)). L is the largest gain known so far; losses of the past are scaled to it
    as well.

    Answers that learn together draw together, as the paper's serving variant has one bandit for a batch: what one of
    them drew is pulled by the others as well, until it has ended, or somebody who has pulled it draws anew. A step of a
    batch is as long as its slowest draft: where each drew for itself, all would wait in nearly every step for what one
    of them drafts. An answer that is alone draws in each of its rounds.
    """

    seeds = (44,)

    def begin(self, seq: Sequence, arms: list[str], stores: Stores) -> None:
        """See `Bandit.begin`."""
        super().begin(seq, arms, stores)
        self._seq = seq
        self._followed = 0  # the number of the draw that it pulled last

    def fresh(self, num_arms: int) -> Exp3State:
        """Nothing pulled."""
        return Exp3State([0.0] * num_arms, [0.0] * num_arms)

    def rank(self, seq: Sequence) -> list[int]:
        """The drawn arm, then the others by falling probability."""
        state, probs = self.state, self.probabilities()
        drawer = state.drawer() if state.drawer is not None else None
        if drawer is None or drawer._seq.finished or self._followed == state.draws:
            state.draws, state.drawer = state.draws + 1, ref(self)
            state.drawn = _at(uniform(noise_key(seq.seed, len(seq), Purpose.SELECT)), probs)
            state.chance = probs[state.drawn]
        self._followed = state.draws
        # Kept until the round has been seen: other answers of the tenant may draw and learn in between.
        self._chance = state.chance
        others = sorted((arm for arm in range(len(probs)) if arm != state.drawn), key=probs.__getitem__, reverse=True)
        return [state.drawn, *others]

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


def _at(place: float, probs: list[float]) -> int:
    """Index of the probability within whose share of 0 to 1 a place lies."""
    for index, prob in enumerate(probs):
        place -= prob
        if place < 0.0:
            return index
    return len(probs) - 1  # by rounding, they sum to less


PART = Exp3
