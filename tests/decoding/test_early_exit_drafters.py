"""Drafts behind early exits without an engine: their law, when they end, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.artifacts import Artifact
from decoding.drafters._exits import ExitDrafter
from decoding.drafters.base import PACKAGE, Candidates, DraftBudget, Drafter
from decoding.drafters.eesd import EesdDrafter
from decoding.drafters.kangaroo import KangarooDrafter, KangarooParams
from decoding.exit_choice import ExitChoice
from decoding.exit_heads import ExitCache, ExitHead
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import Readout, ReadSpec
from decoding.partial_forward import Sketch
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.head_models import StateModel, pool_of, save_head
from tests.decoding.many_runs import many_runs
from tests.decoding.markov_rounds import DRAFT, FAR, POSITIONS, TARGET, Readings, now, play, processed
from turnout.errors import Code, TurnoutError
from turnout.registry import load
from turnout.types import SamplingParams, Token, TokenKind

DelDrafter = load(PACKAGE, "del", "part").PART
LAYERS, EXIT = 4, 2


class Exits(Readings):
    """Every layer's state is one-hot in the last token, and every exit reads the same table."""

    num_layers = LAYERS
    num_parameters = 1

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: ReadSpec = ReadSpec(), every: bool = False
    ) -> list[Readout]:
        return [self.row(seq.tokens[-1])]

    def fork(self, seq: Sequence) -> Sequence:
        return seq.fork()

    def release(self, seq: Sequence) -> None:
        pass

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        states = torch.eye(3)[list(sketch.tokens[sketch.start :])]
        if sketch.exit is not None and want.reads_logits:
            states = sketch.exit(states)
        return [self.row(int(state.argmax())) for state in states]

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: list[tuple[int, ...]], want: ReadSpec, normed: bool = False
    ) -> list[Readout]:
        return [self.row(int(state.argmax())) for state in states]

    def row(self, token: int) -> Readout:
        return with_states(self.rows[token], token)


def with_states(row: Readout, token: int) -> Readout:
    hidden = {layer: torch.eye(3)[token] for layer in range(1, LAYERS + 1)}
    return replace(row, hidden=hidden)


class Same(ExitHead):
    """Adds nothing, and keeps nothing but its place."""

    def __init__(self) -> None:
        super().__init__(3, 1, 1, 2)

    def extend(self, states: torch.Tensor, cache: ExitCache) -> torch.Tensor:
        cache.end += len(states)
        return states


def drawn(part: type[Any], **params: Any) -> Drafter:
    drafter = part(part.Params(**params), Candidates.DRAWN)
    if isinstance(drafter, ExitDrafter):
        drafter.use(Same(), Artifact(drafter.name, "test", {"exit_layer": EXIT}, {}, {}))
    else:
        drafter.choice = ExitChoice(LAYERS, 0.9)
    return drafter


MAKERS: dict[str, Callable[[], Drafter]] = {
    "kangaroo": lambda: drawn(KangarooDrafter, threshold=0.45),
    "eesd": lambda: drawn(EesdDrafter),
    "del": lambda: drawn(DelDrafter),
}


@many_runs()
def p_value(make: Callable[[], Drafter], runs: int, draft: torch.Tensor, **sampling: Any) -> tuple[float, int]:
    """Of the chi-square test of all sequences of three tokens, with a drafter for each; and drafted tokens."""
    target, model = processed(TARGET, **sampling), Exits(processed(draft, **sampling))
    rows = [with_states(Readout(probs=row), token) for token, row in enumerate(target)]
    verifier = Counting()
    outcomes = np.array([play(make(), verifier, model, rows, seed, DraftBudget(2, 2)) for seed in range(runs)])
    counts = np.bincount(outcomes @ (3 ** np.arange(POSITIONS)[::-1]), minlength=3**POSITIONS)
    table = target.double().numpy()
    law = (table[0][:, None, None] * table[:, :, None] * table[None]).reshape(-1)
    possible = law > 0
    assert not counts[~possible].any()
    expected = law[possible] / law.sum() * runs
    return float(stats.chisquare(counts[possible], expected).pvalue), verifier.num_drafted


class Counting(RejectionVerifier):
    """Counts what it judges, and hands on what was read, as models do."""

    num_drafted = 0

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        self.num_drafted += len(draft)
        return replace(super().judge(seq, draft, rows, target), rows=rows)


@pytest.mark.parametrize("drafter", list(MAKERS))
@pytest.mark.parametrize("table", [DRAFT, FAR], ids=["near", "far"])
def test_the_law_of_drawn_drafts_is_the_targets(drafter: str, table: torch.Tensor) -> None:
    p, num_drafted = p_value(MAKERS[drafter], 600, table)
    assert p > 1e-4
    assert num_drafted > 600


