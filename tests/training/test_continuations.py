"""Rankers and coefficients trained on passages: they learn what tells continuations apart, and are used as trained."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from decoding.aggregators.base import AnswerSet, Candidate, make_valued
from decoding.artifacts import Artifact, Artifacts
from decoding.model import ModelPool
from decoding.sequence import Sequence
from tests.conformance.test_identity import pool as pool
from training.continuations import STEADY, Passage, cut, solve_daemon, train_rank_gen, train_uni_encoder
from training.nbest import Scored, shown_utility, tune_weights
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

SIZE, COUNT = 4, 48
FAST = replace(STEADY, batch_size=12, learning_rate=1e-2)
aio = pytest.mark.asyncio(loop_scope="module")


def passages() -> list[Passage]:
    """Token t is followed by t + 1; in other texts by t + 2, or by t - 1 where the text was reversed."""
    texts = [[2 + n % 30] * SIZE + [3 + n % 30] * SIZE + [4 + n % 30] * SIZE for n in range(COUNT)]
    return cut(texts, SIZE, seed=3)


def test_passages_are_cut_out_of_texts() -> None:
    made = passages()
    assert all(each.continuation[0] == each.prefix[0] + 1 for each in made)
    assert {each.elsewhere[0] - each.prefix[0] for each in made} == {2, -1}
    with pytest.raises(TurnoutError, match="passages: 0 texts have 15 tokens; at least 16 must"):
        cut([[1] * 12] * COUNT, 5, seed=0)


async def used(pool: ModelPool, artifact: Artifact, folder: Path, name: str) -> list[float]:
    """Values of the true continuation of a prefix, then of other texts."""
    artifact.save(folder / f"{name}.safetensors")
    models = replace(pool, artifacts=Artifacts(folder))
    part = make_valued(PartChoice.of(name), "rerank")
    part.check(models)
    seq = Sequence([10] * SIZE, SamplingParams(max_tokens=1), 0)
    answers = [Candidate("", "", "", (token,) * SIZE) for token in (11, 20, 30)]
    try:
        return await part.values(AnswerSet(answers, 0, seq, pool.large, models))
    finally:
        pool.large.release(seq)
        assert pool.large.busy().sequences == 0


@aio
async def test_a_dual_encoder_learns_what_follows(pool: ModelPool, tmp_path: Path) -> None:
    made = await train_rank_gen(pool, "large", passages(), size=16, epochs=60, schedule=FAST)
    held = made.report["heldout"]
    assert held["passages"] == 12
    assert held["above_elsewhere"] >= 0.75
    assert held["above_generated"] >= 0.75
    values = await used(pool, made.artifact, tmp_path, "rank_gen")
    assert values[0] == max(values)
    again = await train_rank_gen(pool, "large", passages(), size=16, epochs=60, schedule=FAST)
    assert again.artifact.version == made.artifact.version


@aio
async def test_a_ranker_learns_what_follows(pool: ModelPool, tmp_path: Path) -> None:
    made = await train_uni_encoder(pool, "large", passages(), 4, hidden=16, epochs=60, schedule=FAST)
    assert made.report["heldout"]["first"] >= 0.6  # of four
    assert made.report["losses"][-1] < math.log(4)
    assert made.artifact.settings["schedule"] == {**asdict(FAST), "epochs": 60}
    values = await used(pool, made.artifact, tmp_path, "uni_encoder")
    assert sum(values) == pytest.approx(1.0)
    assert values[0] == max(values)


@aio
async def test_coefficients_bring_the_metrics_of_passages(pool: ModelPool) -> None:
    texts = [[2 + (n + place) % 5 for place in range(3 * 8)] for n in range(32)]
    made = await solve_daemon(pool, "large", cut(texts, 8, 0), ["token_rep_32"], samples=6)
    held = made.report["heldout"]
    gap = {name: abs(held[name]["token_rep_32"] - held["wanted"]["token_rep_32"]) for name in ("model", "weighted")}
    assert gap["weighted"] < gap["model"]
    assert made.artifact.settings["metrics"] == ["token_rep_32"]
    with pytest.raises(TurnoutError, match=r"metrics: cannot be met by reweighting \['seq_rep_4'\]"):
        await solve_daemon(pool, "large", cut([[5] * 24] * 16, 8, 0), ["seq_rep_4"], samples=2)
    assert pool.large.busy().sequences == 0


def test_weights_are_tuned_for_what_is_shown() -> None:
    """The second score is right, the first is noise; equal weights follow the noise."""
    generator = torch.Generator().manual_seed(2)
    inputs = []
    for _ in range(30):
        good = torch.rand(5, generator=generator).tolist()
        noise = (3 * torch.rand(5, generator=generator)).tolist()
        inputs.append(Scored(tuple(zip(noise, good, strict=True)), tuple(good)))
    weights, reached = tune_weights(inputs)
    best = sum(max(each.utilities) for each in inputs) / len(inputs)
    assert reached == pytest.approx(best)
    assert shown_utility(inputs, weights) == reached > shown_utility(inputs, [1.0, 1.0])
