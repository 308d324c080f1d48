"""The monitor `enough` (seed 21): when an answer is reconsidered, and what that may cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.fakes import TableModel
from decoding.monitors.enough import entropy_nats
from decoding.sequence import Sequence
from tests.decoding.step_models import END, ID, VOCAB, answer, line, pool, scripted, text
from turnout.errors import TurnoutError
from turnout.types import FinishReason


def unsure(entropies: list[float]) -> TableModel:
    """Answers of four letters and an end token; those of round i are uniform over so many tokens that its entropy is
    known: a round is told by the cues before it."""
    sizes = [round(math.exp(entropy)) for entropy in entropies]

    def logits(tokens: list[int]) -> torch.Tensor:
        written = text(tokens)
        place = written.count("?") - 1
        begun = len(written.rpartition("?")[2])
        row = torch.full((VOCAB,), -60.0)
        options = [ID[char] for char in "abcdefgh"][: sizes[place]] if begun < 4 else [END]
        row[options] = 0.0
        return row

    return TableModel("large", logits, VOCAB)


def enough(**params: Any) -> dict[str, Any]:
    return {"monitor": {"name": "enough", "cue": "?", "top": 8, **params}}


def rounds(seq: Sequence) -> int:
    return text(seq.tokens).count("$")


async def test_the_gate_decides_about_another_round() -> None:
    # Mean over four letters and a certain end token: four fifths of the letters' entropy.
    models = pool(scripted("small", line("a")), unsure([math.log(4), math.log(2), math.log(8)]))
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
    for threshold, expected in ((64.0, 1), (0.8 * math.log(4) + 1e-3, 1), (0.8 * math.log(2) + 1e-3, 2), (-1.0, 3)):
        seq, segments, request = await answer(models, "monitored", enough(threshold=threshold), **common)
        assert rounds(seq) == expected
        assert seq.finish_reason is FinishReason.STOP
        assert [s.stopped_by for s in segments].count("round") == expected - 1
        assert f"{0.8 * math.log(4):.3f}" in request.notes[0]
        assert all(token.top == () for s in segments for token in s.tokens)


async def test_rounds_that_were_delivered_are_made_again_whatever_the_gate_says_now() -> None:
    models = pool(scripted("small", line("a")), unsure([math.log(4)] * 3))
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
    whole, _, _ = await answer(models, "monitored", enough(threshold=-1.0), **common)
    ids = [token.id for token in whole.generated]
    cue = ids.index(ID["?"])
    for delivered, expected in ((ids[:cue], 1), (ids[: cue + 1], 2), (ids, 3)):
        seq, _, _ = await answer(models, "monitored", enough(threshold=64.0), **common, delivered=delivered)
        assert rounds(seq) == expected
        assert [token.id for token in seq.generated][: len(delivered)] == delivered
    closed, _, _ = await answer(models, "monitored", enough(threshold=64.0), **common)
    kept = [token.id for token in closed.generated]
    seq, _, _ = await answer(models, "monitored", enough(threshold=-1.0), **common, delivered=kept[:3])
    assert rounds(seq) == 3


async def test_the_first_round_is_the_plain_answer() -> None:
    models = pool(scripted("small", line("a")), unsure([math.log(4)] * 3))
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
    plain, _, _ = await answer(models, "plain", {}, **common)
    seq, _, _ = await answer(models, "monitored", enough(threshold=-1.0), **common)
    assert seq.tokens[: len(plain)] == plain.tokens
    assert len(seq) > len(plain)


async def test_there_is_no_round_beyond_the_answers_length() -> None:
    models = pool(scripted("small", line("a")), unsure([math.log(4)] * 3))
    seq, _, _ = await answer(models, "monitored", enough(threshold=-1.0), max_tokens=5, temperature=1.0)
    assert rounds(seq) == 1
    seq, _, _ = await answer(models, "monitored", enough(threshold=-1.0), max_tokens=8, temperature=1.0)
    assert (rounds(seq), seq.finish_reason) == (1, FinishReason.LENGTH)


async def test_what_sure_questions_leave_unsure_ones_may_use() -> None:
    sure, doubtful = unsure([0.0] * 3), unsure([math.log(8)] * 3)
    counts = []
    models = pool(scripted("small", line("a")), sure)
    for index in range(6):
        current = sure if index < 3 else doubtful
        models.large.next_logits = current.next_logits  # type: ignore[attr-defined]
        params = enough(threshold=0.5, budget=8, rounds=3)
        seq, _, _ = await answer(models, "monitored", params, max_tokens=60, temperature=1.0, seed=index)
        counts.append(rounds(seq))
    # A round takes 5 tokens and a question brings 8. Three sure ones leave 9, which pay for two rounds more; later
    # ones live on what is left over.
    assert counts == [1, 1, 1, 3, 2, 1]


def test_entropies_of_renormalised_probabilities() -> None:
    twenty = tuple((token, math.log(0.01)) for token in range(20))
    assert entropy_nats(twenty) == pytest.approx(math.log(20))
    assert entropy_nats(((3, 0.0),)) == 0.0
    assert entropy_nats(((3, 0.0), (4, -math.inf))) == 0.0


async def test_the_threshold_comes_from_an_artifact_of_the_same_models(tmp_path: Path) -> None:
    small = unsure([math.log(4)] * 3)
    small.name = "small"
    models = pool(small, unsure([math.log(4)] * 3))
    models.artifacts = Artifacts(tmp_path)
    settings = {"top": 8, "thresholds": {"mean": 0.8 * math.log(4) + 1e-3, "bayes": 0.1}}
    Artifact("enough", "test", settings, {"large": models.large.digest}, {}).save(tmp_path / "enough.safetensors")
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0}
    for estimator, expected in (("mean", 1), ("bayes", 3)):
        seq, _, request = await answer(models, "monitored", enough(estimator=estimator), **common)
        assert rounds(seq) == expected
        assert not any("other answers" in note for note in request.notes)
    by_small = {**enough(estimator="bayes"), "inner": {"name": "plain", "model": "small"}}
    _, _, request = await answer(models, "monitored", by_small, **common)
    assert "the threshold was measured on other answers than those of small" in request.notes
    _, _, request = await answer(models, "monitored", {**by_small, **enough(threshold=0.1)}, **common)
    assert not any("other answers" in note for note in request.notes)
    models.large.digest = "another"
    with pytest.raises(TurnoutError, match="large model"):
        await answer(models, "monitored", enough(), **common)


async def test_a_refused_threshold_says_what_would_be_accepted(tmp_path: Path) -> None:
    """`mean` was kept although harmful, `bayes` was left out, and of `information` the artifact knows nothing."""
    models = pool(scripted("small", line("a")), unsure([math.log(4)] * 3))
    models.artifacts = Artifacts(tmp_path)
    settings = {
        "top": 8,
        "accuracy": 0.9,
        "thresholds": {"mean": 0.5, "scale_free": 0.5},
        "harmful": {"mean": 0.5, "bayes": 0.25},
    }
    Artifact("enough", "test", settings, {"large": models.large.digest}, {}).save(tmp_path / "enough.safetensors")

    async def refusal(estimator: str, harmful: bool) -> str:
        with pytest.raises(TurnoutError) as caught:
            await answer(models, "monitored", enough(estimator=estimator, harmful=harmful), max_tokens=20)
        assert caught.value.field == "method.params.monitor.estimator"
        assert "harmless are: scale_free" in caught.value.message
        return caught.value.message

    kept = await refusal("mean", harmful=False)
    assert "'mean' was measured to make answers worse: 90.0% are right after one round, 50.0% with it" in kept
    assert "`harmful: true`" in kept
    assert "--keep-harmful" not in kept
    for harmful in (False, True):
        left_out = await refusal("bayes", harmful)
        assert "25.0% with it" in left_out
        assert "no threshold" in left_out
        assert "`--keep-harmful`" in left_out
        assert "`harmful: true`" in left_out
        assert "the artifact 'enough' has no threshold for 'information'" in await refusal("information", harmful)
