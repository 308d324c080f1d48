"""The output law of PEARL with rejection sampling: chi-square over every answer of four tokens; faults are seen."""

from __future__ import annotations

import asyncio
from bisect import bisect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.drafter_state import Stores
from decoding.drafters.base import DraftBudget, Drafter
from decoding.fakes import pair
from decoding.lengths.base import LengthPolicy
from decoding.logits import process
from decoding.methods import pearl as program
from decoding.model import Busy, Model, Readout, ReadSpec, Request
from decoding.noise import Purpose, noise_key, uniform
from decoding.preverify import LateCandidate
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers import rejection
from decoding.verifiers.base import Verifier, VerifyResult
from tests.decoding.markov_rounds import DRAFT, FAR, TARGET
from turnout.registry import get_method
from turnout.types import SamplingParams, Token

POSITIONS, RUNS, MANY = 4, 800, 200_000
PEARL, SPECULATIVE = get_method("pearl"), get_method("speculative")
LAWS: dict[str, dict[str, Any]] = {"raw": {}, "truncated": {"temperature": 0.6, "top_p": 0.9}}


class Chain:
    """The part of `decoding.model.Model` that these methods use, over a table of three tokens read beforehand."""

    num_parameters = 1
    vocab_size = 3
    max_length = 1 << 20

    def __init__(self, name: str, probs: torch.Tensor) -> None:
        self.name = name
        self.stores = Stores()
        self.probs = probs
        self.upto = probs.double().cumsum(-1).tolist()

    async def extend(self, seq: Sequence, tokens: tuple[int, ...] = (), want: ReadSpec = ReadSpec()) -> list[Readout]:
        last = (*seq.tokens[-1:], *tokens)[-1]
        key = noise_key(seq.seed, len(seq) + len(tokens), Purpose.DRAFT)
        token = min(bisect(self.upto[last], uniform(key)), 2)
        return [Readout(token, probs=self.probs[last])]

    async def propose(self, seq: Sequence, drafter: Drafter, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        return await drafter.propose(self, seq, room, length)  # type: ignore[arg-type]

    async def verify(
        self, seq: Sequence, draft: DraftTree, verifier: Verifier, want: ReadSpec = ReadSpec(draw=None)
    ) -> VerifyResult:
        rows = [Readout(probs=self.probs[token]) for token in (seq.tokens[-1], *draft.tokens)]
        return replace(verifier.judge(seq, draft, rows, self.name), rows=rows)

    def observe(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: VerifyResult) -> None:
        drafter.observe(self, seq, draft, verdict)  # type: ignore[arg-type]

    def busy(self) -> Busy:
        return Busy(1, 1)

    def step_seconds(self) -> float:
        return 0.0

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        return 0.0


def processed(probs: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Rows of a table as a request with these parameters reads them."""
    seq = Sequence([0], SamplingParams(max_tokens=64, **sampling), 0)
    return process(probs.log(), [RowContext(seq)] * len(probs)).softmax(-1)


def counted(draft: torch.Tensor, length: int, runs: int, method: Any = PEARL, **sampling: Any) -> np.ndarray:
    """How often each answer of four tokens came, [81]."""
    small, large = Chain("small", processed(draft, **sampling)), Chain("large", processed(TARGET, **sampling))
    models = pair(small, large)  # type: ignore[arg-type]
    params = method.parse({"verifier": "rejection", "draft_length": length})
    sampled = SamplingParams(max_tokens=9, **sampling)
    counts = np.zeros(3**POSITIONS)

    async def play() -> None:
        for seed in range(runs):
            seq = Sequence([0], sampled, seed)
            running = method.run(Request("r", seq), models, params)
            while len(seq) <= POSITIONS:
                await anext(running)
            await running.aclose()
            counts[int(np.dot(seq.tokens[1 : POSITIONS + 1], 3 ** np.arange(POSITIONS)[::-1]))] += 1

    asyncio.run(play())
    return counts


def p_value(counts: np.ndarray, **sampling: Any) -> float:
    """Of the chi-square test against the target's law; 0.0 for an impossible answer."""
    table = processed(TARGET, **sampling).double().numpy()
    law = table[0][:, None, None, None] * table[:, :, None, None] * table[None, :, :, None] * table[None, None]
    law = law.reshape(-1)
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    return float(stats.chisquare(counts[possible], law[possible] / law.sum() * counts.sum()).pvalue)


@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize("length", [1, 3])
def test_the_law_is_the_targets(length: int, law: str) -> None:
    assert p_value(counted(DRAFT, length, RUNS, **LAWS[law]), **LAWS[law]) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize(("length", "law"), [(1, "raw"), (2, "raw"), (4, "raw"), (2, "truncated")])
def test_the_law_is_the_targets_over_many_runs(length: int, law: str) -> None:
    assert p_value(counted(DRAFT, length, MANY, **LAWS[law]), **LAWS[law]) > 1e-3


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MANY, marks=pytest.mark.exactness)])
def test_blocks_of_one_have_the_law_of_speculation_with_one_token(runs: int) -> None:
    both = np.stack([counted(DRAFT, 1, runs), counted(DRAFT, 1, runs, SPECULATIVE)])
    assert stats.chi2_contingency(both[:, both.sum(0) > 0]).pvalue > 1e-3


def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's first token stays whatever the target says."""
    judge = LateCandidate.observe

    def observe(self: LateCandidate, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        judge(self, model, seq, draft, verdict)
        if len(draft):
            self.token, self.accepted = Token(draft.tokens[0], draft.source), True

    monkeypatch.setattr(LateCandidate, "observe", observe)


def unsubtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces a rejected token is drawn from the target's whole distribution."""
    monkeypatch.setattr(rejection, "subtract", lambda residual, token, proposal: residual)


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a block is judged against the distributions of its neighbours."""
    part = program.chain

    def chain(block: DraftTree, start: int, stop: int) -> DraftTree:
        cut = part(block, start, stop)
        return replace(cut, proposals=(block.proposals[0],) * len(cut)) if start else cut

    monkeypatch.setattr(program, "chain", chain)


def misplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's first token is judged by what the target read where the tail began."""
    judge = LateCandidate.observe

    def observe(self: LateCandidate, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        judge(self, model, seq, draft, replace(verdict, rows=verdict.rows[:1]))

    monkeypatch.setattr(LateCandidate, "observe", observe)


@pytest.mark.parametrize(
    ("plant", "draft", "length"),
    [(unjudged, FAR, 3), (unsubtracted, FAR, 3), (shifted, FAR, 3), (misplaced, TARGET, 2)],
)
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch, plant: Any, draft: torch.Tensor, length: int) -> None:
    plant(monkeypatch)
    assert p_value(counted(draft, length, RUNS)) < 1e-6
