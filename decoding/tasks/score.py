"""Log-likelihood of given completions of a prompt, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from decoding.tasks.base import Progress, Task, TaskResult, TaskRun, Text
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool
    from turnout.calls import ScoredTokens, TokenOut


class ScoreParams(MethodParams):
    """Parameters of `score`."""

    example: ClassVar = {"prompt": "One, two,", "completions": [" three", " 3"], "top": 2}

    prompt: Annotated[Text, Field(description="what stands before the completions")]
    completions: Annotated[
        list[Text], Field(min_length=1, max_length=1024, description="texts, each scored after the prompt by itself")
    ]
    top: Annotated[int, Field(ge=0, le=20, description="alternatives reported per token")] = 0


class TopToken(TaskResult):
    """An alternative to a token."""

    id: int
    text: str
    logprob: float


class ScoredToken(TopToken):
    """A token of a completion; log-probabilities are in nats, `rank` is its place among all tokens, from 1."""

    greedy: Annotated[bool, Field(description="whether it was the most probable token")]
    rank: int | None
    top: list[TopToken]


class Completion(TaskResult):
    """A completion: its log-likelihood in nats, and its tokens."""

    logprob: float
    tokens: list[ScoredToken]


class ScoreResult(TaskResult):
    """Completions in the order asked for."""

    completions: list[Completion]


class Score(Task):
    """What the score endpoint computes, as a task."""

    params: ScoreParams
    Params = ScoreParams
    Result = ScoreResult

    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> ScoreResult:
        """See `Task.run`."""
        params = self.params
        scored = await run.score(params.prompt, tuple(params.completions), params.top)
        count_scored(progress, scored)
        return ScoreResult(completions=[_completion(each) for each in scored])


def count_scored(progress: Progress, scored: list[ScoredTokens]) -> None:
    """Count the tokens of one prompt and its scored completions."""
    progress.read(max(each.prompt_tokens for each in scored) + sum(len(each.tokens) for each in scored))


def _completion(scored: ScoredTokens) -> Completion:
    ranks = scored.ranks or (None,) * len(scored.tokens)
    tokens = [_token(*each) for each in zip(scored.tokens, scored.greedy, ranks, strict=True)]
    return Completion(logprob=sum(each.logprob for each in tokens), tokens=tokens)


def _token(token: TokenOut, greedy: bool, rank: int | None) -> ScoredToken:
    top = [TopToken(id=id, text=text, logprob=logprob) for id, text, logprob in token.top]
    return ScoredToken(id=token.id, text=token.text, logprob=token.logprob or 0.0, greedy=greedy, rank=rank, top=top)


PART = Score
