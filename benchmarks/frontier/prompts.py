"""The answers of an experiment, all datasets together: what each way of answering gave for a prompt, and its cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from experiments.grid.spec import Axis
from experiments.grid.store import Saved, Store
from experiments.reports.table import Group, read_table
from experiments.stats.intervals import Floats
from turnout.errors import invalid, not_found

SMALL, LARGE = "plain model=small", "plain"
METERS = {"paper": "paper's cost", "flops": "FLOPs", "wall_s": "time"}
# Part of the prompts at which a way may fail: they are left out for all. One that fails at more is left out itself.
FEW = 0.05


@dataclass(frozen=True, slots=True)
class Answers:
    """One way of answering, [prompts] each.

    Attributes:
        costs: by meter.
        by_large: tokens written by the large model, dropped ones included.
        tokens: of the answers.
    """

    scores: Floats
    costs: dict[str, Floats]
    by_large: Floats
    tokens: Floats


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that every way of answering has answered, with a score.

    Attributes:
        kinds: of each prompt: its dataset.
        ways: by label.
        families: by label, what it is a setting of.
        num_asked: prompts of the experiment, those included that are left out here.
        failed: by label, prompts without an answer or a score, which are left out for all.
        left_out: by label, why a way is not here.
    """

    kinds: list[str]
    ways: dict[str, Answers]
    families: dict[str, str]
    num_asked: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self.kinds)

    @property
    def num_apart(self) -> int:
        """Prompts at which the two models alone are not equally good: the others tell no ways apart."""
        return int((self.ways[SMALL].scores != self.ways[LARGE].scores).sum())


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
    left_out = {
        cell.label: store.failure(cell) or "a part of it was not run"
        for cell in saved.cells
        if cell.label not in labels and store.facts(cell) is None
    }
    num_asked = sum(len(group.columns[LARGE].prompts) for group in groups)
    failed = {label: sum(len(_failed(group, label)) for group in groups) for label in labels}
    for label in labels:
        if label not in (SMALL, LARGE) and failed[label] > FEW * num_asked:
            left_out[label] = f"failed at {failed[label]} of {num_asked} prompts"
    labels = [label for label in labels if label not in left_out]
    kinds, parts = list[str](), dict[str, list[Answers]]({label: [] for label in labels})
    for group in groups:
        gone = set[str]().union(*(_failed(group, label) for label in labels))
        shared = [prompt for prompt in group.columns[LARGE].prompts if prompt not in gone]
        kinds += [group.dataset] * len(shared)
        for label in labels:
            parts[label].append(_answers(group, label, shared))
    ways = {label: _joined(each) for label, each in parts.items()}
    failed = {label: failed[label] for label in labels if failed[label]}
    return Prompts(kinds, ways, _families(saved, groups[0], labels), num_asked, failed, left_out)


def _failed(group: Group, label: str) -> set[str]:
    """Prompts without an answer or a score, those that were never asked included."""
    column = group.columns[label]
    return set(group.columns[LARGE].prompts) - (set(column.scored) - column.refused)


def _answers(group: Group, label: str, prompts: list[str]) -> Answers:
    column = group.columns[label]
    values = {name: column.mean(name, prompts) for name in ("score", "by_large", "tokens", *METERS)}
    return Answers(values["score"], {meter: values[meter] for meter in METERS}, values["by_large"], values["tokens"])


def _families(saved: Saved, group: Group, labels: list[str]) -> dict[str, str]:
    """By label: the entry of the experiment it is a setting of, by its label there or by its method."""
    axes = [entry for entry in saved.spec.methods if isinstance(entry, Axis)]
    named = {label: axis.label or axis.words for axis in axes for label, *_ in axis.arms()}
    return {label: named.get(label, group.columns[label].method) for label in labels}


def _joined(parts: list[Answers]) -> Answers:
    return Answers(
        np.concatenate([each.scores for each in parts]),
        {meter: np.concatenate([each.costs[meter] for each in parts]) for meter in METERS},
        np.concatenate([each.by_large for each in parts]),
        np.concatenate([each.tokens for each in parts]),
    )
