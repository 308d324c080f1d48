"""Answers of a law that is normalised once, not at each token: several are drawn, and one is kept by its weight."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from decoding.candidates import charge, show
from decoding.model import Decision, Model, ModelPool, Readout, ReadSpec, Request, StopCondition
from decoding.noise import Purpose, derive_seed, noise_key, uniform
from decoding.sequence import Sequence
from decoding.state import Stateful
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token


class GlobalSamplingParams(MethodParams):
    """Parameters of `global_sampling`."""

    example: ClassVar[Mapping[str, Any]] = {"k": 3}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    k: Annotated[
        int, Field(ge=1, le=64, description="answers drawn, of which one is kept; 1: only the distortion is measured")
    ] = 8


@dataclass(frozen=True, slots=True)
class Distortion:
    """Normalisers of one answer's tokens.

    Attributes:
        log_z: of each token, nats: how much of the weights p ** (1 / temperature) its row's processors left.
    """

    log_z: tuple[float, ...]

    @classmethod
    def of(cls, tokens: list[Token], temperature: float) -> Distortion:
        """Of tokens that carry their raw log-probability and their surprise."""
        return cls(
            tuple(
                token.logprob / temperature + token.surprise_bits * math.log(2.0)
                for token in tokens
                if token.logprob is not None and token.surprise_bits is not None
            )
        )

    @property
    def log_weight(self) -> float:
        """Logarithm of the answer's weight."""
        return math.fsum(self.log_z)


@method(params=GlobalSamplingParams, papers=(60,), lossless=False, needs=frozenset())
async def global_sampling(request: Request, models: ModelPool, params: GlobalSamplingParams) -> AsyncIterator[Segment]:
    """One model draws several answers and keeps one, so that truncation does not favour answers that it cuts most.

    Paper #60. Temperature and truncation normalise each row by its own Z, the sum of p ** (1 / temperature) over what
    is left of it, so that an answer is as likely as its tokens' p ** (1 / temperature) together, divided by the product
    of their Z. Weights of that product, and one answer resampled by them (SIR), take the division back: with more
    answers the law comes closer to the one with the same support and one normaliser. Penalties and biases are taken
    back with it: they hold for what is drawn, not for what is kept. The end of an answer is a token like others.
    The usage's notes say mean and variance of log Z by token, and the effective number of answers. With k = 1 it is
    plain decoding, measured.
    """
    model, seq = models.by_role(params.model), request.sequence
    temperature, count = seq.sampling.temperature, params.k
    if seq.sampling.greedy and count > 1:
        request.notes.append(f"one answer instead of {count}: at temperature 0 they would all be the same")
        count = 1
    if count > 1:  # the forks share the prompt's blocks, so that it is fed once; its last place is fed by each
        await model.extend(seq, want=ReadSpec(draw=None))
    drafts = [model.fork(seq, derive_seed(seq.seed, index)) for index in range(count)]
    try:
        await _write(model, drafts)
        chosen = drafts[0]
        if not seq.sampling.greedy:
            found = [Distortion.of(draft.generated[len(seq.generated) :], temperature) for draft in drafts]
            weights = [each.log_weight for each in found]
            chosen = drafts[resampled(weights, uniform(noise_key(seq.seed, len(seq), Purpose.SELECT)))]
            request.notes.append(_report(found))
        for draft in drafts:
            if draft is not chosen:
                charge(seq, draft)
        segment = show(seq, chosen, models)
    finally:
        for draft in drafts:
            model.release(draft)
    yield segment


class Measured(Stateful):
    """A stop rule that never stops, and has each token's log-probability and surprise read."""

    name = "measured"
    want = ReadSpec(draw=None, logprob=True, surprise=True)
    changing = ()

    def observe(self, token: int, row: Readout) -> Decision:
        """Go on."""
        return Decision.GO_ON


async def _write(model: Model, drafts: list[Sequence]) -> None:
    """All answers at once; the others end with the first that fails."""
    tasks = [asyncio.ensure_future(model.decode(draft, StopCondition((Measured(),)))) for draft in drafts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shares(log_weights: list[float]) -> list[float]:
    """Return weights that sum to 1."""
    best = max(log_weights)
    weights = [math.exp(each - best) for each in log_weights]
    return [each / math.fsum(weights) for each in weights]


def resampled(log_weights: list[float], at: float) -> int:
    """Return the answer at a place, from 0 up to 1, of the weights laid end to end."""
    for index, share in enumerate(shares(log_weights)):
        at -= share
        if at < 0.0:
            return index
    return max(range(len(log_weights)), key=log_weights.__getitem__)  # rounding has left a rest


def effective(log_weights: list[float]) -> float:
    """Return how many answers with equal weights would say as much."""
    return 1.0 / math.fsum(share * share for share in shares(log_weights))


def _report(found: list[Distortion]) -> str:
    values = [value for each in found for value in each.log_z]
    mean = math.fsum(values) / max(len(values), 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1)
    number = effective([each.log_weight for each in found])
    return f"log Z by token: mean {mean:.4f}, variance {variance:.4f}; effective answers: {number:.2f} of {len(found)}"
