"""`turnout train draft`: from a target's folder to a pool that drafts with what was made."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.utils.logging import disable_progress_bar

from decoding.vocabulary import FILE, SubVocabulary
from pool.local_pool import LocalPool
from tests.training.draft_target import save_tiny
from turnout.config import load_config
from turnout.errors import TurnoutError


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    disable_progress_bar()
    monkeypatch.setattr("turnout.drafts.drafts_folder", lambda: tmp_path / "drafts")
    return save_tiny(tmp_path / "target")


def test_a_trained_draft_is_found_by_its_pool_and_drafts_its_ids(run: Any, target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"why {number}?\n" for number in range(16)), encoding="utf-8")
    values: dict[str, Any] = {
        "models": {"big": {"path": str(target), "dtype": "float32", "kv_memory_bytes": 4 << 20}},
        "pools": {"p": {"large": "big"}},
        "engine": {"threads": 1, "kernels": "torch"},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    arguments = ("train", "draft", "--config", str(config), "--model", "big", "--prompts", str(prompts))
    short = ("--steps", "2", "--max-tokens", "6", "--temperature", "0", "--layers", "2")
    out = str(tmp_path / "mine")
    made = run(*arguments, *short, "--out", out, "--json")
    assert made.code == 0, made.err
    report = json.loads(made.out)
    again = run(*arguments, *short, "--out", out)  # nothing is left to do
    assert again.code == 0, again.err
    assert f"{report['accepted']:.2f} of 4 accepted" in again.out
    stored = json.loads((tmp_path / "mine" / "draft.json").read_text(encoding="utf-8"))
    assert {**stored, "folder": out, "note": ""} == report

    values["pools"]["p"]["draft"] = "auto"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    settings = load_config(config)
    assert settings.pools["p"].small == "big-draft"
    pool = LocalPool.load("p", settings)
    small = pool.engines["big-draft"]
    assert small.num_layers == 2
    assert small.draft_vocabulary is not None
    assert len(small.draft_vocabulary) == report["vocabulary"]["ids"]
    asyncio.run(pool.close())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "none"], "layers: must be chosen or a number of at least 1, got 'none'"),
        (["--count-text"], "count_text: needs a text: give --text FILE"),
        (["--out", "{file}"], "cannot write"),
    ],
)
def test_wrong_options_are_refused_before_the_work(
    run: Any, target: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    refused = run("train", "draft", "--model", str(target), *(each.format(file=file) for each in arguments))
    assert (refused.code, len(refused.err.splitlines())) == (1, 1)
    assert message in refused.err


def test_a_list_of_ids_is_rising_ids_of_the_model(tmp_path: Path) -> None:
    assert SubVocabulary.load(tmp_path, 9, "m") is None
    SubVocabulary(torch.tensor([1, 4, 8])).save(tmp_path)
    found = SubVocabulary.load(tmp_path, 9, "m")
    assert found is not None
    assert found.ids.tolist() == [1, 4, 8]
    assert found.below(9) is found
    assert found.below(8).ids.tolist() == [1, 4]
    for ids in ([], [4, 1], [1, 9], [-1, 2], [1, 1], [[1], [2]], "12", [1.5]):
        (tmp_path / FILE).write_text(json.dumps({"ids": ids}), encoding="utf-8")
        with pytest.raises(TurnoutError, match="m: "):
            SubVocabulary.load(tmp_path, 9, "m")
