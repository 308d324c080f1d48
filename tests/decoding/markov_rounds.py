"""Whole rounds of drafter and verifier on three-token Markov models, fast enough for statistics."""

import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch
from scipy import stats

from decoding.drafter_state import Stores
from decoding.drafters.base import DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy, Round
from decoding.lengths.fixed import FixedLength
from decoding.logits import process
from decoding.model import Readout, ReadSpec
from decoding.operations import Expand, Extend
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import Verifier
from tests.decoding.many_runs import many_runs
from turnout.types import SamplingParams

TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.4, 0.3]])
DRAFT = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]])
# Far from the target, so that faults show in few runs.
FAR = torch.tensor([[0.1, 0.15, 0.75], [0.75, 0.15, 0.1], [0.1, 0.75, 0.15]])
LENGTH = FixedLength()
POSITIONS = 3
SMALL = DraftBudget(2, 6)


class Readings:
    """The part of `decoding.model.Model` that the small model's drafters use, over tables read beforehand."""

    name = "small"
    vocab_size = 3
    max_length = 1 << 20

    def __init__(self, probs: torch.Tensor) -> None:
        self.stores = Stores()
        best = probs.topk(3)
        self.rows = [
            Readout(
                probs=row,
                logits=row.log(),
                entropy_bits=float(torch.special.entr(row).sum()) / math.log(2.0),
                hidden={-1: row},
                top=tuple(zip(ids.tolist(), values.log().tolist(), strict=True)),
            )
            for row, ids, values in zip(probs, best.indices, best.values, strict=True)
        ]

    async def do(self, seq: Sequence, op: Any):
        match op:
            case Extend():
                return await self.extend(seq, op.tokens, op.want, op.every)
            case Expand():
                return await self.expand(seq, op.tree, op.start, op.want)
        raise NotImplementedError

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: ReadSpec = ReadSpec(), every: bool = False
    ):
        paths = [tokens[:end] for end in range(0 if every else len(tokens), len(tokens) + 1)]
        return self._read(seq, paths, want)

    async def expand(self, seq: Sequence, tree: DraftTree, start: int, want: ReadSpec):
        paths = [tuple(tree.tokens[each] for each in tree.path(node)) for node in range(start, len(tree))]
        return self._read(seq, paths, want)

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = [self.rows[(path or seq.tokens)[-1]] for path in paths]
        if want.draw is None and want.among is None:
            return rows
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        return read(logits, [RowContext(seq, path) for path in paths], [want] * len(rows))


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")


def processed(probs: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Rows of a table as a request with these parameters reads them."""
    seq = Sequence([0], SamplingParams(max_tokens=64, **sampling), 0)
    return process(probs.log(), [RowContext(seq)] * len(probs)).softmax(-1)


def play(
    drafter: Drafter,
    verifier: Verifier,
    model: Readings,
    target: list[Readout],
    seed: int,
    room: DraftBudget,
    length: LengthPolicy = LENGTH,
) -> list[int]:
    """Rounds from token 0 until three tokens stand."""
    seq = Sequence([0], SamplingParams(max_tokens=64), seed)
    while len(seq) <= POSITIONS:
        length.before_round(Round(seq, model, model, False, drafter.name))  # type: ignore[arg-type]
        tree = now(drafter.propose(model, seq, room, length))  # type: ignore[arg-type]
        rows = [target[seq.tokens[-1]], *(target[token] for token in tree.tokens)]
        verdict = verifier.judge(seq, tree, rows, "large")
        seq.extend(verdict.tokens, {"small": 0, "large": 0})
        drafter.observe(model, seq, tree, verdict)  # type: ignore[arg-type]
        length.observe(tree, verdict, 0.1)
    return seq.tokens[1 : POSITIONS + 1]


@many_runs()
def p_value(
    drafter: Drafter,
    verifier: Verifier,
    runs: int,
    room: DraftBudget = SMALL,
    draft: torch.Tensor = DRAFT,
    length: Callable[[], LengthPolicy] = FixedLength,
    **sampling: Any,
) -> float:
    """Of the chi-square test of all sequences of three tokens against the target's law; 0.0 for an impossible one."""
    target, model = processed(TARGET, **sampling), Readings(processed(draft, **sampling))
    rows = [Readout(probs=row) for row in target]
    outcomes = np.array([play(drafter, verifier, model, rows, seed, room, length()) for seed in range(runs)])
    counts = np.bincount(outcomes @ (3 ** np.arange(POSITIONS)[::-1]), minlength=3**POSITIONS)
    table = target.double().numpy()
    law = (table[0][:, None, None] * table[:, :, None] * table[None]).reshape(-1)
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = law[possible] / law.sum() * runs
    return float(stats.chisquare(counts[possible], expected).pvalue)
