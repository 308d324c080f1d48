"""`turnout profile`, on a model small enough to be measured in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from training.random_models import byte_tokenizer, llama_config, random_model


def test_a_profile_shows_measurements_beside_predictions_and_bounds(run: Any, tmp_path: Path) -> None:
    model = random_model(llama_config(), seed=0)
    model.save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    member = {"path": str(tmp_path / "tiny"), "dtype": "float32", "kv_memory_bytes": 8 << 20}
    values = {
        "models": {"s": member, "l": member},
        "pools": {"p": {"small": "s", "large": "l"}},
        "engine": {"threads": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    result = run("profile", str(tmp_path / "config.yaml"), "--model", "s", "--json")
    assert result.code == 0, result.err
    [profile] = json.loads(result.out)
    assert profile["name"] == "s"
    assert profile["shape"]["num_parameters"] == model.num_parameters()
    assert [(r["prompt"], r["output"]) for r in profile["requests"]] == [(100, 20), (300, 12), (400, 64)]
    assert [c["context"] for c in profile["contexts"]] == [512]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in profile["forwards"])
    unknown = run("profile", str(tmp_path / "config.yaml"), "--model", "x")
    assert unknown == (1, "", "turnout: model: 'x' is not known; available: l, s\n")
