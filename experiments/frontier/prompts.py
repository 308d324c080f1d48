"""The answers of an experiment, all datasets together: what each way of answering gave for a prompt, and its cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.grid.store import Saved, Store
from experiments.reports.table import read_table
from experiments.stats.intervals import Floats
from turnout.errors import invalid, not_found

SMALL, LARGE = "plain model=small", "plain"
METERS = {"paper": "paper's cost", "flops": "FLOPs", "wall_s": "time"}


@dataclass(frozen=True, slots=True)
class Answers:
    """One way of answering, [prompts] each.

    Attributes:
        costs: by meter.
        by_large: tokens written by the large model.
        tokens: of all.
    """

    scores: Floats
    costs: dict[str, Floats]
    by_large: Floats
    tokens: Floats


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that every way of answering has a score for.

    Attributes:
        kinds: of each prompt: its dataset.
        ways: by label.
        families: by label, what its parameters belong to.
    """

    kinds: list[str]
    ways: dict[str, Answers]
    families: dict[str, str]

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self.kinds)


def gather(saved: Saved, store: Store) -> Prompts:
    """The prompts of an experiment on one pool under one load.

    Raises:
        TurnoutError: there are several pools or loads, or a model's answers alone are missing.
    """
    groups = list(read_table(saved, store).groups.values())
    if len({(group.pool, group.load) for group in groups}) != 1:
        raise invalid("pools", "must be one pool under one load, all cells of which have been run")
    labels = [label for label in groups[0].columns if all(label in group.columns for group in groups)]
    for label in (SMALL, LARGE):
        if label not in labels:
            raise not_found("methods", label, labels)
    kinds: list[str] = []
    parts: dict[str, list[Answers]] = {label: [] for label in labels}
    for group in groups:
        scored = [set(group.columns[label].scored) for label in labels]
        shared = [prompt for prompt in group.columns[LARGE].scored if all(prompt in each for each in scored)]
        kinds += [group.dataset] * len(shared)
        for label in labels:
            column = group.columns[label]
            names = ("score", "by_large", "tokens", *METERS)
            values = {name: column.mean(name, shared) for name in names}
            costs = {meter: values[meter] for meter in METERS}
            parts[label].append(Answers(values["score"], costs, values["by_large"], values["tokens"]))
    families = {label: groups[0].columns[label].method for label in labels}
    return Prompts(kinds, {label: _joined(each) for label, each in parts.items()}, families)


def _joined(parts: list[Answers]) -> Answers:
    return Answers(
        np.concatenate([each.scores for each in parts]),
        {meter: np.concatenate([each.costs[meter] for each in parts]) for meter in METERS},
        np.concatenate([each.by_large for each in parts]),
        np.concatenate([each.tokens for each in parts]),
    )
