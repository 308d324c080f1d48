"""Arms drawn by exponential weights, for gains that drift or are set against us."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import ref

from decoding.noise import Purpose, noise_key, uniform
from decoding.selectors._bandit import Bandit
from decoding.sequence import Sequence
from decoding.stores import Stores


@dataclass(slots=True, eq=False)
class Draw:
    """An arm that was drawn.

    Attributes:
        arm: which.
        chance: the probability it was drawn with.
        drawer: whose answer drew it.
        part: what each pull of it counts, in rounds.
        pulls: how often it was pulled so far.
    """

    arm: int
    chance: float
    drawer: ref[Exp3]
    part: float
    pulls: int = 0

    @property
    def over(self) -> bool:
        """Whether the answer that drew it has ended, or was given up."""
        drawer = self.drawer()
        return drawer is None or drawer.seq.finished


@dataclass(slots=True)
class Exp3State:
    """Importance-weighted sums; each pull counts 1 / (the probability it was drawn with).

    Attributes:
        weights: [arms] sum over an arm's pulls.
        gains: [arms] the same sum with each pull's gain.
        rounds: pulls of all arms, those of one draw together as one.
        width: largest gain a round can bring, as far as is known.
        draw: the last one.
    """

    weights: list[float]
    gains: list[float]
    rounds: float = 0.0
    width: float = 0.0
    draw: Draw | None = None


class Exp3(Bandit[Exp3State]):
    """EXP3Spec (seed 44, BanditSpec): arm i with a probability proportional to exp(-eta_n sum of its weighted losses).

    The loss of a round is (L - gain) / L, in [0, 1], weighted by 1 / (probability of its arm); with K arms, the rate
    in round n is eta_n = sqrt(ln K / (n K)). L is the largest gain known so far; losses of the past are scaled to it
    as well.

    Answers that learn together draw together, for a step of a batch is as long as its slowest draft: where each drew
    for itself, all would wait in nearly every step for what one of them drafts. Whoever has pulled the newest draw
    makes another, and so does whoever finds that the answer that made it has ended; the others pull it, each once. The
    pulls of a draw are one round, as in the paper's serving variant: each counts a part of it, by how many pulls the
    draw before had. An answer that is alone draws in each of its rounds.

    Attributes:
        seq: of the answer.
    """

    seeds = (44,)
    _draw: Draw | None = None  # the one that it pulled last, which it does not do again

    def begin(self, seq: Sequence, arms: list[str], stores: Stores) -> None:
        """See `Bandit.begin`."""
        super().begin(seq, arms, stores)
        self.seq = seq

    def fresh(self, num_arms: int) -> Exp3State:
        """Nothing pulled."""
        return Exp3State([0.0] * num_arms, [0.0] * num_arms)

    def rank(self, seq: Sequence) -> list[int]:
        """The drawn arm, then the others by falling probability."""
        state, probs = self.state, self.probabilities()
        draw = state.draw
        if draw is None or draw is self._draw or draw.over:
            arm = _at(uniform(noise_key(seq.seed, len(seq), Purpose.SELECT)), probs)
            draw = state.draw = Draw(arm, probs[arm], ref(self), 1.0 / draw.pulls if draw is not None else 1.0)
        draw.pulls += 1
        # Kept until the round has been seen: others may draw and learn in between.
        self._draw = draw
        others = sorted((arm for arm in range(len(probs)) if arm != draw.arm), key=probs.__getitem__, reverse=True)
        return [draw.arm, *others]

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
        assert self._draw is not None
        part, weight = self._draw.part, self._draw.part / self._draw.chance
        self.state.rounds += part
        self.state.weights[arm] += weight
        self.state.gains[arm] += gain * weight


def _at(place: float, probs: list[float]) -> int:
    """Index of the probability within whose share of 0 to 1 a place lies."""
    for index, prob in enumerate(probs):
        place -= prob
        if place < 0.0:
            return index
    return len(probs) - 1  # by rounding, they sum to less


PART = Exp3
