"""`turnout train`, on a model small enough to be trained for in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoding.artifacts import Artifact
from decoding.drafters.medusa import MedusaDrafter
from tests.decoding.head_models import StateModel, pool_of
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.errors import TurnoutError

COMMON = ("--count", "16", "--max-tokens", "6", "--steps", "4", "--batch-size", "8", "--json")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for name, seed in (("tiny", 0), ("other", 1)):
        random_model(llama_config(), seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "questions.txt").write_text("".join(f"question {i}\n" for i in range(16)), encoding="utf-8")
    members = {
        name: {"path": str(tmp_path / name), "dtype": "float32", "kv_memory_bytes": 8 << 20}
        for name in ("tiny", "other")
    }
    values = {
        "models": members,
        "pools": {"p": {"small": "other", "large": "tiny", "artifacts": str(tmp_path / "heads")}},
        "engine": {"threads": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "config.yaml"


@pytest.mark.parametrize("kind", ["kangaroo", "eesd"])
def test_an_exit_head_is_trained_saved_and_measured(run: Any, config: Path, kind: str) -> None:
    folder = config.parent
    out = folder / "heads" / f"{kind}.safetensors"
    prompts = ("--config", str(config), "--prompts", str(folder / "questions.txt"))
    arguments = ("train", kind, "--out", str(out), *prompts, *COMMON)
    result = run(*arguments)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert report["examples"] == 14
    assert 1.0 <= report["tokens_per_round"] <= 6.0
    artifact = Artifact.load(out)
    assert (artifact.kind, list(artifact.models), artifact.settings["exit_layer"]) == (kind, ["large"], 1)
    assert ("down.weight" in artifact.tensors) == (kind == "eesd")
    assert json.loads(run(*arguments).out) == report
    asked = ("--local", "--config", str(config), "--method", "speculative", "--max-tokens", "8", "--json")
    drafted = run("generate", "ask", *asked, "--param", f"drafter={kind}")
    assert drafted.code == 0, drafted.err
    for name, said in ((out, "other settings"), (folder / "new.safetensors", "exit_layer: 2; allowed: 1 to 1")):
        refused = run("train", kind, "--out", str(name), *prompts, *COMMON, "--exit-layer", "2")
        assert refused.code == 1
        assert said in refused.err


@pytest.mark.parametrize("kind", ["disco", "specdecpp"])
def test_a_length_policy_is_trained_for_a_pair(run: Any, config: Path, kind: str) -> None:
    folder = config.parent
    out = folder / "heads" / f"{kind}.safetensors"
    arguments = ("train", kind, "--out", str(out), "--config", str(config), "--prompts", str(folder / "questions.txt"))
    result = run(*arguments, "--count", "16", "--max-tokens", "6", "--epochs", "2", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert len(report["losses"]) == 2
    artifact = Artifact.load(out)
    assert (artifact.kind, sorted(artifact.models)) == (kind, ["large", "small"])
    refused = run(*arguments, "--pool", "nobody")
    assert (refused.code, refused.out) == (1, "")
    assert "pool: 'nobody' is not known; available: p" in refused.err


@pytest.mark.parametrize(("kind", "more"), [("medusa", ()), ("medusa", ("--own-matrices",)), ("redrafter", ())])
def test_a_head_is_trained_saved_and_measured(run: Any, config: Path, kind: str, more: tuple[str, ...]) -> None:
    folder = config.parent
    out = folder / "heads" / "mine.safetensors"
    prompts = ("--config", str(config), "--prompts", str(folder / "questions.txt"))
    depth = {"medusa": "--heads", "redrafter": "--ahead"}[kind]
    arguments = ("train", kind, "--out", str(out), *prompts, *COMMON, depth, "2", *more)
    result = run(*arguments)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert len(report["rank_accuracies"]) == 2
    assert 1.0 <= report["tokens_per_round"] <= 6.0
    artifact = Artifact.load(out)
    assert (artifact.kind, list(artifact.models)) == (kind, ["large"])
    assert artifact.settings["accuracies"] == report["rank_accuracies"]
    assert ("outputs.1.weight" in artifact.tensors) == bool(more)

    again = run(*arguments)  # everything is there already: nothing is trained, and the outcome is the same
    assert json.loads(again.out) == report
    changed = run(*arguments, "--seed", "1")
    assert changed.code == 1
    assert "other settings" in changed.err


def test_a_head_trained_for_another_model_is_refused(run: Any, config: Path) -> None:
    out = config.parent / "heads" / "medusa.safetensors"
    prompts = ("--config", str(config), "--prompts", str(config.parent / "questions.txt"))
    trained = run("train", "medusa", "--out", str(out), *prompts, *COMMON, "--model", str(config.parent / "other"))
    assert trained.code == 0, trained.err
    with pytest.raises(TurnoutError, match="was made for the large model with digest"):
        MedusaDrafter().check(pool_of(StateModel("large", [1, 0]), out.parent))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "x.bin"), "out: must end in .safetensors, got 'x.bin'"),
        (("--out", "x.safetensors", "--model", "nobody"), "model: 'nobody' is not known; available: "),
        (("--out", "x.safetensors", "--prompts", "few.txt"), "prompts: has 2 lines; at least 8 are needed"),
    ],
)
def test_refusals_are_one_line(run: Any, tmp_path: Path, monkeypatch: Any, arguments: Any, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("one\ntwo\n", encoding="utf-8")
    result = run("train", "medusa", *arguments)
    assert (result.code, result.out) == (1, "")
    assert said in result.err
    assert result.err.count("\n") == 1


def test_heads_of_autodeco_are_trained_saved_and_used(run: Any, config: Path) -> None:
    folder = config.parent
    out, texts = folder / "heads" / "autodeco.safetensors", folder / "texts.jsonl"
    lines = [json.dumps({"prompt": f"question {i}", "answer": f"{i} it is"}) for i in range(16)]
    texts.write_text("\n".join(lines), encoding="utf-8")
    asked = ("--config", str(config), "--texts", str(texts), "--count", "16", "--steps", "4", "--inner", "8")
    result = run("train", "autodeco", "--out", str(out), *asked, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert 0.0 < report["heldout"]["mean_temperature"] < 2.0
    assert Artifact.load(out).kind == "autodeco"
    local = ("--local", "--config", str(config), "--method", "plain", "--max-tokens", "8", "--temperature", "1")
    answered = run("generate", "ask", *local, "--processor", "autodeco", "--json")
    assert answered.code == 0, answered.err
    assert "artifact autodeco, version " in answered.out
    texts.write_text("no json\n" * 16, encoding="utf-8")
    refused = run("train", "autodeco", "--out", str(out), *asked)
    assert refused.code != 0
    assert "line 1 of 'texts.jsonl' must be" in refused.err
