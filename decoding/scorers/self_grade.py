"""The large model grades a step with one digit."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, FiniteFloat

from decoding.model import ModelPool, ReadSpec
from decoding.scorers.base import Scorer
from decoding.sequence import Sequence
from decoding.steps import without_end
from decoding.text import codec_of, continuation_ids, digit_values
from turnout.errors import invalid
from turnout.registry import MethodParams

WHERE = "method.params.scorer"


class SelfGradeParams(MethodParams):
    """Parameters of `self_grade`."""

    threshold: Annotated[
        FiniteFloat, Field(ge=0.0, le=10.0, description="least grade of a step that stays; 0 keeps all, 10 none")
    ] = 7.0
    reading: Annotated[
        Literal["greedy", "expected"],
        Field(description="the most probable token, 0 where it is no digit; or the mean over the digits"),
    ] = "greedy"
    question: Annotated[
        str,
        Field(
            min_length=1, max_length=2000, description="put after the step; the next token is the grade, from 0 to 9"
        ),
    ] = "\n\nGrade the last step above by its correctness alone, from 0 (wrong) to 9 (right). Grade: "


class SelfGradeScorer(Scorer):
    """Paper #221 (SpecReason): the large model reads step and question in one prefill; its next token is the grade.

    It keeps what it read: of an accepted step only the question is dropped, and nothing is read again. A step that has
    no room for the question in the model's context is graded 0.
    """

    Params = SelfGradeParams
    threshold = "threshold"
    keeps_none = 10.0
    greatest = 9.0
    papers = (221,)
    params: SelfGradeParams

    def check(self, models: ModelPool) -> None:
        """Tokenise the question.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the tokenizer lacks what is needed.
        """
        self._question = continuation_ids(codec_of(models, WHERE), self.params.question)
        self._digits = digit_values(models.tokenizer, models.large.vocab_size)
        missing = sorted(set(range(10)) - set(self._digits.values()))
        if missing:
            raise invalid(WHERE, f"needs a token for every digit; the tokenizer has none for {missing}")

    async def score(self, models: ModelPool, seq: Sequence, step: tuple[int, ...]) -> float:
        """A grade from 0 to 9; one forward of the large model."""
        text = without_end(step, seq.end_ids) + self._question
        if len(seq) + len(text) > models.large.max_length:
            return 0.0
        if self.params.reading == "greedy":
            [row] = await models.large.extend(seq, text, ReadSpec(draw=None, top=1))
            return float(self._digits.get(row.top[0][0], 0))
        [row] = await models.large.extend(seq, text, ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        ids = torch.tensor(list(self._digits), device=row.logits.device)
        values = torch.tensor(list(self._digits.values()), dtype=torch.float32)
        return float(row.logits[ids].softmax(-1).cpu() @ values)

    def chance(self, score: float) -> float:
        """1 from the threshold on, else 0."""
        return 1.0 if score >= self.params.threshold else 0.0


PART = SelfGradeScorer
