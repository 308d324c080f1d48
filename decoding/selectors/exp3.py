"""Arms drawn by exponential weights, for gains that drift or are set against us."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated
from weakref import ref

from pydantic import Field

from decoding.noise import Purpose, noise_key, uniform
from decoding.selectors._bandit import RECENT, Bandit, BanditParams, second_largest
from decoding.sequence import Sequence


class Exp3Params(BanditParams):
    """Parameters of `exp3`."""

    memory: Annotated[
        int,
        Field(
            ge=0, le=1_000_000, description="rounds after which a loss counts 1/e; 0: always in full, as in the paper"
        ),
    ] = 1000


@dataclass(slots=True, eq=False)
class Draw:
    """An arm that was drawn.

    Attributes:
        arm: which.
        chance: the probability it was drawn with.
        drawer: whose answer drew it.
        seen: how many pulls of it have been seen.
        loss: the mean of theirs.
    """

    arm: int
    chance: float
    drawer: ref[Exp3]
    seen: int = 0
    loss: float = 0.0

    @property
    def over(self) -> bool:
        """True if the answer that drew it has ended, or was given up."""
        drawer = self.drawer()
        return drawer is None or drawer.seq is None or drawer.seq.finished


@dataclass(slots=True)
class Exp3State:
    """Importance-weighted sums; each draw counts 1 / (the probability it was drawn with).

    Attributes:
        weights: [arms] sum over an arm's draws of which a pull has been seen.
        losses: [arms] the same sum with each draw's loss, the mean of its pulls'.
        rounds: such draws of all arms.
        width: see `Learned`.
        recent: [arms] tokens per second of its last `RECENT` pulls.
        reached: [arms] the second fastest of these.
        draw: the last one.
    """

    weights: list[float]
    losses: list[float]
    rounds: int = 0
    width: float = 0.0
    recent: list[list[float]] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    draw: Draw | None = None


class Exp3(Bandit[Exp3State]):
    """EXP3Spec (paper #44, BanditSpec): arm i with probability proportional to exp(-eta_n sum of its weighted losses).

    The loss of a round is (L - gain) / L, in [0, 1], weighted by 1 / (probability of its arm); with K arms, the rate
    in round n is eta_n = sqrt(ln K / (n K)). For tokens L is the most that a round could have brought so far. Speeds
    have no known bound: there L is the largest that an arm has reached twice in its last `RECENT` pulls, and a pull
    that was faster counts as L, so that no single measurement sets the scale of all others.

    The paper compares with the best single arm of all rounds, and an arm that becomes the best later is found only
    after as many rounds again. Here losses fade, by 1 / `memory` in each round, and n is at most `memory`.

    Answers that learn together draw together, for a step of a batch is as long as its slowest draft: where each drew
    for itself, all would wait in nearly every step for what one of them drafts. An answer that has pulled the newest
    draw makes another, and so does one that finds that the draw's maker has ended; the others pull it, each once. All
    pulls of a draw are one round, as in the paper's serving variant, with the mean of their losses. An answer that is
    alone draws in each of its rounds.
    """

    Params = Exp3Params
    params: Exp3Params
    papers = (44,)
    _draw: Draw | None = None  # the one that it pulled last, which it does not do again

    def fresh(self, num_arms: int) -> Exp3State:
        """Nothing pulled."""
        return Exp3State(
            [0.0] * num_arms, [0.0] * num_arms, recent=[[] for _ in range(num_arms)], reached=[0.0] * num_arms
        )

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
        losses, num_arms = self.state.losses, len(self.state.losses)
        rounds = self.state.rounds + 1
        if self.params.memory:
            rounds = min(rounds, self.params.memory)
        rate = math.sqrt(math.log(num_arms) / (rounds * num_arms))
        least = min(losses)
        scores = [math.exp(-rate * (loss - least)) for loss in losses]
        total = sum(scores)
        return [score / total for score in scores]

    def learn(self, arm: int, gain: float) -> None:
        """Weigh the loss of a pull by the probability of its draw."""
        state = self.state
        if self.params.reward == "tokens":
            most = state.width
        else:
            state.recent[arm].append(gain)
            del state.recent[arm][:-RECENT]
            state.reached[arm] = second_largest(state.recent[arm])
            most = max(state.reached)
        self._enter(arm, 1.0 - min(gain / most, 1.0) if most else 1.0)

    def _enter(self, arm: int, loss: float) -> None:
        """Enter a pull's loss into the mean of its draw."""
        state, draw = self.state, self._draw
        assert draw is not None
        if not draw.seen:
            if self.params.memory:
                kept = 1.0 - 1.0 / self.params.memory
                state.weights[:] = [kept * weight for weight in state.weights]
                state.losses[:] = [kept * each for each in state.losses]
            state.rounds += 1
            state.weights[arm] += 1.0 / draw.chance
        draw.seen += 1
        more = (loss - draw.loss) / draw.seen
        draw.loss += more
        state.losses[arm] += more / draw.chance

    def pass_over(self, arm: int) -> None:
        """As if it had brought what its arm does: arms that are drawn rarely would else be left out more often."""
        if weight := self.state.weights[arm]:
            self._enter(arm, self.state.losses[arm] / weight)


def _at(place: float, probs: list[float]) -> int:
    """Index of the probability within whose share of 0 to 1 a place lies."""
    for index, prob in enumerate(probs):
        place -= prob
        if place < 0.0:
            return index
    return max(range(len(probs)), key=probs.__getitem__)  # by rounding, they sum to less


PART = Exp3
