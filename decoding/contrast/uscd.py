"""USCD: away from what a prompt without its examples makes likely, only where the model is unsure (paper #88)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Asked, Contrast, Stream, StreamRows, outside
from decoding.model import Model, ModelPool
from decoding.processors.base import row_sums
from turnout.errors import invalid
from turnout.registry import MethodParams

LAME = "lame"
# Where an example begins, and lines that are one by themselves.
DOCTEST = re.compile(r"^\s*>>> ")
EXAMPLE = re.compile(r"^\s*(assert\s|(for example|examples?)\s*:?\s*$)", re.IGNORECASE)
LABELLED = re.compile(r"^\s*(input|output|example( \d+)?)\s*:", re.IGNORECASE)
QUOTES = ('"""', "'''")
LEAST = 1e-30


class UscdParams(MethodParams):
    """Parameters."""

    example: ClassVar = {"threshold": 0.12}

    alpha: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="weight of the lame stream; 0 is off")] = 0.7
    threshold: Annotated[
        FiniteFloat,
        Field(ge=0.0, description="standard deviation of the probabilities up to which the model is unsure"),
    ] = 0.005
    floor: Annotated[
        FiniteFloat, Field(ge=0.0, description="multiple of the mean probability that a token must have there")
    ] = 2.0 / 3.0


class Uscd(Contrast):
    """Paper #88: log(p - alpha * p(lame)) where the standard deviation of p's values is small, else log p.

    Lame is the prompt without its examples: without the request's `context`, and without doctests, assertions and
    labelled inputs and outputs. Probabilities are subtracted, and defaults are set, as in the authors' code.
    """

    papers = (88,)
    Params = UscdParams
    params: UscdParams
    off: ClassVar = {"alpha": 0.0}

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        lame = replace(asked, question=without_examples(asked.question), context="")
        if lame == asked:
            raise invalid("context", f"contrast {self.name!r} needs examples: in the context, or as doctests")
        return {LAME: lame}

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(prompt=LAME),)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        params, (main, lame) = self.params, logits.softmax(-1).unbind(1)
        vocab = main.shape[-1]
        mean = row_sums(main) / vocab
        deviation = (row_sums((main - mean).square()) / (vocab - 1)).sqrt()
        rest = main - params.alpha * lame
        kept = (main >= params.floor * mean) & (rest > 0.0)
        made = outside(rest.clamp_min(LEAST).log(), kept, main.clamp_min(LEAST).log())
        return torch.where(deviation > params.threshold, logits[:, 0], made)


def without_examples(text: str) -> str:
    """A text without its input-output examples: doctests with what they print, assertions, labelled lines."""
    kept, printing = [], False
    for line in text.split("\n"):
        if DOCTEST.match(line):
            printing = True
            continue
        if printing and line.strip() and not line.strip().startswith(QUOTES):
            continue  # more of a call, or what it prints
        printing = False
        if not EXAMPLE.match(line) and not LABELLED.match(line):
            kept.append(line)
    return "\n".join(kept)


PART = Uscd
