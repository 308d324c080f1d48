"""A model of the pool is asked whether one answer implies the other."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.candidates import reading
from decoding.entailment.base import EntailmentJudge
from decoding.model import ModelPool, ReadSpec
from decoding.text import codec_of, continue_with, yes_and_no
from turnout.errors import FieldError
from turnout.registry import MethodParams, ModelRole

QUESTION = (
    "\n\nTwo possible answers to the question above.\nAnswer 1: {first}\nAnswer 2: {second}\n"
    "Does answer 1 semantically entail answer 2? Answer yes or no:"
)
PLACES = re.compile(r"\{(?:first|second)\}")


class AskedParams(MethodParams):
    """Parameters of `asked`."""

    model: Annotated[ModelRole, Field(description="role of the model that is asked")] = "large"
    question: Annotated[
        str,
        Field(
            min_length=1,
            max_length=2000,
            description="put after the request's prompt; {first} and {second} stand in it",
        ),
    ] = QUESTION

    @model_validator(mode="after")
    def _check_question(self) -> Self:
        if len(set(PLACES.findall(self.question))) < 2:
            raise FieldError("question", "must contain {first} and {second}")
        return self


class Asked(EntailmentJudge):
    """Yes if P(yes) > P(no) for the next token after prompt and question: one prefill, nothing is generated.

    A pair that has no room in the model's context counts as different.
    """

    Params = AskedParams
    params: AskedParams

    def check(self, models: ModelPool) -> None:
        """Tokenise yes and no.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the tokenizer cannot tell them apart by their first token, or there is no
                model with the role.
        """
        models.by_role(self.params.model)
        self._codec = codec_of(models, self.where)
        self._yes, self._no = yes_and_no(self._codec, self.where)

    async def entails(self, group: AnswerSet, first: Candidate, second: Candidate) -> bool:
        """See `EntailmentJudge.entails`."""
        seq, _, models = group.context
        model = models.by_role(self.params.model)
        said = {"{first}": first.text.strip(), "{second}": second.text.strip()}
        text = PLACES.sub(lambda found: said[found[0]], self.params.question)  # in one go: texts may hold braces too
        tokens = continue_with(self._codec, text, parse_special=False)
        prompt = seq.tokens[: seq.num_prompt_tokens]
        if len(prompt) + len(tokens) > model.max_length:
            return False
        with reading(model, seq, prompt) as base:
            [row] = await model.extend(base, tokens, ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        logits = row.logits.float()
        return bool(logits[self._yes].logsumexp(0) > logits[self._no].logsumexp(0))


PART = Asked
