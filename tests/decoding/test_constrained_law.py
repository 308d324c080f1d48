"""Speculation keeps the constrained law: the target's own, masked at every token and made to sum to one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from decoding.drafters.base import DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.fakes import TableModel as Table
from decoding.fakes import markov, pair
from decoding.lengths.base import LengthPolicy
from decoding.model import Model, Request
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from tests.constrained import END, allowed_ids, char_compiler
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import SamplingParams

CHARS = "abc"
VOCAB = 5  # padding, the end, a, b, c
STRUCTURE = Structure(kind="regex", value="(a|bc?|cb)(ab|c|bb)")
RUNS = 200
MANY = 4_000
LEAST = 1e-4  # p-value below which a law is not the one it should be
CASES: list[tuple[str, dict[str, object]]] = [
    ("plain", {}),
    ("speculative", {"drafter": "model_chain", "verifier": "rejection", "length": {"name": "fixed", "most": 3}}),
    ("speculative", {"drafter": "rsd_s", "verifier": "rejection"}),
    ("speculative", {"drafter": "model_sequences", "verifier": "spectr"}),
    ("speculative", {"drafter": "model_chain", "verifier": "match"}),
    ("pearl", {"verifier": "rejection"}),
]


def probs(seed: int) -> torch.Tensor:
    """Uneven, and nothing impossible: without the mask what is refused would be drawn all the time."""
    return (torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)) * 0.8).softmax(-1)


def constrained_law(table: torch.Tensor, temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every whole answer, by enumeration."""
    constraint = char_compiler(CHARS).compile(STRUCTURE).clone()
    law: dict[tuple[int, ...], float] = {}
    open_answers = [((), 1.0)]
    while open_answers:
        answer, mass = open_answers.pop()
        ids = allowed_ids(constraint, list(answer))
        assert ids is not None
        refused = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
        row = (table[answer[-1] if answer else 2].log() / temperature).masked_fill(refused, float("-inf"))
        for token, probability in enumerate(row.softmax(-1).tolist()):
            if probability and token == END:
                law[(*answer, token)] = mass * probability
            elif probability:
                open_answers.append(((*answer, token), mass * probability))
    return law


async def sampled(
    method: str, params: dict[str, object], small: torch.Tensor, large: torch.Tensor, runs: int = RUNS
) -> Counter[tuple]:
    models = pair(Table("small", markov(small), VOCAB), Table("large", markov(large), VOCAB))
    info = get_method(method)
    parsed = info.parse(params)
    seen: Counter[tuple] = Counter()
    compiled = char_compiler(CHARS).compile(STRUCTURE)
    for seed in range(runs):
        seq = Sequence([2], SamplingParams(max_tokens=12, temperature=0.9), seed, (END,))
        seq.constraint = compiled.clone()
        async for _ in info.run(Request("r", seq), models, parsed):
            pass
        for model in models.models.values():
            model.release(seq)
        seen[tuple(seq.tokens[1:])] += 1
    return seen


def p_value(seen: Counter[tuple], law: dict[tuple[int, ...], float]) -> float:
    assert set(seen) <= set(law), "an answer that does not fit"
    answers, total, runs = sorted(law), sum(law.values()), seen.total()
    return float(
        stats.chisquare([seen[each] for each in answers], [law[each] / total * runs for each in answers]).pvalue
    )


def named(value: object) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value.values()))[:24]  # type: ignore[attr-defined]


async def assert_law(method: str, params: dict[str, object], runs: int) -> None:
    small, large = probs(1), probs(2)
    law = constrained_law(large, 0.9)
    assert abs(sum(law.values()) - 1.0) < 1e-5
    assert len(law) >= 10
    assert p_value(await sampled(method, params, small, large, runs), law) > LEAST


@pytest.mark.parametrize(("method", "params"), [CASES[1], CASES[3]], ids=named)
async def test_answers_follow_the_constrained_law(method: str, params: dict[str, object]) -> None:
    await assert_law(method, params, RUNS)


@pytest.mark.exactness
@pytest.mark.parametrize(("method", "params"), CASES, ids=named)
async def test_many_answers_follow_the_constrained_law(method: str, params: dict[str, object]) -> None:
    await assert_law(method, params, MANY)


async def test_a_wrong_law_would_be_seen() -> None:
    assert p_value(await sampled("plain", {}, probs(1), probs(1)), constrained_law(probs(2), 0.9)) < 1e-6


async def test_a_drafter_that_says_it_drew_freely_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: drafts are drawn from what fits alone, and said to be drawn from the whole vocabulary."""

    async def propose(
        self: ModelChainDrafter, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy
    ) -> DraftTree:
        draft = await right(self, model, seq, room, length)
        before = (seq.tokens[-1], *draft.tokens)[: len(draft)]
        return replace(draft, proposals=tuple((probs(1)[token].log() / 0.9).softmax(-1) for token in before))

    right = ModelChainDrafter.propose
    monkeypatch.setattr(ModelChainDrafter, "propose", propose)
    seen = await sampled(*CASES[1], probs(1), probs(2))
    assert p_value(seen, constrained_law(probs(2), 0.9)) < 1e-6
