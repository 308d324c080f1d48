"""EM-INF: logits moved at each step so that their entropy falls, but not below a floor (paper #24)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, FiniteFloat

from decoding.processors.base import Batch, LogitsProcessor, Stage, row_entropy
from turnout.registry import MethodParams

BISECTIONS = 60
LEAST, MOST = 0.01, 1.0  # temperatures that the bisection searches
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam


class EntropyMinimisationParams(MethodParams):
    """Parameters."""

    form: Annotated[
        Literal["gradient", "temperature"],
        Field(description="gradient: Adam on the logits; temperature: one temperature that reaches the entropy wanted"),
    ] = "gradient"
    steps: Annotated[int, Field(ge=0, le=100, description="gradient: most steps of Adam; 0 is off")] = 5
    rate: Annotated[FiniteFloat, Field(gt=0.0, le=10.0, description="gradient: learning rate")] = 0.1
    kl: Annotated[FiniteFloat, Field(ge=0.0, le=10.0, description="gradient: weight of the KL to the model's own")] = (
        0.001
    )
    floor: Annotated[FiniteFloat, Field(ge=0.0, description="gradient: nats of entropy below which a row is left")] = (
        0.3
    )
    ratio: Annotated[
        FiniteFloat, Field(gt=0.0, le=1.0, description="temperature: share of the entropy that is left; 1 is off")
    ] = 0.2


class EntropyMinimisation(LogitsProcessor):
    """EM-INF (paper #24), in both forms; rows of a batch are optimised each for itself."""

    Params = EntropyMinimisationParams
    params: EntropyMinimisationParams
    papers = (24,)
    stage = Stage.TEMPERATURE
    keeps_best = True
    off: ClassVar = {"steps": 0, "ratio": 1.0}

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        by_gradient = [part.params.form == "gradient" for part in parts]
        if any(by_gradient):
            moved = _descend(logits, [part.params for part in parts], batch)
            logits = torch.where(batch.tensor(by_gradient, torch.bool), moved, logits)
        if not all(by_gradient):
            ratio = batch.tensor(
                [1.0 if by else part.params.ratio for by, part in zip(by_gradient, parts, strict=True)]
            )
            logits = torch.where(ratio < 1.0, logits / _temperature(logits, ratio), logits)
        return logits


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """Nats, [rows, 1]."""
    return row_entropy(logits.softmax(-1))


def _descend(logits: torch.Tensor, params: Rows[EntropyMinimisationParams], batch: Batch) -> torch.Tensor:
    """Adam on H(p) + kl * KL(own || p), each row until its entropy is below its floor. Excluded tokens stay so."""
    steps = batch.tensor([each.steps for each in params])
    rate = batch.tensor([each.rate for each in params])
    weight = batch.tensor([each.kl for each in params])
    floor = batch.tensor([each.floor for each in params])
    own = logits.softmax(-1)
    moved, first, second = logits, torch.zeros_like(logits), torch.zeros_like(logits)
    for step in range(1, max(each.steps for each in params) + 1):
        probs = moved.softmax(-1)
        entropy = row_entropy(probs)
        active = (entropy >= floor) & (step <= steps)
        if not bool(active.any()):
            break
        logp = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
        gradient = -probs * (logp + entropy) + weight * (probs - own)
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient.square()
        size = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
        moved = torch.where(active, moved - rate * (first / (1 - BETAS[0] ** step)) / size, moved)
    return moved


def _temperature(logits: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The temperature of each row, [rows, 1], at which its entropy is that share of what it is."""
    target = (ratio * _entropy(logits)).clamp(min=1e-6)
    low, high = torch.full_like(ratio, LEAST), torch.full_like(ratio, MOST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = _entropy(logits / middle) > target
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


PART = EntropyMinimisation
