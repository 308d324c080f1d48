"""Timing real forwards of a loaded model: the measurements its step time is fitted to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decoding.model import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool
from engine.cache.table import BlockTable
from engine.costs.step_time import Sample, StepTime
from engine.runner import Feed, Runner
from turnout.types import SamplingParams

# A profile takes about as long as that many decode steps, within these bounds in seconds.
BUDGET_STEPS = 300
BUDGET_S = (0.15, 1.2)
MAX_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one shape in a forward: how many, tokens each feeds, tokens each has cached."""

    sequences: int
    fed: int
    context: int


Shape = tuple[Group, ...]

# What the fit cannot do without: memory-bound and compute-bound forwards, few and many positions, many sequences.
ESSENTIAL: tuple[Shape, ...] = (
    (Group(1, 1, 16),),
    (Group(1, 16, 0),),
    (Group(1, 64, 0),),
    (Group(16, 1, 16),),
    (Group(16, 1, 512),),
    (Group(1, 64, 1024),),
    (Group(1, 256, 0),),
)
# What makes it better, while the budget lasts.
FURTHER: tuple[Shape, ...] = (
    (Group(4, 1, 128),),
    (Group(8, 1, 256),),
    (Group(8, 1, 1024),),
    (Group(1, 4, 128),),
    (Group(1, 8, 1024),),
    (Group(1, 32, 0),),
    (Group(32, 1, 128),),
    (Group(8, 1, 128), Group(1, 32, 512)),
    (Group(16, 1, 128), Group(1, 64, 1024)),
    (Group(1, 128, 0),),
    (Group(64, 1, 16),),
    (Group(64, 1, 256),),
    (Group(8, 16, 128),),
    (Group(1, 256, 1024),),
    (Group(1, 512, 0),),
    (Group(1, 512, 1024),),
)


class Probe:
    """Times forwards of any shape on an idle model.

    Blocks are taken from a pool of its own, so nothing is published as a prefix; the model's KV tensors are
    written to, which is harmless as long as no sequence uses them.

    Args:
        runner: the model's.
        num_blocks: blocks of its KV store.
        max_length: longest sequence.
        max_batch: most sequences in a forward.
        token_budget: most tokens in a forward.
        clock: seconds.
    """

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        max_length: int,
        max_batch: int,
        token_budget: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._runner = runner
        self._num_blocks = num_blocks
        self._max_length = max_length
        self._max_batch = max_batch
        self._token_budget = token_budget

    def clipped(self, shape: Shape) -> Shape | None:
        """The shape with its contexts cut to what the model's positions and blocks allow; None: it does not fit."""
        size = self._runner.block_size
        sequences = sum(group.sequences for group in shape)
        fed = sum(group.sequences * group.fed for group in shape)
        room = min(self._max_length, self._num_blocks // sequences * size)
        if sequences > self._max_batch or fed > self._token_budget or max(group.fed for group in shape) > room:
            return None
        return tuple(Group(g.sequences, g.fed, min(g.context, room - g.fed)) for g in shape)

    def sample(self, shape: Shape, repeats: int = 1) -> Sample:
        """The fastest of `repeats` forwards of one shape, each sequence's last token read."""
        feeds = self._feeds(shape)
        seconds = float("inf")
        for _ in range(repeats):
            started = self.clock()
            self._runner.run(feeds)
            seconds = min(seconds, self.clock() - started)
        fed = sum(group.sequences * group.fed for group in shape)
        return Sample(fed, attended(shape), sum(group.sequences for group in shape), seconds)

    def set_up(self, setups: Iterable[tuple[int, int, int]]) -> None:
        """Run a forward of each of these batches that fits, so that no answer waits for what the first one takes.

        Args:
            setups: see `engine.backends.stacks.LayerStack.setups`.
        """
        for sequences, fed, blocks in setups:
            longest = Group(1, fed, max((blocks - 1) * self._runner.block_size + 1 - fed, 0))
            shape = (longest, Group(sequences - 1, fed, 0)) if sequences > 1 else (longest,)
            if self._holds(shape):
                self.sample(shape)

    def _holds(self, shape: Shape) -> bool:
        """Whether a forward of exactly this shape fits."""
        blocks = sum(g.sequences * -(-(g.fed + g.context) // self._runner.block_size) for g in shape)
        return (
            blocks <= self._num_blocks
            and sum(g.sequences for g in shape) <= self._max_batch
            and sum(g.sequences * g.fed for g in shape) <= self._token_budget
            and max(g.fed + g.context for g in shape) <= self._max_length
        )

    def _feeds(self, shape: Shape) -> list[Feed]:
        pool = BlockPool(self._num_blocks, self._runner.block_size)
        feeds = []
        for group in shape:
            for _ in range(group.sequences):
                seq = Sequence([0], SamplingParams(temperature=0.0), seed=0)
                table = BlockTable(seq, pool, self._runner.store)
                table.reserve(group.context + group.fed)
                table.tokens.extend([0] * group.context)
                feeds.append(Feed(table, [0] * group.fed, reads=[(group.fed - 1, RowContext(seq), ReadSpec())]))
        return feeds


def attended(shape: Shape) -> int:
    """Sum over the fed tokens of a shape of the positions each attends to."""
    return sum(g.sequences * (g.fed * g.context + g.fed * (g.fed + 1) // 2) for g in shape)


def profile(probe: Probe) -> StepTime:
    """Fit a step time to forwards of the model as it is now.

    Every shape is timed twice in a row (the first forward of a shape may build kernels), then all of them in turn
    while the budget lasts; the fastest of each counts, as disturbances only ever add time.
    """
    return StepTime.fit(measure(probe, (*ESSENTIAL, *FURTHER), len(ESSENTIAL)))


def measure(probe: Probe, shapes: tuple[Shape, ...], essential: int) -> list[Sample]:
    """Samples of as many shapes as the budget allows: always of the first `essential`, where they fit the model.

    The first forward of a shape is charged like the second: on a GPU one of many rows compiles kernels, which
    takes seconds and tells nothing about those that follow.
    """
    step = probe.sample((Group(1, 1, 0),), repeats=3).seconds
    budget_s = min(max(BUDGET_STEPS * step, BUDGET_S[0]), BUDGET_S[1])
    spent_s = 3 * step
    best: dict[Shape, Sample] = {}
    for index, shape in enumerate(shapes):
        fitting = probe.clipped(shape)
        if fitting is None or fitting in best or (index >= essential and spent_s > 0.7 * budget_s):
            continue
        best[fitting] = probe.sample(fitting, repeats=2)
        spent_s += 2 * best[fitting].seconds
    for _ in range(MAX_ROUNDS - 2):
        for shape, sample in best.items():
            if spent_s + sample.seconds < budget_s:
                timed = probe.sample(shape)
                spent_s += timed.seconds
                best[shape] = min(sample, timed, key=lambda each: each.seconds)
    return list(best.values())
