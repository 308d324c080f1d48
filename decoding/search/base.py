"""The slot of searches: which hypotheses are read next, what follows them, what is kept, and when it is enough.

A module here assigns its class to `PART`; requests of `search` choose it by file name. It is run by
`decoding.search_kernel`, which reads hypotheses in one batch, and forks and releases their sequences.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from decoding.model import Model, ModelPool, Readout, ReadSpec
from decoding.parts import Part
from decoding.sequence import Sequence
from turnout.types import Token

if TYPE_CHECKING:
    from decoding.search._graph import Lattice

PACKAGE = "decoding.search"
MOST_OPEN = 1 << 18  # hypotheses of a request that may wait at once


@dataclass(slots=True, eq=False)
class Hypothesis:
    """An answer, or the beginning of one, as the last token of its parent's continuation.

    Attributes:
        parent: the beginning that it continues; None: it is the prompt.
        token: its last token; -1 for the prompt.
        logp: sum of the log-probabilities of its tokens in the processed distribution, nats.
        length: number of its tokens.
        score: what hypotheses are ordered by, the greatest first; the search sets it.
        state: of the search.
        ended: whether nothing follows it: it ends with an end token or a stop string, or is as long as it may be.
        row: what its token was read from; only while it is decided whether it is kept.
        details: its token as the answer reports it, once it is kept.
        seq: the tokens so far with a model's cache, while it is at hand.
        was_read: whether a model has read its token.
        merged: the hypothesis that its token was read for, where others before it lead there as well; None: itself.
    """

    parent: Hypothesis | None
    token: int = -1
    logp: float = 0.0
    length: int = 0
    score: float = 0.0
    state: Any = None
    ended: bool = False
    row: Readout | None = None
    details: Token | None = None
    seq: Sequence | None = None
    was_read: bool = False
    merged: Hypothesis | None = None

    @property
    def path(self) -> list[Hypothesis]:
        """Hypotheses from the first token to this one."""
        return self.last(self.length)

    def last(self, count: int) -> list[Hypothesis]:
        """Return the last `count` hypotheses of its path, or all of them, in their order."""
        found: list[Hypothesis] = []
        here: Hypothesis | None = self
        while len(found) < count and here is not None and here.parent is not None:
            found.append(here)
            here = here.parent
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """Its token ids."""
        return [each.token for each in self.path]

    def child(self, token: int, logprob: float, row: Readout | None = None, state: Any = None) -> Hypothesis:
        """Return it with one more token, whose log-probability is given in nats; the score is still to be set."""
        return Hypothesis(self, token, self.logp + logprob, self.length + 1, state=state, row=row)


@dataclass(frozen=True, slots=True)
class SearchTask:
    """Bounds of a search.

    Attributes:
        width: hypotheses that are followed at once.
        answers: how many are asked for, at most `width`.
        max_tokens: of an answer.
        end_ids: tokens that end one.
        vocab_size: ids are below it.
        model: the one that answers.
        prompt: sequence of the request; nothing is appended to it, and the work is charged to it.
        is_free: whether no structure or ban says, by the tokens before, what may follow.
    """

    width: int
    answers: int
    max_tokens: int
    end_ids: frozenset[int]
    vocab_size: int
    model: Model
    prompt: Sequence
    is_free: bool = True


@dataclass(frozen=True, slots=True)
class Selection:
    """Hypotheses that are kept: those that go on, and those that have ended. All others are forgotten."""

    open: list[Hypothesis]
    done: list[Hypothesis]


class Search(Part):
    """A search, made for one request.

    Attributes:
        task: its bounds, after `begin`.
        score: what the scores of answers are, with their unit.
    """

    where = "method.params.search"
    score: ClassVar[str] = "log-probability divided by the length to the power of `length_penalty`, nats"
    task: SearchTask

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """Take the bounds; return the state of the empty answer.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it cannot search within them.
        """
        self.task = task
        return None

    @property
    def fanout(self) -> int:
        """Most continuations of one hypothesis that can matter: enough to follow `width`, whatever ends with them."""
        return min(max(2, 1 + len(self.task.end_ids)) * self.task.width, self.task.vocab_size)

    def reads(self, hypothesis: Hypothesis) -> ReadSpec:
        """Return what to read after a hypothesis."""
        return ReadSpec(draw=None, top_processed=self.fanout)

    def pick(self, open_: list[Hypothesis]) -> list[Hypothesis]:
        """Choose the hypotheses that are read next, all in one batch; none: the search is over."""
        return open_

    def expand(self, read: list[Hypothesis], rows: Items[Readout]) -> list[Hypothesis]:
        """Return continuations of hypotheses that were read; excluded tokens have a log-probability of -inf.

        Args:
            read: what `pick` chose.
            rows: after each of them.
        """
        return [
            each.child(token, logprob, row)
            for each, row in zip(read, rows, strict=True)
            for token, logprob in row.top_processed
            if logprob > -math.inf
        ]

    async def rescore(self, read: list[Hypothesis], candidates: list[Hypothesis]) -> None:
        """Ask other models about hypotheses that were read, or their continuations, before some are selected.

        Args:
            read: what `pick` chose.
            candidates: what `expand` returned; `ended` is set.

        Raises:
            TurnoutError: OUT_OF_RANGE: they do not fit the context or the memory of such a model.
        """
        return

    def close(self) -> None:
        """Release what other models hold for it, and charge their work; called once, also after a failure."""
        return

    @abstractmethod
    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """Choose what is kept, set its scores, merge what is the same.

        Args:
            candidates: what `expand` returned; `ended` is set.
            open_: hypotheses that go on, those that were read included.
            done: those that have ended.
        """

    @abstractmethod
    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """Return whether the answers are found."""

    def best(self, open_: list[Hypothesis], done: list[Hypothesis]) -> list[Hypothesis]:
        """Return hypotheses to answer with, the best first; those that have not ended come last."""
        return [*ordered(done), *ordered(open_)]

    @property
    def lattice(self) -> Lattice | None:
        """The graph of merged hypotheses, of which its answers are ways; None: it merges none."""
        return None

    def report(self) -> dict[str, Any] | None:
        """Return what it found besides the answers, as JSON; None: nothing."""
        return None


def ordered(hypotheses: Collection[Hypothesis]) -> list[Hypothesis]:
    """Order by score, the greatest first; equal ones stay as they are."""
    return sorted(hypotheses, key=lambda each: -each.score)
