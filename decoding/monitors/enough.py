"""Stop reconsidering once the answer was written with little uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from decoding.artifacts import ArtifactName
from decoding.model import ModelPool, Request
from decoding.monitors.base import Injection, Monitor
from decoding.text import codec_of, continuation_ids
from turnout.errors import invalid
from turnout.registry import MethodParams
from turnout.types import Segment

WHERE = "method.params.monitor"
Estimator = Literal["mean", "information", "bayes", "scale_free"]


class EnoughParams(MethodParams):
    """Parameters of `enough`."""

    threshold: Annotated[
        FiniteFloat | None,
        Field(ge=-1.0, le=64.0, description="mean entropy, nats, up to which an answer stands; absent: the artifact's"),
    ] = None
    artifact: ArtifactName = "enough"
    estimator: Annotated[Estimator, Field(description="which of the artifact's thresholds")] = "mean"
    harmful: Annotated[
        bool, Field(description="use the artifact's threshold even if it was measured to make answers worse")
    ] = False
    top: Annotated[int, Field(ge=2, le=20, description="most probable tokens the entropy is taken over")] = 20
    rounds: Annotated[int, Field(ge=1, le=16, description="most rounds, the first answer's included")] = 3
    cue: Annotated[
        str, Field(min_length=1, max_length=2000, description="put after an answer that is to be reconsidered")
    ] = "\nWait, let me check that again.\n"
    budget: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000,
            description="tokens a question may take on average over the tenant's questions: what sure ones leave,"
            " unsure ones may use; absent: only `rounds` limits",
        ),
    ] = None


class TokenAccount:
    """Account of the tokens that a tenant's questions leave for each other."""

    def __init__(self) -> None:
        self.balance = 0


class EnoughMonitor(Monitor):
    """Paper #21 (Think Just Enough): a round more where the mean entropy of the last round is above a threshold.

    Per token the `top` largest probabilities are renormalised and their entropy taken, in nats; a round's reading is
    the mean over its tokens. A round ends with the end token; the cue and the next round follow it in the same answer.
    With a budget a further round also needs as many tokens on the account as the last round took.
    """

    Params = EnoughParams
    papers = (21,)
    params: EnoughParams

    def check(self, models: ModelPool) -> None:
        """Open the artifact, where one says the threshold.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, it does not fit, it has no such
                threshold, or its threshold was measured to make answers worse.
        """
        if self.params.threshold is None:
            self._calibrated(models)

    def begin(self, request: Request, models: ModelPool) -> None:
        """See `Monitor.begin`."""
        self.top = self.params.top
        # Of an artifact's threshold, whose answers; one that is given fits whomever it is given for.
        self._measured_on: set[str] = set()
        self._request = request
        self._cue = continuation_ids(codec_of(models, WHERE), self.params.cue)
        self._threshold = self._calibrated(models) if self.params.threshold is None else self.params.threshold
        self._rounds: list[float] = []
        self._entropies: list[float] = []
        self._account = None
        self._others: set[str] = set()
        if self.params.budget is not None:
            kind = f"enough/{self.params.budget}"
            self._account = models.large.stores.open(kind, request.sequence.learner, TokenAccount)
            self._account.balance += self.params.budget

    def _calibrated(self, models: ModelPool) -> float:
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{WHERE}.artifact")
        settings = artifact.settings
        estimator, thresholds = self.params.estimator, settings["thresholds"]
        harmful = estimator in settings.get("harmful", {})
        if estimator not in thresholds or (harmful and not self.params.harmful):
            raise invalid(f"{WHERE}.estimator", _not_usable(estimator, self.params.artifact, settings))
        self._measured_on = {models.by_role(role).name for role in artifact.models}
        self.top = int(settings["top"])
        return float(thresholds[estimator])

    def watch(self, segment: Segment) -> None:
        """See `Monitor.watch`."""
        if self._measured_on:
            self._others |= {token.source for token in segment.tokens} - self._measured_on
        self._entropies += [entropy_nats(token.top[: self.top]) for token in segment.tokens if token.top]
        if self._account is not None:
            self._account.balance -= len(segment.tokens)

    def at_end(self) -> Injection | None:
        """The cue, if the round was unsure and another one is allowed."""
        length = self._end_round()
        affordable = self._account is None or self._account.balance >= length
        if not length or not affordable:
            return None
        if self._rounds[-1] <= self._threshold or len(self._rounds) >= self.params.rounds:
            return None
        return Injection(self._cue, "round")

    def again(self, then: Callable[[tuple[int, ...]], bool], ended: bool) -> Injection | None:
        """See `Monitor.again`."""
        if not ended or not then(self._cue):
            return None
        self._end_round()
        return Injection(self._cue, "round")

    def _end_round(self) -> int:
        """Tokens of the round that has ended, whose mean entropy is kept."""
        entropies, self._entropies = self._entropies, []
        if entropies:
            self._rounds.append(sum(entropies) / len(entropies))
        return len(entropies)

    async def close(self) -> None:
        """Say in the request's notes what the rounds read."""
        if self._rounds:
            read = ", ".join(f"{mean:.3f}" for mean in self._rounds)
            self._request.notes.append(f"mean entropy by round, nats: {read}; threshold {self._threshold:.3f}")
        if self._others:
            others = ", ".join(sorted(self._others))
            self._request.notes.append(f"the threshold was measured on other answers than those of {others}")


def _not_usable(estimator: Estimator, artifact: str, settings: Mapping[str, Any]) -> str:
    """Say why an artifact's threshold is refused, and what would be accepted.

    Args:
        estimator: whose threshold it is.
        artifact: name of the artifact.
        settings: the artifact's.
    """
    thresholds, harmful = settings["thresholds"], settings.get("harmful", {})
    usable = ", ".join(name for name in thresholds if name not in harmful) or "none"
    if estimator not in harmful:
        return f"the artifact {artifact!r} has no threshold for {estimator!r}; harmless are: {usable}"
    remedy = "a request with `harmful: true` may use it"
    if estimator not in thresholds:
        remedy = "the artifact has no threshold for it: only with `--keep-harmful` does `turnout train enough` keep one"
        remedy += ", which a request with `harmful: true` may use"
    return (
        f"{estimator!r} was measured to make answers worse: {settings['accuracy']:.1%} are right after one round,"
        f" {harmful[estimator]:.1%} with it; harmless are: {usable}; {remedy}"
    )


def entropy_nats(top: tuple[tuple[int, float], ...]) -> float:
    """Entropy of the renormalised probabilities of some tokens, (id, log-probability) in nats each."""
    probs = [math.exp(logprob) for _, logprob in top]
    mass = sum(probs)
    return -sum(p / mass * math.log(p / mass) for p in probs if p > 0.0)


PART = EnoughMonitor
