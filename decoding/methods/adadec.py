"""Where the model is unsure it pauses, looks a few tokens ahead after each of its best tokens, and ranks them anew."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, FiniteFloat

from decoding.calibrated_params import CalibratedParams, calibrated, finish, recorder
from decoding.calibration import TunableParam
from decoding.decode_loop import chosen_among, reported
from decoding.model import Model, ModelPool, ReadSpec, Request, StopCondition, token_of
from decoding.recorder import watched
from decoding.rollouts import branches_of, together
from decoding.sequence import Sequence
from decoding.steps import StepEnd, StepRule, step_marks
from turnout.registry import ModelRole, method
from turnout.types import Segment, Token

Mark = Annotated[str, Field(min_length=1, max_length=64)]


class AdadecParams(CalibratedParams):
    """Parameters of `adadec`."""

    example: ClassVar[Mapping[str, Any]] = {"threshold": 2.0, "look_ahead": 2}
    knob: ClassVar[TunableParam] = TunableParam(
        "threshold",
        fixed=("model", "roller", "candidates", "look_ahead", "separators"),
        never=64.0,
        falling=True,
    )

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    roller: Annotated[
        ModelRole | None, Field(description="role of the model that looks ahead; absent: the one that answers")
    ] = None
    threshold: Annotated[
        FiniteFloat,
        Field(ge=-1.0, le=64.0, description="entropy, in bits, from which there is a pause; it is each model's own"),
    ] = 1.5
    candidates: Annotated[int, Field(ge=1, le=64, description="best tokens that are ranked anew in a pause")] = 3
    look_ahead: Annotated[
        int, Field(ge=0, le=256, description="most tokens written after each of them; 0: there is no pause")
    ] = 5
    separators: Annotated[
        tuple[Mark, ...],
        Field(max_length=16, description="strings that end a look ahead, as the line's end; none: only the answer's"),
    ] = ("\n",)

    @property
    def always(self) -> float:
        """See `CalibratedParams.always`."""
        return -1.0


@method(params=AdadecParams, papers=(3,), lossless=False, needs=frozenset(), resumable=True)
async def adadec(request: Request, models: ModelPool, params: AdadecParams) -> AsyncIterator[Segment]:
    """Tokens follow as plain decoding has them, but where the entropy is high: there a short look ahead ranks the best.

    Paper #3 (AdaDec). In a pause each of the best tokens is followed greedily for some tokens, at the same time. The
    one with the greatest mean log-probability is kept, of it in the law that tokens are drawn from (at temperature 0:
    that of temperature 1) and of what follows it in that of `roller`; what was written after it is thrown away. The
    entropy that parts sure from unsure differs from model to model: `turnout calibrate adadec` finds the threshold for
    a quality, a cost, or, where the small model answers and the large one looks ahead, a share of the large one.
    """
    params, watching = calibrated(request, models, params, "adadec")
    values = recorder(request, watching)
    model, seq = models.by_role(params.model), request.sequence
    roller = model if params.roller is None else models.by_role(params.roller)
    rules: tuple[StepRule, ...] = ()
    if params.separators and params.look_ahead:
        marks = await asyncio.to_thread(step_marks, models.tokenizer, roller.vocab_size, params.separators)
        rules = (StepRule(StepEnd(marks, params.separators)),)
    for rule in rules:  # a line may have begun before a pause
        for each in seq.answer:
            rule.end.feed(each)
    want = ReadSpec(entropy=True, top=params.candidates, top_processed=params.candidates) | reported(seq)
    pauses = 0
    while not seq.finished:
        [row] = await model.extend(seq, want=want)
        entropy = row.entropy_bits or 0.0
        if values is not None:
            values.add(entropy)
        token = token_of(row, model.name)._replace(top=row.top[: seq.sampling.logprobs or 0])
        best = [(each, logp) for each, logp in row.top_processed if logp > -math.inf]
        if entropy >= params.threshold and params.look_ahead and len(best) > 1:
            pauses += 1
            kept = await _ranked_anew(model, roller, seq, best, params.look_ahead, rules)
            token = chosen_among(seq, row, kept, dict(row.top).get(kept, dict(best)[kept]), model.name)
        seq.append(token, model.num_parameters)
        for rule in rules:
            rule.end.feed(token.id)
        yield Segment((token,), "finish" if seq.finished else "max_tokens")
    request.extra["adadec"] = {"pauses": pauses}
    finish(request, watching, values)


async def _ranked_anew(
    model: Model,
    roller: Model,
    seq: Sequence,
    best: list[tuple[int, float]],
    look_ahead: int,
    rules: tuple[StepRule, ...],
) -> int:
    """The token with the greatest mean log-probability of itself and what follows it; the more probable one of equals.

    Args:
        model: whose tokens they are.
        roller: looks ahead.
        seq: nothing is appended to it.
        best: tokens with their log-probabilities, nats, the greatest first.
        look_ahead: most tokens after each.
        rules: where looking ahead ends at the latest; they have seen the answer.
    """
    if roller is not model:  # its forks share what it reads of the answer
        await roller.extend(seq, want=ReadSpec(draw=None))
    with branches_of(seq) as branches:
        forks = branches.fork(roller, [seq] * len(best), [seq.seed] * len(best))
        work = []
        for fork, (token, logp) in zip(forks, best, strict=True):
            fork.sampling = fork.sampling.model_copy(update={"temperature": 0.0})
            fork.append(Token(token, model.name, logprob=logp), model.num_parameters)
            fork.meter.of(model.name, model.num_parameters).generated_tokens = 0  # it was read, not written
            until = (StopCondition(rules, look_ahead) | watched()).twins()
            ends = [rule.end.feed(token) for rule in until.rules if isinstance(rule, StepRule)]
            if not fork.finished and not any(ends):
                work.append(roller.decode(fork, until))
        await together(work)
        scores = [_mean(fork.generated[len(seq.generated) :]) for fork in forks]
        return best[max(range(len(best)), key=lambda place: scores[place])][0]


def _mean(tokens: list[Token]) -> float:
    return sum(token.logprob or 0.0 for token in tokens) / len(tokens)
