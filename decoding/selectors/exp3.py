"""Arms drawn by exponential weights, for gains that drift or are set against us."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import ref

from decoding.noise import Purpose, noise_key, uniform
from decoding.selectors._bandit import Bandit
from decoding.sequence import Sequence


@dataclass(slots=True, eq=False)
class Draw:
    """An arm that was drawn.

    Attributes:
        arm: which.
        chance: the probability it was drawn with.
        drawer: whose answer drew it.
        seen: how many pulls of it have been seen.
        gain: the mean of theirs.
    """

    arm: int
    chance: float
    drawer: ref[Exp3]
    seen: int = 0
    gain: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the answer that drew it has ended, or was given up."""
        drawer = self.drawer()
        return drawer is None or drawer.seq is None or drawer.seq.finished


@dataclass(slots=True)
class Exp3State:
    """Importance-weighted sums; each draw counts 1 / (the probability it was drawn with).

    Attributes:
        weights: [arms] sum over an arm's draws of which a pull has been seen.
        gains: [arms] the same sum with each draw's gain, the mean of its pulls'.
        rounds: such draws of all arms.
        width: largest gain a round can bring, as far as is known.
        draw: the last one.
    """

    weights: list[float]
    gains: list[float]
    rounds: int = 0
    width: float = 0.0
    draw: Draw | None = None


class Exp3(Bandit[Exp3State]):
    """EXP3Spec (seed 44, BanditSpec): arm i with a probability proportional to exp(-eta_n sum of its weighted losses).

    The loss of a round is (L - gain) / L, in [0, 1], weighted by 1 / (probability of its arm); with K arms, the rate
    in round n is eta_n = sqrt(ln K / (n K)). L is the largest gain known so far; losses of the past are scaled to it
    as well.

    Answers that learn together draw together, for a step of a batch is as long as its slowest draft: where each drew
    for itself, all would wait in nearly every step for what one of them drafts. Whoever has pulled the newest draw
    makes another, and so does whoever finds that the answer that made it has ended; the others pull it, each once. All
    pulls of a draw are one round, as in the paper's serving variant, with the mean of their gains. An answer that is
    alone draws in each of its rounds.
    """

    seeds = (44,)
    _draw: Draw | None = None  # the one that it pulled last, which it does not do again

    def fresh(self, num_arms: int) -> Exp3State:
        """Nothing pulled."""
        return Exp3State([0.0] * num_arms, [0.0] * num_arms)

    def rank(self, seq: Sequence) -> list[int]:
        """The drawn arm, then the others by falling probability."""
        state, probs = self.state, self.probabilities()
        draw = state.draw
        if draw is None or draw is self._draw or draw.over:
            arm = _at(uniform(noise_key(seq.seed, len(seq), Purpose.SELECT)), probs)
            draw = state.draw = Draw(arm, probs[arm], ref(self))
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
        """Weigh a pull by the probability of its draw, and enter it into the draw's mean."""
        draw = self._draw
        assert draw is not None
        if not draw.seen:
            self.state.rounds += 1
            self.state.weights[arm] += 1.0 / draw.chance
        draw.seen += 1
        more = (gain - draw.gain) / draw.seen
        draw.gain += more
        self.state.gains[arm] += more / draw.chance

    def pass_over(self, arm: int) -> None:
        """As if it had brought what its arm does: arms that are drawn rarely would else be left out more often."""
        if weight := self.state.weights[arm]:
            self.learn(arm, self.state.gains[arm] / weight)


def _at(place: float, probs: list[float]) -> int:
    """Index of the probability within whose share of 0 to 1 a place lies."""
    for index, prob in enumerate(probs):
        place -= prob
        if place < 0.0:
            return index
    return max(range(len(probs)), key=probs.__getitem__)  # by rounding, they sum to less


PART = Exp3
