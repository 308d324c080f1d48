"""`turnout route` and `generate --explain`, over a small routed pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from training.random_models import byte_tokenizer, llama_config, random_model

RULES = [{"when": {"pattern": "hard"}, "method": {"name": "plain", "model": "large"}}]
SMALL = {"default": {"method": {"name": "plain", "model": "small"}}, "rules": RULES}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for name, seed in (("small", 0), ("large", 1)):
        random_model(llama_config(), seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    return written(tmp_path, SMALL)


def written(folder: Path, params: dict[str, Any]) -> Path:
    models = {
        name: {"path": str(folder / name), "dtype": "float32", "kv_memory_bytes": 8 << 20}
        for name in ("small", "large")
    }
    routing = {
        "policy": {"name": "static", "params": params},
        "log": {"path": str(folder / "route.jsonl"), "texts": True},
        "sticky": {"seconds": 60},
    }
    pools = {"p": {"small": "small", "large": "large", "routing": routing}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"models": models, "pools": pools, "engine": {"threads": 1}}), encoding="utf-8")
    return path


def test_an_answer_is_explained_logged_shown_and_replayed(run: Any, config: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "route.jsonl")
    ask = ("generate", "a hard one", "--raw", "--local", "--config", str(config), "--max-tokens", "3", "--explain")
    told = run(*ask)
    assert told.code == 0
    assert "rule 1: pattern found" in told.out
    document = json.loads(run(*ask, "--json", "--session", "s").out)
    assert document["usage"]["route"]["params"] == {"model": "large"}

    shown = json.loads(run("route", "show", log, "--json").out)
    assert [(group["policy"], group["method"], group["requests"]) for group in shown] == [("static", "plain", 2)]
    assert "100.0%" in run("route", "show", log).out

    answer, body = tmp_path / "answer.json", tmp_path / "body.json"
    answer.write_text(json.dumps(document))
    body.write_text(json.dumps({"prompt": "a hard one", "max_tokens": 3, "stream": True}))
    explain = ("route", "explain", str(body), "--config", str(config))
    assert json.loads(run(*explain, "--json").out)["decision"]["params"] == {"model": "large"}
    same = run(*explain, "--against", str(answer))
    assert (same.code, "the recorded decision: the same" in same.out) == (0, True)

    line = tmp_path / "line.json"
    line.write_text(Path(log).read_text().splitlines()[0])
    assert run("route", "explain", str(line), "--config", str(config)).code == 0
    written(tmp_path, {"default": {"method": {"name": "plain", "model": "small"}}})
    changed = run("route", "explain", str(line), "--config", str(config))
    assert changed.code == 1
    assert "params: {'model': 'large'} then, {'model': 'small'} now" in changed.out
    assert "the rules or the artifact have changed since" in changed.out
    assert len(Path(log).read_text().splitlines()) == 2  # explaining logs nothing


def test_what_cannot_be_explained_is_refused_in_one_line(run: Any, config: Path, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    for text, says in (
        ("nonsense", "is neither a JSON object nor a route log"),
        ("nonsense\n", "line 1: is no JSON"),
        ("[1]", "line 1: is no entry of a route log"),
        ('{"prompt": "x", "decoding": {"method": "plain"}}', "the request is not routed: it names 'plain'"),
        ('{"prompt": ["x", "y"]}', "one prompt at a time (got 2)"),
        ('{"prompt": "x", "colour": 1}', "colour: unknown"),
    ):
        body.write_text(text)
        refused = run("route", "explain", str(body), "--config", str(config))
        assert refused.code == 1
        assert says in refused.err
        assert refused.err.count("\n") == 1
    body.write_text('{"prompt": "x"}')
    refused = run("route", "explain", str(body))
    assert "pools.demo.routing: is absent" in refused.err
    refused = run("route", "explain", str(body), "--config", str(config), "--against", str(body))
    assert "against: " in refused.err
    refused = run("route", "show", str(tmp_path / "none"))
    assert "log: cannot read" in refused.err
