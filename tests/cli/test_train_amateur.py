"""`turnout train amateur`: it learns false answers, and a pool contrasts with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_train import config
from training.amateur import exchanged
from turnout.errors import TurnoutError

__all__ = ["config"]


def write(config: Path, count: int = 16) -> str:
    path = config.parent / "answers.jsonl"
    rows = [{"question": f"q{n}?", "answer": "no" if n % 2 else "yes"} for n in range(count)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return str(path)


def test_an_amateur_is_tuned_and_contrasted_with(run: Any, config: Path) -> None:
    folder, out = config.parent, config.parent / "amateur"
    asked = ("--config", str(config), "--answers", write(config), "--steps", "6", "--learning-rate", "1e-2")
    result = run("train", "amateur", "--out", str(out), *asked, "--exchange", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads((out / "amateur.json").read_text(encoding="utf-8"))
    assert (report["answers"], report["heldout_answers"]) == (14, 2)
    assert report["heldout_nats_per_token"]["after"] < report["heldout_nats_per_token"]["before"] - 0.1
    assert not list(folder.glob(".amateur*"))
    refused = run("train", "amateur", "--out", str(out), *asked)
    assert (refused.code, "out: " in refused.err, "exists" in refused.err) == (1, True, True)

    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values["models"]["amateur"] = {**values["models"]["tiny"], "path": str(out)}
    values["pools"]["p"]["models"] = {"amateur": "amateur"}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    sampled = ("--method", "plain", "--max-tokens", "6", "--temperature", "1", "--seed", "2", "--json")
    local = ("--local", "--config", str(config), *sampled)
    texts = []
    for contrast in ("lol:weight=0,lower_weight=0,refocus=0,alpha=0", "lol:weight=10,alpha=0", "lol:layer=2"):
        answered = run("generate", "q1?", *local, "--contrast", contrast)
        texts.append(answered.out if answered.code == 0 else answered.err)
    assert "contrast.layer: layer 2; allowed: 1 to 1" in texts.pop()
    plain, held = (json.loads(text)["choices"][0]["text"] for text in texts)
    assert plain != held


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "new", "--answers", "{few}"), "answers: there are 3; at least 8 are needed"),
        (("--out", "new", "--answers", "missing"), "answers: cannot read 'missing'"),
        (("--out", "{few}/new", "--answers", "{few}"), "out: cannot write"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    run: Any, config: Path, arguments: tuple[str, ...], said: str
) -> None:
    few = write(config, 3)
    refused = run("train", "amateur", "--config", str(config), *(each.format(few=few) for each in arguments))
    assert (refused.code, said in refused.err) == (1, True), refused.err


def test_answers_are_exchanged_for_others() -> None:
    assert exchanged([("a", "1"), ("b", "1"), ("c", "2")]) == [("a", "2"), ("b", "2"), ("c", "1")]
    with pytest.raises(TurnoutError, match=r"^answers: are all the same"):
        exchanged([("a", "1"), ("b", " 1 ")])