@pytest.mark.exactness
@pytest.mark.parametrize("drafter", list(MAKERS))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_p": 0.9}], ids=["raw", "truncated"])
def test_the_law_over_200_000_runs(drafter: str, sampling: dict[str, Any]) -> None:
    p, num_drafted = p_value(MAKERS[drafter], 200_000, DRAFT, **sampling)
    assert p > 1e-4
    assert num_drafted > 200_000


def verdict_of(accepted: int, rejected: bool, tokens: tuple[int, ...]) -> VerifyResult:
    """So many tokens of a draft accepted, then a rejection or the target's own token."""
    last = Token(0, "large", TokenKind.RECOVERED if rejected else TokenKind.BONUS)
    emitted = (*(Token(token, "m", TokenKind.ACCEPTED) for token in tokens[:accepted]), last)
    rows = [with_states(Readout(), 0) for _ in range(len(tokens) + 1)]
    return VerifyResult(tuple(range(accepted)), emitted, rows)


def test_the_posterior_counts_accepted_tokens_and_rejections_of_its_own_drafts() -> None:
    """From Beta(1, 1), eight accepted and two rejected: mean 9 / 12."""
    drafter = drawn(EesdDrafter, control="beta")
    assert isinstance(drafter, EesdDrafter)
    assert drafter.control is not None
    model = Exits(DRAFT)
    for accepted, rejected in ((5, True), (3, True)):
        tokens = (1,) * 6
        seq = Sequence([0, 1], SamplingParams(max_tokens=64), 0)
        draft = DraftTree.chain(list(tokens), "m")
        drafter._drafted = tokens
        verdict = verdict_of(accepted, rejected, tokens)
        seq.extend(verdict.tokens, {"m": 1, "large": 1})
        drafter.observe(model, seq, draft, verdict)  # type: ignore[arg-type]
        # Another's draft says nothing about its own.
        drafter.observe(model, seq, DraftTree.chain([2, 2], "other"), verdict_of(0, True, (2, 2)))  # type: ignore[arg-type]
    assert drafter.control.mean == pytest.approx(9 / 12)


def outcomes(acceptance: float, control: str, rounds: int = 300) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of rounds whose tokens are accepted with one chance each, by the real drafter."""
    drafter = drawn(EesdDrafter, control=control)
    model = Exits(DRAFT)
    generator = np.random.default_rng(5)
    seq = Sequence([0, 1], SamplingParams(max_tokens=100_000), 3)
    start = verdict_of(0, False, ())
    seq.extend(start.tokens, {"m": 1, "large": 1})
    drafter.observe(model, seq, DraftTree.empty("m"), start)  # type: ignore[arg-type]
    found = []
    for _ in range(rounds):
        draft = now(drafter.propose(model, seq, DraftBudget(16, 16), FixedLength(FixedParams(most=16))))  # type: ignore[arg-type]
        accepted = int((generator.random(len(draft)) < acceptance).cumprod().sum())
        verdict = verdict_of(accepted, accepted < len(draft), draft.tokens)
        seq.extend(verdict.tokens, {"m": 1, "large": 1})
        drafter.observe(model, seq, draft, verdict)  # type: ignore[arg-type]
        found.append((len(draft), accepted))
    return found


def mean_length(acceptance: float, control: str, rounds: int = 300) -> float:
    """Mean drafted tokens of a round."""
    found = outcomes(acceptance, control, rounds)
    return sum(drafted for drafted, _ in found) / len(found)


@pytest.mark.parametrize("control", ["beta", "calibrated"])
def test_drafts_are_longer_where_more_is_accepted(control: str) -> None:
    often, rarely = mean_length(0.9, control), mean_length(0.3, control)
    # A Bernoulli of rate .9 goes on for 1 / .1 tokens in the mean, here 16 at most; one of .3 for 1 / .7.
    assert often == pytest.approx((1 - 0.9**16) / 0.1, rel=0.2)
    assert rarely == pytest.approx(1 / 0.7, rel=0.2)
    assert mean_length(0.3, "none", rounds=10) > 15


DRAFT_COST = 0.1  # of a drafted token, in forwards of the whole model


def speed(found: list[tuple[int, int]]) -> float:
    """Tokens for each forward's worth of work."""
    work = sum(1.0 + DRAFT_COST * drafted for drafted, _ in found)
    return sum(accepted + 1 for _, accepted in found) / work


def fixed_speed(acceptance: float, length: int) -> float:
    """The same, expected, of drafts of one length."""
    tokens = sum(acceptance**place for place in range(length + 1))
    return tokens / (1.0 + DRAFT_COST * length)


@pytest.mark.parametrize("control", ["beta", "calibrated"])
def test_sampled_lengths_keep_up_with_the_best_fixed_one_of_every_class_of_prompts(control: str) -> None:
    """No fixed length does that: the best of one class is far too short or too long for another."""
    classes = (0.2, 0.6, 0.9, 0.95)
    swept = [{length: fixed_speed(each, length) for length in range(1, 17)} for each in classes]
    best = [max(fixed.values()) for fixed in swept]
    sampled = [speed(outcomes(each, control)) / most for each, most in zip(classes, best, strict=True)]
    assert min(sampled) > 0.85
    for length in range(1, 17):
        assert min(fixed[length] / most for fixed, most in zip(swept, best, strict=True)) < 0.8


