"""Where the model is unsure, several short trials are drawn, and the one that surprises it least is kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.decode_loop import reported, stream
from decoding.logits import BITS_PER_NAT, entropy_bits
from decoding.model import Model, ModelPool, Readout, ReadSpec, Request, StopCondition, token_of
from decoding.noise import derive_seed, round_seed
from decoding.processor_chain import chain_of
from decoding.recorder import watched
from decoding.rollouts import branches_of
from decoding.sequence import Sequence
from decoding.steps import StepEnd, StepRule, step_marks
from turnout.errors import FieldError
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment

MARKS = tuple(".,:;?!)]}")


class CntpParams(MethodParams):
    """Parameters of `cntp`."""

    example: ClassVar[Mapping[str, Any]] = {"trials": 3, "high": 3.0}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    trials: Annotated[int, Field(ge=1, le=64, description="most trials at one place; 1 is plain decoding")] = 10
    low: Annotated[
        FiniteFloat,
        Field(ge=0.0, le=100.0, description="entropy, in nats, up to which a token is drawn without trials"),
    ] = 0.01
    high: Annotated[
        FiniteFloat, Field(gt=0.0, le=100.0, description="entropy, in nats, from which there are most trials")
    ] = 1.5
    longest: Annotated[int, Field(ge=1, le=1024, description="tokens of the longest trial")] = 64

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low >= self.high:
            raise FieldError("low", f"must be below high, {self.high:g} (got {self.low:g})")
        return self

    def count(self, entropy: float) -> int:
        """Return the number of trials at an entropy in nats: from 1 up to `low` to `trials` from `high` on."""
        share = min(max((entropy - self.low) / (self.high - self.low), 0.0), 1.0)
        return math.floor(1 + (self.trials - 1) * share)


@method(params=CntpParams, papers=(124,), lossless=False, needs=frozenset(), contrasts=True)
async def cntp(request: Request, models: ModelPool, params: CntpParams) -> AsyncIterator[Segment]:
    """One model draws several trials where it is unsure, and the one that it finds likeliest is kept.

    Paper #124 (Cautious Next Token Prediction). The entropy is that of the distribution that tokens are drawn from; the
    more there is, the more trials are drawn, each up to its first punctuation mark or the end. The one with the lowest
    perplexity, by the model's own law, is kept as a whole. They share the cache of what is before them. At temperature
    0 all trials would be the same, and it is plain decoding.
    """
    model, seq = models.by_role(params.model), request.sequence
    if seq.sampling.greedy or params.trials == 1:
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    marks = await asyncio.to_thread(step_marks, models.tokenizer, model.vocab_size, MARKS)
    want = ReadSpec() | reported(seq) | _entropy_spec(seq)
    while not seq.finished:
        [row] = await model.extend(seq, want=want)
        count = params.count(_nats(row))
        if count == 1:
            seq.append(token_of(row, model.name), model.num_parameters)
            yield Segment((seq.generated[-1],), "finish" if seq.finished else "max_tokens")
            continue
        until = StopCondition((StepRule(StepEnd(marks, MARKS)),), params.longest) | watched()
        yield await _kept(model, seq, count, until, models)


async def _kept(model: Model, seq: Sequence, count: int, until: StopCondition, models: ModelPool) -> Segment:
    """Draw trials, the first one with the noise of the answer, and append the one with the lowest perplexity."""
    seeds = [seq.seed, *(derive_seed(round_seed(seq.seed, len(seq)), index) for index in range(1, count))]
    with branches_of(seq) as branches:
        trials, begun = await branches.write(model, [seq] * count, seeds, until), len(seq.generated)
        return branches.show(min(trials, key=lambda each: perplexity(each, begun)), models)


def perplexity(trial: Sequence, begun: int) -> float:
    """Return the perplexity of its tokens from `begun` on, by their log-probabilities."""
    values = [token.logprob for token in trial.generated[begun:] if token.logprob is not None]
    return math.exp(-sum(values) / len(values))


def _entropy_spec(seq: Sequence) -> ReadSpec:
    """What to read for the entropy: of the raw row, or of the whole distribution where that is another one."""
    chain = chain_of(seq)
    changed = chain.before or chain.after or seq.sampling.bans_tokens
    return ReadSpec(draw=None, probs=True) if changed else ReadSpec(draw=None, entropy=True)


def _nats(row: Readout) -> float:
    if row.probs is not None:
        return float(entropy_bits(row.probs.log()[None])[0]) / BITS_PER_NAT
    assert row.entropy_bits is not None
    return row.entropy_bits / BITS_PER_NAT
