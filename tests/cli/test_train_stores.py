"""`turnout train knn_lm` and `turnout train caad`: made, used by requests, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifact
from tests.cli.test_train import config
from training.random_models import byte_tokenizer

__all__ = ["config"]

TEXTS = "\n\n".join(f"text {number}: the cat sat on mat {number}." for number in range(16))
ANSWERS = "".join(json.dumps({"question": f"q{n}?", "answer": f"It is {n}."}) + "\n" for n in range(4))


def train(run: Any, config: Path, kind: str, *arguments: str) -> Any:
    given = config.parent / "given"
    given.write_text(TEXTS if kind == "knn_lm" else ANSWERS, encoding="utf-8")
    option = "--texts" if kind == "knn_lm" else "--answers"
    return run("train", kind, "--config", str(config), option, str(given), *arguments, "--json")


def answered(run: Any, config: Path, contrast: str, *arguments: str) -> Any:
    asked = (
        "--local",
        "--config",
        str(config),
        "--method",
        "plain",
        "--max-tokens",
        "8",
        "--temperature",
        "1",
        "--seed",
        "3",
    )
    return run("generate", "the cat", *asked, "--contrast", contrast, *arguments, "--json")


@pytest.mark.parametrize(("kind", "layer"), [("knn_lm", -2), ("caad", 1)])
def test_a_store_is_made_and_used(run: Any, config: Path, kind: str, layer: int) -> None:
    out = config.parent / "heads" / f"{kind}.safetensors"
    result = train(run, config, kind, "--out", str(out), "--layer", str(layer))
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    artifact = Artifact.load(out)
    assert (artifact.kind, list(artifact.models), artifact.settings["head"]["layer"]) == (kind, ["large"], layer)
    assert report["entries"] == len(artifact.tensors["keys"]) == len(artifact.tensors["values"])
    if kind == "knn_lm":
        texts = TEXTS.split("\n\n")
        assert report["entries"] == sum(len(each) - 1 for place, each in enumerate(texts) if place % 8 != 7)
        assert report["heldout_tokens"] == len(texts[7]) + len(texts[15]) - 2
        assert report["nats_per_token_mixed"] < report["nats_per_token"]  # an untrained model, and texts that repeat
        assert 0.0 <= report["tokens_harmed"] <= 1.0
        assert byte_tokenizer().decode(artifact.tensors["values"][: len(texts[0]) - 1]) == texts[0][1:]
    else:
        assert report["entries"] == 4 * len("It is 0.")
        assert -1.0 <= report["cosine_of_other_examples"] <= 1.0
    strong = {"knn_lm": "weight=1", "caad": "weight=50,floor=-1"}[kind]
    plain = answered(run, config, f"{kind}:weight=0")
    held = answered(run, config, f"{kind}:{strong}")
    assert (plain.code, held.code) == (0, 0), held.err
    assert json.loads(plain.out)["choices"][0]["text"] != json.loads(held.out)["choices"][0]["text"]


def test_a_store_of_a_tenant_is_put_where_it_alone_finds_it(run: Any, config: Path) -> None:
    heads = config.parent / "heads"
    result = train(run, config, "knn_lm", "--out", str(heads / "knn_lm.safetensors"), "--tenant", "acme")
    assert result.code == 0, result.err
    assert (heads / "tenants" / "acme" / "knn_lm.safetensors").is_file()
    refused = answered(run, config, "knn_lm")  # of the tenant "default"
    assert refused.code == 1
    assert "contrast.artifact: 'knn_lm' is not known" in refused.err


def test_what_cannot_be_a_store_is_refused_in_one_line(run: Any, config: Path, tmp_path: Path) -> None:
    out, bad = ("--out", str(tmp_path / "s.safetensors")), tmp_path / "bad"
    for tenant in ("..", "a/b", ""):
        refused = train(run, config, "knn_lm", *out, "--tenant", tenant)
        assert refused.code == 1
        assert "tenant: must match" in refused.err
    refused = train(run, config, "caad", *out, "--layer", "9")
    assert "layer: layer 9; allowed: -2 to 2" in refused.err
    for content, said in (
        ("one\n\ntwo", "texts: there are 2, between blank lines; at least 8 are needed"),
        ("", "texts: there are 0"),
    ):
        bad.write_text(content, encoding="utf-8")
        refused = run("train", "knn_lm", "--config", str(config), *out, "--texts", str(bad))
        assert (refused.code, said in refused.err) == (1, True), refused.err
    for content, said in (
        ("", "answers: there are none"),
        ('{"question": "q"}', "answers: line 1: must be an object with"),
        ('\n{"question": "q", "answer": " "}', "answers: line 2: `question` and `answer` must be texts"),
        ("[1]", "answers: line 1"),
    ):
        bad.write_text(content, encoding="utf-8")
        refused = run("train", "caad", "--config", str(config), *out, "--answers", str(bad))
        assert (refused.code, said in refused.err) == (1, True), refused.err
    refused = run("train", "caad", "--config", str(config), *out, "--answers", str(tmp_path / "missing"))
    assert (refused.code, "answers: cannot read 'missing'" in refused.err) == (1, True)
    assert not list(tmp_path.glob("s.*"))