def kangaroo_draft(rows: torch.Tensor, threshold: float, most: int) -> tuple[int, ...]:
    """What is drafted greedily after token 0, where the exit reads a table."""
    drafter = KangarooDrafter(KangarooParams(threshold=threshold))
    drafter.use(Same(), Artifact("kangaroo", "test", {"exit_layer": EXIT}, {}, {}))
    model = Exits(rows)
    for row in model.rows:
        row.token = row.top[0][0]
        row.probs = None
    seq = Sequence([1, 1], SamplingParams(max_tokens=64, temperature=0.0), 0)
    start = verdict_of(0, False, ())
    seq.extend(start.tokens, {"large": 1})
    drafter.observe(model, seq, DraftTree.empty("m"), start)  # type: ignore[arg-type]
    tree = now(drafter.propose(model, seq, DraftBudget(most, most), FixedLength(FixedParams(most=most))))  # type: ignore[arg-type]
    drafted: tuple[int, ...] = tree.tokens
    return drafted


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 5), (0.55, 2), (1.01, 1)])
def test_a_draft_ends_below_a_token_of_too_little_confidence(threshold: float, length: int) -> None:
    """The unsure token itself stays in the draft."""
    rows = torch.tensor([[0.1, 0.3, 0.6], [0.6, 0.2, 0.2], [0.3, 0.5, 0.2]])  # 0 -> 2 (.6) -> 1 (.5) -> 0 (.6)
    assert kangaroo_draft(rows, threshold, 5) == (2, 1, 0, 2, 1)[:length]


@pytest.mark.parametrize("seed", range(8))
def test_a_threshold_cuts_the_draft_that_there_would_be_without_it(seed: int) -> None:
    """Behind the first token whose distribution has none so probable; one that is just as probable goes on."""
    rows = (2.0 * torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))).softmax(-1)
    sure = [math.exp(row.top[0][1]) for row in Exits(rows).rows]
    whole = kangaroo_draft(rows, 0.0, 7)
    assert len(whole) == 7
    lengths = []
    for threshold in sorted({0.34, *sure, *(math.nextafter(each, 2.0) for each in sure), 1.01}):
        unsure = [sure[before] < threshold for before in (0, *whole)]
        lengths.append(min(7, [*unsure[:7], True].index(True) + 1))
        assert kangaroo_draft(rows, threshold, 7) == whole[: lengths[-1]]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (7, 1)


@pytest.mark.parametrize("part", [KangarooDrafter, EesdDrafter], ids=lambda part: part.name)
def test_an_artifact_of_another_model_or_kind_is_refused(tmp_path: Path, part: type[ExitDrafter]) -> None:
    model = StateModel("large", [1, 2, 0])
    save_head(tmp_path, part.name, ExitHead(3, 1, 1, 2), "another digest", exit_layer=EXIT)
    with pytest.raises(TurnoutError) as refused:
        part().check(pool_of(model, tmp_path))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.field == "method.params.drafter.artifact"
    assert "another digest" in refused.value.message
    save_head(tmp_path, "medusa", ExitHead(3, 1, 1, 2), model.digest, exit_layer=EXIT)
    with pytest.raises(TurnoutError, match=f"{part.name!r} is needed"):
        part(part.Params(artifact="medusa")).check(pool_of(model, tmp_path))
    with pytest.raises(TurnoutError, match="available: "):
        part(part.Params(artifact="none")).check(pool_of(model, tmp_path))


def test_del_needs_a_layer_to_leave_at(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match="needs a model of 2 layers"):
        DelDrafter().check(pool_of(StateModel("large", [1, 2, 0]), tmp_path))


def test_del_drafts_nothing_where_no_layer_agrees() -> None:
    """And says so round by round, until the layers agree again."""
    drafter = drawn(DelDrafter)
    model = Exits(DRAFT)
    seq = Sequence([0, 1], SamplingParams(max_tokens=64), 0)
    lengths = []
    for agree in (False, False, True, True):
        verdict = verdict_of(0, False, ())
        for layer in range(1, LAYERS):
            verdict.rows[0].hidden[layer] = torch.eye(3)[0 if agree else 2]
        seq.extend(verdict.tokens, {"large": 1})
        drafter.observe(model, seq, DraftTree.empty("m"), verdict)  # type: ignore[arg-type]
        lengths.append(len(now(drafter.propose(model, seq, DraftBudget(6, 6), FixedLength(FixedParams(most=6))))))  # type: ignore[arg-type]
    assert lengths[:2] == [0, 0]
    assert lengths[3] > 0
