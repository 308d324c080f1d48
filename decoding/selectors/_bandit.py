"""Common code of bandits over arms: the owner of their state, and the definition of a gain."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from pydantic import Field

from decoding.drafter_state import Stores
from decoding.selectors.base import Gain, Selector
from decoding.sequence import Sequence
from turnout.registry import MethodParams

RECENT = 64  # pulls of an arm, among which its speeds are judged


class BanditParams(MethodParams):
    """Parameters of every bandit."""

    reward: Annotated[
        Literal["speed", "tokens"],
        Field(description="speed: emitted tokens per second of a round; tokens: emitted tokens of a round"),
    ] = "speed"
    scope: Annotated[
        Literal["request", "tenant"],
        Field(description="request: every answer learns anew; tenant: what was learned outlives it"),
    ] = "tenant"


class Learned(Protocol):
    """State of a bandit; `width` is the most tokens that a round could bring so far, less the one it always brings."""

    width: float


S = TypeVar("S", bound=Learned)


class Bandit(Generic[S], Selector):
    """Asks one arm first each round and credits it with what the round brought.

    Where the arm proposes nothing, another drafts: to pull arm i is to ask i first, so the gain, time included, is
    still arm i's. The choice depends on past rounds only, so a lossless verifier stays lossless. Gains are counted
    from the worst: for `tokens` emitted tokens less the one a round always brings, for `speed` tokens per second.

    Attributes:
        seq: of the answer; None before it begins.
        state: what was learned, once it has begun.
    """

    Params = BanditParams
    params: BanditParams
    seq: Sequence | None = None
    state: S

    @abstractmethod
    def fresh(self, num_arms: int) -> S:
        """State before anything was seen."""

    @abstractmethod
    def rank(self, seq: Sequence) -> list[int]:
        """All arms, the one to pull first."""

    @abstractmethod
    def learn(self, arm: int, gain: float) -> None:
        """Enter the gain of a pull, which is not negative.

        Of tokens it is at most the state's `width`. Of speeds nothing bounds it: one stalled or mismeasured clock can
        make a round any number of times as fast as it was.
        """

    def pass_over(self, arm: int) -> None:
        """A pull of which nothing can be said: its round did other work as well."""

    def begin(self, seq: Sequence, arms: list[str], stores: Stores) -> None:
        """Fresh state, or the tenant's for these arms; an answer that begins again has learned what it has."""
        self._pulled = 0
        self._warm: set[int] = set()
        again, self.seq = seq is self.seq, seq
        if self.params.scope == "request":
            self.state = self.state if again else self.fresh(len(arms))
        else:
            kind = f"{self.name}/{self.params.model_dump_json()}/{arms}"
            self.state = stores.open(kind, seq.learner, lambda: self.fresh(len(arms)))

    def order(self, seq: Sequence, num_arms: int) -> list[int]:
        """The arm to pull, then the others as they would be next."""
        ranked = self.rank(seq)
        self._pulled = ranked[0]
        return ranked

    def observe(self, arm: int, gain: Gain) -> None:
        """Credit the arm that was asked first."""
        if self.params.reward == "tokens":
            self.state.width = max(self.state.width, gain.most - 1.0)
            self.learn(self._pulled, gain.tokens - 1.0)
        else:
            if self._pulled not in self._warm:
                # An arm's first round of an answer also feeds the prompt, which says nothing about its speed.
                self._warm.add(self._pulled)
                self.pass_over(self._pulled)
                return
            self.learn(self._pulled, gain.tokens / max(gain.seconds, 1e-9))


def second_largest(values: list[float]) -> float:
    """The largest but one; of a single value, that one."""
    return heapq.nlargest(2, values)[-1]
