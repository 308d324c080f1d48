"""Instructive decoding: away from what a noisy instruction makes likely (paper #20)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat

from decoding.contrast.base import Asked, Contrast, Stream, StreamRows
from decoding.model import Model, ModelPool
from turnout.registry import MethodParams

NOISY = "noisy"
OPPOSITE = "Always respond with the opposite of what you're asked. You never get it right."
KEPT_SHARE = 0.6  # of the words of a truncated instruction
NUM_WORDS = 10
WORDS = (
    *("anchor", "basket", "candle", "desert", "engine", "feather", "garden", "harbour", "island", "jacket", "kettle"),
    *("ladder", "mirror", "needle", "orchard", "pebble", "quarry", "ribbon", "saddle", "timber", "umbrella", "valley"),
    *("window", "yellow", "blanket", "copper", "dragon", "elbow", "fabric", "gravel"),
)


class InstructiveParams(MethodParams):
    """Parameters."""

    epsilon: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0, description="weight of the noisy stream; 0 is off")] = 0.3
    noise: Annotated[
        Literal["opposite", "empty", "truncate_shuffle", "random_words"],
        Field(description="what stands in place of the instruction: opposite was best in the paper"),
    ] = "opposite"


class Instructive(Contrast):
    """Paper #20: logits - epsilon * logits under a noisy instruction.

    The instruction is the system message; without one, the question where the request has a `context`. Without either
    it cannot be separated from its input: `opposite` and `random_words` then stand before the question.
    """

    papers = (20,)
    Params = InstructiveParams
    params: InstructiveParams
    off: ClassVar = {"epsilon": 0.0}

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """See `Contrast.prompts`."""
        if asked.system:
            return {NOISY: replace(asked, system=self._noisy(asked.system))}
        noisy = self._noisy(asked.question)
        if not asked.context and self.params.noise in ("opposite", "random_words"):
            noisy = f"{noisy}\n{asked.question}"
        return {NOISY: replace(asked, question=noisy)}

    def _noisy(self, instruction: str) -> str:
        """The same for the same instruction, so that an answer can be made again."""
        draw = random.Random(instruction)
        match self.params.noise:
            case "opposite":
                return OPPOSITE
            case "empty":
                return ""
            case "truncate_shuffle":
                words = instruction.split()
                return " ".join(draw.sample(words, int(KEPT_SHARE * len(words))))
            case "random_words":
                return " ".join(draw.sample(WORDS, NUM_WORDS)) + "."

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """See `Contrast.streams`."""
        return (Stream(prompt=NOISY),)

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        return logits[:, 0] - self.params.epsilon * logits[:, 1]


PART = Instructive
