"""The best answer in a hierarchy of labels for a given measure, by the probabilities of its leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, model_validator

from decoding.tasks.base import Progress, Task, TaskResult, TaskRun, Text
from decoding.tasks.score import count_scored
from turnout.errors import FieldError
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool

MOST_LABELS = 1024
Label = Annotated[str, Field(min_length=1, max_length=1024)]
Floats = npt.NDArray[np.float64]
Measure = Literal["f_beta", "accuracy", "tree_distance", "wu_palmer"]


class LabelHierarchyParams(MethodParams):
    """Parameters of `label_hierarchy`."""

    example: ClassVar = {
        "prompt": "A robin is a",
        "parents": {"cat": "mammal", "dog": "mammal", "bird": "animal", "mammal": "animal"},
    }

    prompt: Annotated[Text, Field(description="what the label of is asked; a leaf follows it after a space")]
    parents: Annotated[
        dict[Label, Label],
        Field(min_length=1, max_length=MOST_LABELS, description="by label, the one above it; leaves are above none"),
    ]
    measure: Annotated[
        Measure,
        Field(
            description="what the answer is best for. f_beta: a set of labels, by the hierarchical F-score; one label:"
            " accuracy (of leaves), tree_distance (edges to the right leaf), wu_palmer (depth of what both have above)"
        ),
    ] = "f_beta"
    beta: Annotated[FiniteFloat, Field(ge=0.01, le=100, description="of f_beta: how much recall counts")] = 1.0
    normalised: Annotated[bool, Field(description="whether log-probabilities are divided by the number of tokens")] = (
        False
    )

    @model_validator(mode="after")
    def _check(self) -> LabelHierarchyParams:
        for label in self.parents:
            above, at = {label}, label
            while (at := self.parents.get(at, "")) != "":
                if at in above:
                    raise FieldError("parents", f"{label!r} is above itself")
                above.add(at)
        if len({*self.parents, *self.parents.values()}) > MOST_LABELS:
            raise FieldError("parents", f"at most {MOST_LABELS} labels, those above others included")
        return self


class LabelHierarchyResult(TaskResult):
    """The answer, and what it is expected to be worth."""

    answer: Annotated[list[str], Field(description="one label, or for f_beta the best set, the highest first")]
    value: Annotated[float, Field(description="expected measure of the answer; of tree_distance, the fewest edges")]
    leaves: Annotated[dict[str, float], Field(description="probability of each leaf among all")]


class Hierarchy:
    """A forest of labels.

    Args:
        parents: by label, the one above it.

    Attributes:
        labels: all of them, each after the one above it, and in the order given.
        leaves: those that are above none.
        within: float64 [labels, leaves]: 1 where the leaf is the label or below it.
        depths: int64 [labels], 1 for the highest ones.
    """

    def __init__(self, parents: Mapping[str, str]) -> None:
        names = list(dict.fromkeys(name for pair in parents.items() for name in reversed(pair)))
        above = {name: _above(name, parents) for name in names}
        self.labels = sorted(names, key=lambda name: len(above[name]))
        inner = set(parents.values())
        self.leaves = [name for name in names if name not in inner]
        self.within: Floats = np.array([[float(label in above[leaf]) for leaf in self.leaves] for label in self.labels])
        self.depths = np.array([len(above[label]) for label in self.labels])
        self._common = np.array([[len(above[a] & above[b]) for b in self.leaves] for a in self.labels])
        self._places = [self.labels.index(leaf) for leaf in self.leaves]

    def utilities(self, measure: Measure) -> Floats:
        """What each label is worth where each leaf is right: float64 [labels, leaves]; a cost is negative."""
        leaf_depths = self.depths[self._places]
        if measure == "tree_distance":
            edges: Floats = -(self.depths[:, None] + leaf_depths[None] - 2.0 * self._common)
            return edges
        if measure == "wu_palmer":
            worth: Floats = 2.0 * self._common / (self.depths[:, None] + leaf_depths[None])
            return worth
        right = np.zeros_like(self.within)
        right[self._places, np.arange(len(self.leaves))] = 1.0
        return right

    def best_label(self, probabilities: Floats, measure: Measure) -> tuple[int, float]:
        """Return the label with the greatest expected utility, of equal ones the highest, and that utility."""
        expected = self.utilities(measure) @ probabilities
        best = int(np.argmax(expected))
        return best, float(expected[best])

    def best_set(self, probabilities: Floats, beta: float) -> tuple[list[int], float]:
        """Return the set of labels with the greatest expected hierarchical F-score, and that score.

        For each size k, a label counts by its leaves' probabilities, each over the size of its own path and k; the k
        labels that count most are the best set of that size. A label counts at least as much as any below it and stands
        before it, so that the set holds all that is above its labels.
        """
        squared = beta * beta
        paths = self.within.sum(0)
        best: tuple[list[int], float] = ([], -1.0)
        for size in range(1, len(self.labels) + 1):
            counts = self.within @ (probabilities * (1 + squared) / (squared * paths + size))
            chosen = np.argsort(-counts.round(12), kind="stable")[:size]
            value = float(counts[chosen].sum())
            if value > best[1] + 1e-12:
                best = sorted(chosen.tolist()), value
        return best


def _above(name: str, parents: Mapping[str, str]) -> set[str]:
    found = {name}
    while name in parents:
        found.add(name := parents[name])
    return found


class LabelHierarchy(Task):
    """Classification into a tree of labels by the decision that is best for a measure.

    Paper #27 (To Each Metric Its Decoding): the model gives each leaf the probability of its text after the prompt,
    normalised over all leaves; the answer maximises the expected measure, and may be a label above the leaves where the
    model is unsure. It is the exact optimum, not a threshold. Ancestors of a label include the label and the root.
    """

    params: LabelHierarchyParams
    Params = LabelHierarchyParams
    Result = LabelHierarchyResult
    papers = (27,)

    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> LabelHierarchyResult:
        """See `Task.run`."""
        params = self.params
        tree = await asyncio.to_thread(Hierarchy, params.parents)  # a second with as many labels as there may be
        scored = await run.score(params.prompt, tuple(f" {leaf}" for leaf in tree.leaves), 0)
        count_scored(progress, scored)
        totals = np.array([_total([t.logprob or 0.0 for t in each.tokens], params.normalised) for each in scored])
        weights = np.exp(totals - totals.max())
        probabilities: Floats = weights / weights.sum()
        chosen, value = await asyncio.to_thread(self._best, tree, probabilities)
        leaves = dict(zip(tree.leaves, probabilities.tolist(), strict=True))
        return LabelHierarchyResult(answer=[tree.labels[each] for each in chosen], value=value, leaves=leaves)

    def _best(self, tree: Hierarchy, probabilities: Floats) -> tuple[list[int], float]:
        if self.params.measure == "f_beta":
            return tree.best_set(probabilities, self.params.beta)
        best, value = tree.best_label(probabilities, self.params.measure)
        return [best], abs(value)


def _total(logprobs: list[float], normalised: bool) -> float:
    total = math.fsum(logprobs)
    return total / len(logprobs) if normalised else total


PART = LabelHierarchy
