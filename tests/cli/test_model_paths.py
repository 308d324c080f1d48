"""What the command line says of models that are elsewhere, and of pairs that do not suit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file


def test_a_small_model_that_is_the_larger_is_noted(run: Any, config_file: Path) -> None:
    save_file({"a": np.zeros((2, 3000), np.float32)}, config_file.parent / "s" / "model.safetensors")
    code, _, error = run("config", "check", str(config_file))
    sizes = "s, the small model, has 6,000 parameters, and l, the large one, 0"
    assert (code, error) == (0, f"p: {sizes}: a draft costs more than what it drafts for; exchange the two\n")
    large = config_file.parent / "l" / "model.safetensors"
    (config_file.parent / "s" / "model.safetensors").replace(large)
    save_file({}, config_file.parent / "s" / "model.safetensors")
    assert run("config", "check", str(config_file)).err == ""


def test_a_model_without_a_chat_template_is_noted(run: Any, config_file: Path) -> None:
    (config_file.parent / "l" / "chat_template.jinja").unlink()
    code, _, error = run("config", "check", str(config_file))
    assert (code, error.partition(", so")[0]) == (0, "p: l has no chat template")


def test_what_is_elsewhere_is_noted_and_not_downloaded(
    run: Any, config_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    values = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    values["models"]["s"]["path"], values["models"]["l"]["path"] = "hf:org/small@v1", "memory://bucket/large"
    config_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    code, out, error = run("config", "check", str(config_file))
    assert (code, out) == (0, f"{config_file}: ok; 2 models; pools: p (s + l, plain)\n")
    assert error.splitlines() == [
        "models.l.path: this machine has nothing of memory://bucket/large, which is downloaded at the start",
        "models.s.path: this machine has nothing of hf:org/small@v1, which is downloaded at the start",
        "p: the vocabularies of its models are compared at the start, when all of them are here",
    ]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    notes = run("config", "check", str(config_file)).err.splitlines()
    assert notes[1].endswith(
        "of hf:org/small@v1, and HF_HUB_OFFLINE is set, so that it cannot be downloaded at the start"
    )
    assert "not all of it" in run("models", "--config", str(config_file)).out
    values["models"]["s"]["path"] = "hf:small"
    config_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert run("config", "check", str(config_file)).err.startswith("turnout: models.s.path: 'hf:small' names no ")
