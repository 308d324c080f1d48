"""`turnout train kv-codecs`, on models that know nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import Artifact
from kvstore.base import ChunkShape
from kvstore.codecs.base import load_codec
from kvstore.profiles import read_profiles
from tests.cli.test_train import config

__all__ = ["config"]


def test_profiles_are_made_and_used(run: Any, config: Path) -> None:
    folder = config.parent / "heads"
    asked = ("--config", str(config), "--prompts", str(config.parent / "questions.txt"), "--max-tokens", "8")
    result = run("train", "kv-codecs", "--out", str(folder), *asked, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads((folder / "kv-codecs.report.json").read_text(encoding="utf-8"))
    assert list(report["models"]) == ["small", "large"]
    artifacts = {family: Artifact.load(folder / f"{family}.safetensors") for family in ("adaquant", "cachegen")}
    for family, artifact in artifacts.items():
        assert (artifact.kind, sorted(artifact.models)) == (f"kv-{family}", ["large", "small"])
        profiles = read_profiles(folder, artifact.models["large"])
        assert set(profiles) == {"adaquant", "cachegen"}
    layers, _, channels = profiles["cachegen"].tensors["spread"].shape
    kv = torch.randn(layers, 16, 2, channels // 16, 16)
    shape = ChunkShape(0, layers, 16, channels // 16, 16, kv.dtype)
    for name in ("adaquant", "cachegen-0"):
        codec, out = load_codec(name, profiles), torch.empty_like(kv)
        codec.decode(codec.encode(kv, shape), shape, out)
        assert out.isfinite().all()
    again = run("train", "kv-codecs", "--out", str(config.parent / "again"), *asked)
    assert again.code == 0, again.err
    assert "cachegen.safetensors" in again.out
    for family in artifacts:
        first, second = folder / f"{family}.safetensors", config.parent / "again" / f"{family}.safetensors"
        assert first.read_bytes() == second.read_bytes()


def test_what_cannot_be_read_is_refused_in_one_line(run: Any, config: Path) -> None:
    missing = config.parent / "missing.txt"
    few = config.parent / "few.txt"
    few.write_text("one\ntwo\n", encoding="utf-8")
    for prompts, said in ((missing, "cannot read"), (few, "prompts: there are 2; at least 8 are needed")):
        result = run(
            "train", "kv-codecs", "--out", str(config.parent), "--config", str(config), "--prompts", str(prompts)
        )
        assert (result.code, result.out) == (1, "")
        assert said in result.err.splitlines()[-1]
