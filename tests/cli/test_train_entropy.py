"""`turnout train em_ft` and `em_rl`: a folder that is a model like any other, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_train import config

__all__ = ["config"]


@pytest.mark.parametrize("form", ["ft", "rl"])
def test_a_model_is_tuned_and_answers(run: Any, config: Path, form: str) -> None:
    folder, out = config.parent, config.parent / "surer"
    asked = ("--config", str(config), "--prompts", str(folder / "questions.txt"), "--max-tokens", "4", "--steps", "2")
    command = ("train", f"em_{form}", "--out", str(out), *asked, "--batch-size", "2", "--json")
    result = run(*command)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads((out / "entropy_minimisation.json").read_text(encoding="utf-8"))
    assert (report["form"], report["prompts"], report["heldout_prompts"]) == (form, 14, 2)
    assert report["heldout"]["before"] != report["heldout"]["after"]
    assert not list(folder.glob(".surer*"))
    refused = run(*command)
    assert (refused.code, "out: " in refused.err, "exists" in refused.err) == (1, True, True)
    if form == "rl":
        out.rename(folder / "kept")
        assert json.loads(run(*command).out) == report  # the run's last checkpoint
        return
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values["models"]["tiny"]["path"] = str(out)
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    answered = run("generate", "q1?", "--local", "--config", str(config), "--method", "plain", "--max-tokens", "4")
    assert answered.code == 0, answered.err


def test_what_cannot_be_done_is_refused_in_one_line(run: Any, config: Path) -> None:
    questions = str(config.parent / "questions.txt")
    (config.parent / "few").write_text("a\nb\n", encoding="utf-8")
    for arguments, said in (
        (("em_rl", "--reward", "length"), "reward: must be token or trajectory, got 'length'"),
        (("em_ft", "--prompts", str(config.parent / "few")), "prompts: has 2 lines; at least 8 are needed"),
        (("em_ft", "--prompts", questions, "--max-tokens", "600"), "max_tokens: 600 after a prompt of"),
    ):
        refused = run("train", *arguments, "--out", str(config.parent / "new"), "--config", str(config), "--count", "8")
        assert (refused.code, said in refused.err) == (1, True), refused.err
