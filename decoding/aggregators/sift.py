"""SIFT: the answer that a prediction from the question with a "sticker" of its key facts agrees with (paper #218)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from decoding.aggregators.base import LIKELIHOOD, Aggregator, AnswerSet, Candidate, best
from decoding.aggregators.majority import known, most_voted
from decoding.candidates import MARK
from decoding.model import ModelPool
from decoding.noise import derive_seed
from decoding.other_prompts import write_after
from decoding.text import codec_of, continue_with
from turnout.registry import MethodParams

FIRST_SEED = 3 << 16  # of what is written here: no answer and no sample of a request has one
EXTRACT = "\n\nThe conditions in the question above, one a line, then what is asked:\n"
PREDICT = "\n\nThe conditions in the question above, then what is asked:\n{sticker}\n\n"
ALONE = "Conditions, then what is asked:\n{sticker}\n\n"
REVISE = (
    "\n\nThe conditions in the question above, then what is asked:\n{sticker}\n\n"
    "The same, corrected where it differs from the question:\n"
)
INVERT = "An answer to a question:\n{answer}\n\nThe conditions in that question, one a line, then what is asked:\n"


class SiftParams(MethodParams):
    """Parameters of `sift`."""

    view: Annotated[
        Literal["question", "sticker"],
        Field(
            description="what must agree with the prediction from question and sticker: question: one of the answers"
            " drawn; sticker: a prediction from the sticker alone"
        ),
    ] = "question"
    temperature: Annotated[
        FiniteFloat, Field(ge=0.0, le=2.0, description="stickers and predictions are drawn at; 0 is greedy")
    ] = 0.0
    longest: Annotated[int, Field(ge=1, le=1_000_000, description="tokens of a sticker at most")] = 256
    mark: Annotated[
        str,
        Field(
            max_length=64,
            description="a prediction's final answer is the line after the last of this, else the last line; as the"
            " method's own `mark`",
        ),
    ] = MARK


class Sift(Aggregator):
    """Paper #218 (SIFT: Grounding LLM Reasoning in Contexts via Stickers), which chooses among the answers drawn.

    A sticker is the model's own list of the question's conditions, with the question. Three stages follow, until there
    is consensus: the sticker is extracted; it is corrected against the question (forward); it is written anew from the
    last prediction and corrected (inverse). Each ends with a prediction from the question and the sticker. There is
    consensus if its final answer is that of the other view (`view`), and of an answer that was drawn: the likeliest
    such answer is shown. Without consensus it is `majority`.
    """

    Params = SiftParams
    params: SiftParams
    papers = (218,)
    score = LIKELIHOOD

    def check(self, models: ModelPool) -> None:
        """See `Part.check`: stickers are texts."""
        self._codec = codec_of(models, self.where)

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`; the measures are the stage of the consensus, 0 without, and what was written."""
        finals, likely = [each.final for each in group.answers], group.likelihoods
        self._written, found = 0, 0
        sticker = predicted = final = ""
        for stage in (1, 2, 3):
            sticker = await self._sticker(group, stage, sticker, predicted)
            prediction = await self._write(group, PREDICT.replace("{sticker}", sticker))
            predicted, final = prediction.text.strip(), prediction.final
            if final and final in finals and await self._agrees(group, sticker, final):
                found = stage
                break
        group.measures.update(sift_stage=float(found), sift_generations=float(self._written))
        group.scores, group.votes = known(likely), None if found else [1.0] * len(finals)
        if not found:
            return most_voted(likely, finals)
        places = [place for place, each in enumerate(finals) if each == final]
        return places[best([likely[place] for place in places])]

    async def _sticker(self, group: AnswerSet, stage: int, sticker: str, predicted: str) -> str:
        longest = self.params.longest
        if stage == 1:
            return (await self._write(group, EXTRACT, longest)).text.strip()
        if stage == 3:
            sticker = (await self._write(group, INVERT.replace("{answer}", predicted), longest, False)).text.strip()
        return (await self._write(group, REVISE.replace("{sticker}", sticker), longest)).text.strip()

    async def _agrees(self, group: AnswerSet, sticker: str, final: str) -> bool:
        """Whether the other view has this final answer, which is that of an answer drawn from the question."""
        if self.params.view == "question":
            return True
        return (await self._write(group, ALONE.replace("{sticker}", sticker), question=False)).final == final

    async def _write(self, group: AnswerSet, text: str, longest: int | None = None, question: bool = True) -> Candidate:
        """Write on from a text, which stands after the question or alone."""
        seq, params = group.context[0], self.params
        own = continue_with(self._codec, text, parse_special=False) if question else self._codec.encode(text, False)
        self._written += 1
        seed = derive_seed(seq.seed, FIRST_SEED + self._written)
        before = seq.tokens if question else ()
        return await write_after(group, (*before, *own), seed, params.temperature, longest, params.mark)


PART = Sift
