"""Several answers are drawn, the best of them is shown."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from decoding.artifacts import ArtifactName
from decoding.candidates import MARK, charge, final_answer, show
from decoding.model import Model, ModelPool, ReadSpec, Request
from decoding.noise import derive_seed
from decoding.recorder import watched
from decoding.scorers.reward_model import RewardModelParams, RewardModelScorer
from decoding.sequence import Sequence
from decoding.thinking import answer_ids
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment

Rerank = Literal["majority", "logprob", "reward"]


class BestOfParams(MethodParams):
    """Parameters of `best_of`."""

    example: ClassVar[Mapping[str, Any]] = {"k": 3}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    k: Annotated[int, Field(ge=1, le=64, description="answers drawn")] = 4
    rerank: Annotated[
        Rerank,
        Field(
            description="which is shown: majority, one with the most common final answer, the likeliest of these;"
            " logprob, the one with the highest mean log-probability of its tokens; reward, the one that the reward"
            " model in `artifact` finds best, read as one step"
        ),
    ] = "majority"
    mark: Annotated[
        str,
        Field(
            max_length=64,
            description="the final answer is the line after the last of this; the last line where it is missing",
        ),
    ] = MARK
    artifact: Annotated[ArtifactName, Field(description="for reward: of the kind reward_model")] = "reward_model"

    def scorer(self, models: ModelPool) -> RewardModelScorer | None:
        """For reward, who finds the best; the artifact is opened.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        if self.rerank != "reward":
            return None
        scorer = RewardModelScorer(RewardModelParams(artifact=self.artifact))
        scorer.check(models)
        return scorer

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        self.scorer(models)

    @property
    def beyond_text(self) -> str:
        """See `MethodParams.beyond_text`."""
        return "rerank" if self.rerank == "reward" else ""


@method(params=BestOfParams, papers=(45,), lossless=False, needs=frozenset(), over_text=True)
async def best_of(request: Request, models: ModelPool, params: BestOfParams) -> AsyncIterator[Segment]:
    """One model draws several answers, and the one that most agree on, or the likeliest, is shown.

    Paper #45 (Learning How Hard to Think), its best-of-k; how many to draw is a parameter, which a routing policy sets.
    Each answer follows the model's law, which one is shown does not. Nothing is shown before all are written. The
    prompt is computed once. With k = 1 it is plain decoding: the first answer is drawn with the request's own seed.
    """
    model, seq = models.by_role(params.model), request.sequence
    count = params.k
    if seq.sampling.greedy and count > 1:
        request.notes.append(f"one answer instead of {count}: at temperature 0 they would all be the same")
        count = 1
    scorer = params.scorer(models)
    if count > 1:  # the forks share the prompt's blocks, so that it is fed once; its last place is fed by each
        await model.extend(seq, want=ReadSpec(draw=None))
    drafts = [model.fork(seq, derive_seed(seq.seed, index)) for index in range(count)]
    try:
        await _write(model, drafts)
        if scorer is not None and count > 1:
            values = await _rewards(drafts, seq, models, scorer)
        else:
            values = [mean_logprob(each) for each in drafts]
        best = drafts[choose(drafts, values, models, params.mark if params.rerank == "majority" else None)]
        for draft in drafts:
            if draft is not best:
                charge(seq, draft)
        segment = show(seq, best, models)
    finally:
        for draft in drafts:
            model.release(draft)
    yield segment


async def _write(model: Model, drafts: list[Sequence]) -> None:
    """All answers at once; the others end with the first that fails."""
    tasks = [asyncio.ensure_future(model.decode(draft, watched())) for draft in drafts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _rewards(drafts: list[Sequence], seq: Sequence, models: ModelPool, scorer: RewardModelScorer) -> list[float]:
    """Score each whole answer with the reward model, in one forward each."""
    answers = [tuple(token.id for token in draft.generated) for draft in drafts]
    return await asyncio.gather(*(scorer.score(models, seq, answer) for answer in answers))


def choose(drafts: list[Sequence], values: list[float], models: ModelPool, mark: str | None) -> int:
    """Choose the answer to show: the best of those with the most common final answer; of equal ones the first.

    Args:
        drafts: written answers.
        values: how good each is.
        models: the pool, for its texts.
        mark: what stands before a final answer; None: final answers do not count, the best of all is shown.
    """
    if mark is None:
        return chosen(values)
    texts = [models.tokenizer.decode(answer_ids(draft, models.tokenizer)) for draft in drafts]
    return chosen(values, [final_answer(text, mark) for text in texts])


def chosen(values: list[float], answers: list[str] | None = None) -> int:
    """See `choose`.

    Args:
        values: how good each answer is.
        answers: the final answer of each; None: they do not count.
    """
    candidates = list(range(len(values)))
    if answers is not None:
        # An answer that says nothing wins only if all do.
        votes = Counter(answer for answer in answers if answer) or Counter(answers)
        most = max(votes.values())
        candidates = [place for place in candidates if votes[answers[place]] == most]
    return max(candidates, key=values.__getitem__)


def mean_logprob(draft: Sequence) -> float:
    """Mean log-probability of its answer's tokens, nats; they must carry them."""
    values = [token.logprob for token in draft.generated if token.logprob is not None]
    return sum(values) / len(values) if values else float("-inf")
