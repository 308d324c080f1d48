"""Heads that read doubt from hidden states: labels are semantic entropies, and shuffled labels teach nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.artifacts import Artifacts
from decoding.model import ModelPool
from decoding.uncertainty.base import make_uncertainty
from decoding.uncertainty.semantic_entropy import SemanticEntropy, SemanticEntropyParams
from tests.conformance.parts import LAYERS, WIDTH
from tests.conformance.test_identity import pool as pool
from tests.conformance.test_identity import prompts
from training.doubt import PROBE, Doubts, mine_doubts, train_bottleneck, train_probe
from training.length_data import Source
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

MODEL: Any = SimpleNamespace(digest="d")


def doubts(shuffled: bool = False) -> Doubts:
    """Layer 1 at the prompt's end knows which prompts have a high entropy; the others hold noise."""
    generator = torch.Generator().manual_seed(7)
    high = torch.rand(160, generator=generator) < 0.5
    entropies = (high * 1.5 + 0.2 * torch.rand(160, generator=generator)).tolist()
    states = {place: torch.randn((160, 3, 10), generator=generator) for place in ("prompt", "answer")}
    states["prompt"][:, 1, :3] += 2.0 * high[:, None]
    if shuffled:
        random.Random(1).shuffle(entropies)
    return Doubts(states, entropies)  # type: ignore[arg-type]


def test_a_probe_finds_the_layer_that_knows() -> None:
    made = train_probe(doubts(), MODEL, "large")
    settings = made.artifact.settings
    assert (settings["position"], settings["layers"]) == ("prompt", [1])
    assert set(settings["ablation"]) == {f"{place}/{layer}" for place in ("prompt", "answer") for layer in range(3)}
    assert made.report["heldout"]["auc"] > 0.9
    assert 0.2 < settings["threshold"] <= 1.7
    wide = train_probe(doubts(), MODEL, "large", "prompt", adjacent=2)
    assert 1 in wide.artifact.settings["layers"]
    assert wide.artifact.tensors["mean"].shape == (20,)


def test_shuffled_labels_teach_nothing() -> None:
    made = train_probe(doubts(shuffled=True), MODEL, "large", "prompt")
    assert abs(made.report["heldout"]["auc"] - 0.5) < 0.25


def test_a_bottleneck_learns_from_prompts_as_they_come() -> None:
    made = train_bottleneck(doubts(), MODEL, "large", layer=1, codebooks=32, keys=16, key_size=4)
    assert made.report["heldout"]["auc"] > 0.85
    assert made.report["heldout"]["key_usage"] > 0.2
    assert made.report["losses"][-1] < made.report["losses"][0]
    assert made.artifact.settings["layers"] == [1]
    with pytest.raises(TurnoutError, match=r"layer: must be from -3 to 2 \(got 3\)"):
        train_bottleneck(doubts(), MODEL, "large", layer=3)


@pytest.mark.parametrize(
    ("entropies", "said"),
    [([0.5] * 20, "are all alike"), ([0.0] * 8 + [1.0], "are 9; at least 16"), ([0.0] * 19 + [1.0], "too few of one")],
)
def test_what_cannot_be_learnt_from_is_refused(entropies: list[float], said: str) -> None:
    states = torch.zeros(len(entropies), 1, 4)
    with pytest.raises(TurnoutError, match=said):
        train_probe(Doubts({"prompt": states, "answer": states}, entropies), MODEL, "large")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_probe_of_a_real_model_is_used_as_it_was_trained(pool: ModelPool, tmp_path: Path) -> None:
    """Short answers of a random model: what the probe says of a prompt is what its head says of the states mined."""
    source = Source(prompts(24), SamplingParams(max_tokens=3, temperature=0.1), frozenset({1}))
    estimator = SemanticEntropy(
        SemanticEntropyParams(samples=4, temperature=0.7, judge=PartChoice(name="final_answer"), mark="")
    )
    estimator.check(pool)
    mined = await mine_doubts(pool, "large", source, estimator)
    assert mined.states["prompt"].shape == mined.states["answer"].shape == (24, LAYERS, WIDTH)
    assert all(0.0 <= value <= 1.39 for value in mined.entropies)
    labelled = Doubts(mined.states, [float(place // 4 % 2) + value / 9 for place, value in enumerate(mined.entropies)])
    for position in ("prompt", "answer"):
        made = train_probe(labelled, pool.large, "large", position, epochs=5, schedule=replace(PROBE, seed=1))
        made.artifact.save(tmp_path / "mine.safetensors")
        models = replace(pool, artifacts=Artifacts(tmp_path))
        part = make_uncertainty(PartChoice.of("semantic_entropy_probe", artifact="mine"))
        part.check(models)
        assert part.reads_answer is (position == "answer")
        seq = source.sequence(5)
        draft = pool.large.fork(seq)
        await pool.large.decode(draft)
        answer = Candidate("", "", "", tuple(draft.answer)) if position == "answer" else None
        found = await part.measure(AnswerSet([], 0, seq, pool.large, models), answer)
        layers = made.artifact.settings["layers"]
        state = labelled.states[position][5, layers].flatten()
        assert found == pytest.approx(part._head.probability(state), abs=1e-4)  # type: ignore[attr-defined]
        for each in (draft, seq):
            pool.large.release(each)
    assert pool.large.busy().sequences == 0
