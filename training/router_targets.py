"""What a probe may learn from outcomes: who answers rightly, which strategy fits, or what each further sample adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch.nn import functional

from router.allocation import reward_marginals
from router.difficulty.probe import MARGINALS_PROBE, ROUTER_LABELS, ROUTER_PROBE, STRATEGY_PROBE
from router.difficulty.scaling import Law
from router.difficulty.strategies import STRATEGIES, LabelRule
from training.router_outcomes import ROLES, Outcome, Outcomes, Role
from turnout.errors import invalid

STRATEGY_SAMPLES = 10  # of the paper: answers whose share of right ones and entropy tell the strategy


class Target(Protocol):
    """What a probe predicts.

    Attributes:
        kind: of the artifact.
        labels: names of the predictions.
        law: how outputs become predictions.
        roles: models whose answers the outcomes are about.
    """

    kind: ClassVar[str]
    law: ClassVar[Law]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what it predicts."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What a reader of the artifact must know of it."""
        ...

    def label(self, row: Outcome) -> list[float]:
        """What is to be predicted for a prompt, one number for each of `labels`."""
        ...

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of outputs and labels [n, k]: a scalar."""
        ...

    def check(self, labels: torch.Tensor) -> None:
        """Refuse labels [n, k] that nothing can be learnt from."""
        ...

    def doubt(self, outcomes: Outcomes) -> str:
        """What makes the labels poor ones; "" where nothing does."""
        ...


@dataclass(frozen=True)
class WhoIsRight:
    """The chance of a right answer by each model (paper #45: cross-entropy with soft labels)."""

    kind: ClassVar[str] = ROUTER_PROBE
    law: ClassVar[Law] = "chances"
    labels: tuple[str, ...] = ROUTER_LABELS

    @property
    def settings(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def label(self, row: Outcome) -> list[float]:
        """Shares of right answers, small and large."""
        found = [row.reward(role) for role in ROLES]
        for role, value in zip(ROLES, found, strict=True):
            if not 0.0 <= value <= 1.0:
                raise invalid(
                    "outcomes",
                    f"the mean reward of samples_{role} is {value:g} for prompt {row.key[:40]!r}; chances need"
                    " rewards from 0 to 1 (other rewards: --predict marginals)",
                )
        return found

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with soft labels."""
        return functional.binary_cross_entropy_with_logits(outputs, labels)

    def check(self, labels: torch.Tensor) -> None:
        """Refuse outcomes in which no prompt tells the models apart differently from the others."""
        gain = labels[:, 1] - labels[:, 0]
        if bool((gain == gain[0]).all()):
            raise invalid(
                "outcomes",
                f"labels are all alike: in each of the {len(gain)} rows the large model is better by {gain[0]:g};"
                " there is nothing to route by",
            )

    def doubt(self, outcomes: Outcomes) -> str:
        """One answer, greedy or not, is a label, if a rough one: none."""
        return ""


@dataclass(frozen=True)
class WhichStrategy:
    """Which strategy a prompt calls for (paper #52, DiffAdapt: cross-entropy).

    Attributes:
        role: whose answers are looked at: the model that will be asked.
        rule: from their accuracy and entropy to the label.
    """

    role: Role = "small"
    rule: LabelRule = field(default_factory=LabelRule)
    kind: ClassVar[str] = STRATEGY_PROBE
    law: ClassVar[Law] = "choice"
    labels: tuple[str, ...] = tuple(STRATEGIES)

    @property
    def settings(self) -> dict[str, Any]:
        """Whom it is about."""
        return {"role": self.role}

    def label(self, row: Outcome) -> list[float]:
        """One-hot."""
        entropy = row.mean(self.role, "entropy_bits")
        if entropy is None:
            raise invalid(
                "outcomes",
                f"samples_{self.role} of prompt {row.key[:40]!r} lack entropy_bits, which strategies are chosen by",
            )
        name = self.rule.label(row.reward(self.role), entropy)
        return [float(name == each) for each in self.labels]

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        return -(labels * outputs.log_softmax(-1)).sum(-1).mean()

    def check(self, labels: torch.Tensor) -> None:
        """Refuse outcomes that all call for one strategy."""
        (found,) = torch.nonzero(labels.sum(0), as_tuple=True)
        if len(found) < 2:
            name = self.labels[int(found[0])]
            raise invalid(
                "outcomes", f"labels are all alike: all {len(labels)} rows call for {name!r}; nothing to choose"
            )

    def doubt(self, outcomes: Outcomes) -> str:
        """Check that there are enough answers: strategies are chosen by shares of right ones, which few make coarse."""
        fewest = min(len(row.samples(self.role)) for row in outcomes.rows)
        if fewest >= STRATEGY_SAMPLES:
            return ""
        return (
            f"some prompts have {fewest} of samples_{self.role}, {STRATEGY_SAMPLES} are usual: the share of right ones"
            f" is known to {1 / fewest:.0%} there, and a label depends on whether it is above"
            f" {self.rule.lost_accuracy:.0%} or {self.rule.sure_accuracy:.0%}"
        )


@dataclass(frozen=True)
class WhatSamplesAdd:
    """What each further sample adds to the best reward (paper #45, real-valued rewards: squared error).

    Attributes:
        most: samples.
        role: whose.
    """

    most: int = 4
    role: Role = "large"
    kind: ClassVar[str] = MARGINALS_PROBE
    law: ClassVar[Law] = "values"

    @property
    def labels(self) -> tuple[str, ...]:
        """delta_1, delta_2, ..."""
        return tuple(f"delta_{number}" for number in range(1, self.most + 1))

    @property
    def settings(self) -> dict[str, Any]:
        """Whom it is about."""
        return {"role": self.role}

    def label(self, row: Outcome) -> list[float]:
        """Marginals, averaged over all ways to pick among the drawn samples."""
        rewards = [sample.reward for sample in row.samples(self.role)]
        if len(rewards) < self.most:
            raise invalid(
                "outcomes",
                f"prompt {row.key[:40]!r} has {len(rewards)} samples_{self.role}; {self.most} are needed",
            )
        return reward_marginals(rewards, self.most)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Squared error."""
        return functional.mse_loss(outputs, labels)

    def check(self, labels: torch.Tensor) -> None:
        """Refuse outcomes in which samples bring the same everywhere."""
        if bool((labels == labels[0]).all()):
            raise invalid("outcomes", f"labels are all alike: samples bring the same in all {len(labels)} rows")

    def doubt(self, outcomes: Outcomes) -> str:
        """Too few answers are refused: none."""
        return ""


def labels_of(target: Target, outcomes: Outcomes) -> torch.Tensor:
    """float32 [n, k], checked.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a row lacks what is needed, or all are alike.
    """
    labels = torch.tensor([target.label(row) for row in outcomes.rows], dtype=torch.float32)
    target.check(labels)
    return labels
