"""Adaptive best-of that may give a hopeless question no sample at all (seed 45, b = 0)."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding.artifacts import Artifact
from tests.router.probes import asked, models_of, policy, save_router
from turnout.errors import Code, TurnoutError


async def test_the_hopeless_are_refused_where_no_answer_will_do(tmp_path: Path):
    """With as many samples to give, the others have those that hopeless questions would waste."""
    chances = [[0.0005 if token < 5 else 0.5, 0.9] for token in range(10)]
    save_router(tmp_path, chances)
    artifact = Artifact.load(tmp_path / "router.safetensors")
    artifact.settings["quantiles"]["p_small"] = [0.0005] * 51 + [0.45] * 51
    artifact.save(tmp_path / "router.safetensors")
    models = models_of(tmp_path)

    async def given(least: int) -> list[int]:
        router, counts = policy("adaptive_best_of", average=2, most=6, least=least), []
        for token in range(10):
            try:
                counts.append((await router.decide(asked(token), models)).params["k"])
            except TurnoutError as refused:
                assert refused.code is Code.OUT_OF_RANGE
                assert "no answer is worth a sample" in refused.message
                assert "chance of success of 0.00" in refused.message
                counts.append(0)
        return counts

    assert await given(1) == [1] * 5 + [3] * 5
    assert await given(0) == [0] * 5 + [4] * 5


def test_fewer_samples_than_requests_need_leave_to_refuse(tmp_path: Path):
    with pytest.raises(TurnoutError, match="average must be at least 1, or least 0"):
        policy("adaptive_best_of", average=0.5)
    assert policy("adaptive_best_of", average=0.5, least=0).params.average == 0.5
    with pytest.raises(TurnoutError, match="least 0 goes with by bins alone"):
        policy("adaptive_best_of", by="window", least=0)
