"""`turnout train uni_encoder`, `rank_gen` and `daemon`: trained on a file of passages, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifact
from tests.cli.test_train import config

__all__ = ["config"]


@pytest.mark.parametrize(
    ("kind", "more"), [("uni_encoder", ()), ("rank_gen", ()), ("daemon", ("--metric", "information"))]
)
def test_the_commands(run: Any, config: Path, kind: str, more: tuple[str, ...]) -> None:
    folder = config.parent
    lines = "".join(f"passage number {n} says {n * 7} and then {n * 3}\n" for n in range(20))
    (folder / "passages.txt").write_text(lines, encoding="utf-8")
    out = folder / "heads" / f"{kind}.safetensors"
    asked = ("--passages", str(folder / "passages.txt"), "--config", str(config), "--length", "6", "--json")
    few = () if kind == "daemon" else ("--epochs", "2")
    result = run("train", kind, "--out", str(out), *asked, *few, *more)
    assert result.code == 0, result.err
    assert json.loads(result.out) == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert Artifact.load(out).kind == kind
    params = ("--param", "k=2", "--param", f"rerank={kind}")
    shown = run(
        "generate", "ask", "--local", "--config", str(config), "--method", "best_of", *params, "--max-tokens", "4"
    )
    assert shown.code == 0, shown.err
    wrong = run("train", kind, "--out", str(out), *asked, "--length", "200")
    assert (wrong.code, "at least 16 must" in wrong.err) == (1, True)


@pytest.mark.parametrize("kind", ["semantic_entropy_probe", "key_value_bottleneck"])
def test_doubt_is_trained_on_questions(run: Any, config: Path, kind: str) -> None:
    """On random models all answers differ: their semantic entropies have nothing to teach, which is said in a line."""
    folder = config.parent
    out = folder / "heads" / f"{kind}.safetensors"
    asked = ("--prompts", str(folder / "questions.txt"), "--config", str(config), "--count", "16", "--samples", "3")
    result = run("train", kind, "--out", str(out), *asked, "--max-tokens", "4", "--json")
    if result.code:
        assert "prompts: " in result.err.splitlines()[-1]
        assert not out.exists()
    else:
        assert Artifact.load(out).settings["samples"] == 3
    wrong = run("train", kind, "--out", str(out), *asked, "--judge", "none")
    assert (wrong.code, "'none' is not known; available: asked, final_answer" in wrong.err) == (1, True)
