"""SAVCD on texts: away from what the context says once the model has chosen how to distort it (paper #0)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Ask, Asked, Contrast, Stream, StreamRows, outside
from decoding.model import Model, ModelPool
from decoding.processors.base import row_entropy
from turnout.errors import invalid
from turnout.registry import MethodParams

CHOICE = "choice"
DROP, SHUFFLE, MASK, OPPOSITE = "drop", "shuffle", "mask", "opposite"
DISTORTIONS = (DROP, SHUFFLE, MASK, OPPOSITE)
WRONGLY = "Answer the question wrongly: say the opposite of what the text says."
BLANK = "___"
QUESTION = """A text is going to be distorted so that a question about it can no longer be answered from it.
Choose the distortion that destroys exactly what the question needs.

drop: removes the text. Destroys everything, also what it is about.
shuffle: puts its sentences into another order. Destroys order, causes and steps; keeps names and numbers.
mask: blanks out names and numbers. Destroys who, when, where and how many; keeps what happens.
opposite: tells the reader to say the opposite. Destroys yes or no, and which of two.

Question: Who signed the treaty?
Reason: it asks for a name. Choice: mask
Question: What happened after the fire?
Reason: it asks for an order of events. Choice: shuffle
Question: Is the bridge open?
Reason: the answer is yes or no. Choice: opposite
Question: Summarise the text.
Reason: it needs all of the text. Choice: drop
Question: {question}
Reason:"""
NAMED = re.compile(rf"choice\s*:\s*\W*({'|'.join(DISTORTIONS)})\b", re.IGNORECASE)
ANY = re.compile(rf"\b({'|'.join(DISTORTIONS)})\b", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
# Numbers, and words with a capital that do not begin a sentence, or before another one.
FACT = re.compile(r"\d[\d.,:/-]*\d|\d|\b[A-Z]\w*(?=\s+[A-Z])|(?<![.!?]\s)(?<!^)(?<!\n)\b[A-Z]\w*")


class SavcdParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"choice_tokens": 4}

    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="of the contrast; 0 with max_share 0 is off")] = (
        1.0
    )
    distortion: Annotated[
        Literal["auto", "drop", "shuffle", "mask", "opposite"],
        Field(description="what happens to the context of the other stream; auto: the model chooses by the question"),
    ] = "auto"
    choice_tokens: Annotated[int, Field(ge=1, le=1024, description="most tokens in which it reasons and chooses")] = 32
    max_share: Annotated[
        FiniteFloat,
        Field(ge=0.0, le=1.0, description="share of the greatest probability a token must have where p is certain"),
    ] = 0.1
    gamma: Annotated[
        FiniteFloat, Field(gt=0.0, le=10.0, description="how fast that share falls as the entropy rises")
    ] = 1.0


class Savcd(Contrast):
    """Paper #0: (1 + alpha) * logits - alpha * logits under a distorted context, among plausible tokens.

    The paper distorts an image, and this a text: the answering model reads the question and chooses, after definitions
    and examples, whether the context is dropped, its sentences shuffled, its names and numbers blanked out, or the
    reader asked to say the opposite; `drop` where it names none. A token stays if p >= share * its greatest, with the
    share max_share * (1 - entropy / log(vocabulary)) ** gamma. The paper's formula is not known to us; this is ours.
    """

    papers = (0,)
    Params = SavcdParams
    params: SavcdParams
    off: ClassVar = {"alpha": 0.0, "max_share": 0.0}

    @property
    def _asks(self) -> bool:
        return self.params.distortion == "auto"

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        if not asked.context:
            raise invalid("context", f"contrast {self.name!r} needs it: the text that is distorted")
        if not self._asks:
            return {self.params.distortion: distorted(asked, self.params.distortion)}
        question = Asked(QUESTION.format(question=asked.question.strip()))
        return {CHOICE: question, **{name: distorted(asked, name) for name in DISTORTIONS}}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(prompt=DROP if self._asks else self.params.distortion),)

    async def decide(self, ask: Ask) -> Mapping[str, str]:
        """See `Contrast.decide`."""
        return {DROP: chosen(await ask(CHOICE, self.params.choice_tokens))} if self._asks else {}

    @property
    def decide_tokens(self) -> int:
        """See `Contrast.decide_tokens`."""
        return self.params.choice_tokens if self._asks else 0

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        alpha, main = self.params.alpha, logits[:, 0]
        share = adaptive_share(main, self.params.max_share, self.params.gamma)
        kept = main >= main.amax(-1, keepdim=True) + share.log()
        return outside((1.0 + alpha) * main - alpha * logits[:, 1], kept, main)


def adaptive_share(main: torch.Tensor, most: float, gamma: float) -> torch.Tensor:
    """Share of the greatest probability that tokens must have: logits [rows, vocab] -> float32 [rows, 1]."""
    entropy = row_entropy(main.softmax(-1))
    certain = 1.0 - entropy / torch.tensor(float(main.shape[-1])).log()
    return most * certain.clamp(0.0, 1.0) ** gamma


def chosen(text: str) -> str:
    """Return the distortion that a model's reasoning chooses: as `Choice: ...`, else the first it names, else drop."""
    found = NAMED.search(text) or ANY.search(text)
    return found.group(1).lower() if found is not None else DROP


def distorted(asked: Asked, how: str) -> Asked:
    """Distort the context of a request, always in the same way."""
    match how:
        case "shuffle":
            sentences = [each for each in SENTENCE.split(asked.context) if each.strip()]
            order = sentences[:]
            random.Random(asked.context).shuffle(order)
            if order == sentences:
                order = order[1:] + order[:1]
            return replace(asked, context=" ".join(order))
        case "mask":
            return replace(asked, context=FACT.sub(BLANK, asked.context))
        case "opposite":
            return replace(asked, system="\n".join(each for each in (asked.system, WRONGLY) if each))
        case _:
            return replace(asked, context="")


PART = Savcd
