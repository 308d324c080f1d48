"""`turnout train reward_model`, `judge` and `enough`: on the demo pair, and on models that know nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifact
from tests.cli.test_train import config

__all__ = ["config"]

FEW = ("--count", "16", "--max-tokens", "48", "--json")


def test_a_reward_model_is_trained_on_arithmetic_and_used(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "reward_model.safetensors"
    arguments = ("train", "reward_model", "--out", str(out), *FEW, "--epochs", "5")
    result = run(*arguments)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert 0.0 < report["heldout"]["base_rate"] < 1.0
    artifact = Artifact.load(out)
    assert (artifact.kind, list(artifact.models)) == ("reward_model", ["small"])
    assert json.loads(run(*arguments).out) == report  # everything is there already
    changed = run(*arguments, "--reads", "large")
    assert (changed.code, changed.out) == (1, "")
    assert "other settings" in changed.err


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("reward_model", (), "that are all wrong; both kinds are needed"),
        ("enough", (), "0 right and 8 wrong answers; at least 2 of each are needed"),
        ("judge", ("--count", "8", "--pool", "nobody"), "pool: 'nobody' is not known; available: p"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_in_one_line(
    run: Any, config: Path, kind: str, options: tuple[str, ...], said: str
) -> None:
    out = config.parent / "heads" / f"{kind}.safetensors"
    result = run("train", kind, "--out", str(out), "--config", str(config), *FEW, *options)
    assert (result.code, result.out) == (1, "")
    assert said in result.err.splitlines()[-1]
    assert not out.exists()


def test_the_file_must_be_one_that_pools_find(run: Any, tmp_path: Path) -> None:
    result = run("train", "judge", "--out", str(tmp_path / "judge.bin"))
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "must end in .safetensors" in result.err
