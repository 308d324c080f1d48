"""The aggregator slot: which of a request's answers is shown, once all, or enough of them, are written.

A module here assigns its class to `PART`; requests of `best_of` choose it by file name (`rerank`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from decoding.candidates import final_answer
from decoding.model import Model, ModelPool, StopRule
from decoding.parts import Part
from decoding.sequence import Sequence
from decoding.thinking import answer_ids
from turnout.errors import invalid
from turnout.part_choice import PartChoice

PACKAGE = "decoding.aggregators"
FIELD = "method.params.rerank"
LIKELIHOOD = "mean log-probability of the tokens, nats"  # a score

AggregatorChoice = Annotated[PartChoice, Field(json_schema_extra={"x-slot": "aggregators"})]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Written answer.

    Attributes:
        text: what it says, without thinking.
        whole: all that was written.
        final: its final answer, see `final_answer`; "": it has none.
        ids: its tokens; empty: an endpoint wrote it.
        logprobs: of its tokens, nats; empty: unknown.
        rule: the aggregator's own, which has seen every token.
        num_tokens: how many it has where its ids are not known; 0: not known either.
    """

    text: str
    whole: str
    final: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    rule: StopRule | None = None
    num_tokens: int = 0

    @classmethod
    def of(cls, draft: Sequence, start: int, models: ModelPool, mark: str, rule: StopRule | None = None) -> Candidate:
        """Read what a fork has beyond the first `start` tokens of the answer; the thinking before them counts."""
        text = models.tokenizer.decode(answer_ids(draft, models.tokenizer))
        tokens = draft.generated[start:]
        logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        ids = tuple(token.id for token in tokens)
        whole = models.tokenizer.decode(token.id for token in draft.generated)
        return cls(text, whole, final_answer(text, mark), ids, logprobs, rule)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, nats; -inf where it is unknown."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


@dataclass(slots=True)
class AnswerSet:
    """Answers to choose from, with what can be asked about them.

    Attributes:
        answers: at least one.
        seed: of the request, for keyed draws.
        seq: the request's sequence, which ends where the answers begin; None: endpoints wrote them.
        model: that wrote them; None likewise.
        models: the pool; None likewise.
        measures: what was measured, by name, for the request's usage.
        notes: for the person who reads the answer.
        scores: what each answer was chosen by, after a choice, see `Aggregator.score`; None: by nothing of the kind.
        votes: weight of the vote of each for its final answer; None: there was no vote.
        groups: meanings that each was found to have, in place of final answers; None: none were looked for.
    """

    answers: Items[Candidate]
    seed: int = 0
    seq: Sequence | None = None
    model: Model | None = None
    models: ModelPool | None = None
    measures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scores: list[float] | None = None
    votes: list[float] | None = None
    groups: list[str] | None = None

    @property
    def context(self) -> tuple[Sequence, Model, ModelPool]:
        """The sequence, the model and the pool of answers that were written here.

        Raises:
            ValueError: endpoints wrote them.
        """
        if self.seq is None or self.model is None or self.models is None:
            raise ValueError("answers of endpoints have neither tokens nor a model")
        return self.seq, self.model, self.models

    @property
    def likelihoods(self) -> list[float]:
        """Mean log-probability of each answer's tokens, nats."""
        return [each.mean_logprob for each in self.answers]


class Aggregator(Part):
    """Aggregator of one request's answers.

    Attributes:
        stops_early: whether `decided` is asked whenever an answer ends. The others are then cancelled: they are not
            chosen from, and their tokens are counted as discarded.
        reads_logprobs: whether it is of no use without log-probabilities.
        score: what it leaves in `AnswerSet.scores`, with its unit; "": nothing.
    """

    where = FIELD
    stops_early: bool = False
    reads_logprobs: bool = False
    score: ClassVar[str] = ""

    @property
    def over_text(self) -> bool:
        """Whether texts and log-probabilities are all it needs, so that endpoints may have written the answers."""
        return False

    def rule(self) -> StopRule | None:
        """Make a rule that reads each token of one answer as it is written, and never ends it; None: none is needed.

        It runs next to the model, and stands in `Candidate.rule` afterwards.
        """
        return None

    def decided(self, ended: Items[Candidate], waiting: int) -> bool:
        """Return whether the choice no longer depends on answers that are still being written.

        Args:
            ended: answers so far, at least one.
            waiting: how many are being written, at least one.
        """
        return False

    @abstractmethod
    async def choose(self, group: AnswerSet) -> int:
        """Return the place of the answer to show; leave in `group` what decided, scores or votes.

        If it fails, the likeliest answer is shown, with a note.
        """


class ValuedAggregator(Aggregator):
    """Aggregator that shows the answer of the greatest value; of equal ones the first. Values are scores."""

    @abstractmethod
    async def values(self, group: AnswerSet) -> list[float]:
        """Return the value of each answer: the greater the better."""

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        group.scores = await self.values(group)
        return best(group.scores)


def best(values: Items[float]) -> int:
    """Return the place of the greatest value; of equal ones the first. A NaN is less than any number."""
    return max(range(len(values)), key=lambda place: (values[place] == values[place], values[place]))


def make_aggregator(choice: PartChoice, field: str = FIELD) -> Aggregator:
    """Make the aggregator that a field chose.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists; INVALID_ARGUMENT, naming the parameter.
    """
    made: Aggregator = choice.make(PACKAGE, field)
    return made


def make_valued(choice: PartChoice, field: str) -> ValuedAggregator:
    """Make an aggregator that gives values.

    Raises:
        TurnoutError: as `make_aggregator`; INVALID_ARGUMENT: it gives none.
    """
    made: Any = make_aggregator(choice, field)
    if not isinstance(made, ValuedAggregator):
        raise invalid(field, f"{choice.name!r} votes or draws, and gives answers no values")
    return made
