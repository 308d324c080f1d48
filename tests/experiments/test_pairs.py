"""Pairs by the value of `--pair`, and benchmarks that run on the demo pair only."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from benchmarks.harness import command_line, parse
from experiments import real_model
from experiments.pairs import DEMO, REAL, open_pair
from turnout.errors import TurnoutError

REASON = "it scores sums"


def options(*arguments: str, demo_only: str = "") -> Namespace:
    return parse(command_line("A text.", Path("page.md"), takes_pair=not demo_only, demo_only=demo_only), arguments)


def test_the_demo_pair_is_the_default() -> None:
    pair = open_pair(options().pair)
    assert (pair.name, pair.pool, pair.title) == (DEMO, "demo", "demo pair")
    assert pair.folder("small") != pair.folder("large")
    assert {model.dtype for model in pair.in_dtype("float32").models.values()} == {"float32"}


def test_the_real_pair_is_the_model_and_its_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(real_model.DRAFT_VARIABLE, raising=False)
    with pytest.raises(TurnoutError, match="turnout train draft"):
        open_pair(REAL)
    for variable in (real_model.MODEL_VARIABLE, real_model.DRAFT_VARIABLE):
        folder = tmp_path / variable
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        monkeypatch.setenv(variable, str(folder))
    pair = open_pair(REAL)
    assert pair.folder("small") == (tmp_path / real_model.DRAFT_VARIABLE).resolve()
    assert pair.folder("large") == (tmp_path / real_model.MODEL_VARIABLE).resolve()
    assert pair.pool == REAL


def test_a_configuration_is_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    models = {"one": {"path": "demo:small"}, "two": {"path": "demo:large"}}
    path.write_text(yaml.safe_dump({"models": models, "pools": {"chat": {"small": "one", "large": "two"}}}))
    pair = open_pair(str(path))
    assert (pair.pool, pair.members, pair.title) == ("chat", ("one", "two"), "the pair of mine.yaml")


def test_an_unknown_pair_is_refused() -> None:
    with pytest.raises(TurnoutError, match="pair: 'reel' is not known; available: a configuration file, demo, real"):
        open_pair("reel")


def test_another_pair_has_a_page_of_its_own() -> None:
    assert options().out == Path("page.md")
    assert options("--pair", "real").out == Path("page-real.md")
    assert options("--pair", "folder/mine.yaml").out == Path("page-mine.md")


def test_a_benchmark_of_the_demo_pair_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert options("--pair", "demo", demo_only=REASON).out == Path("page.md")
    with pytest.raises(SystemExit):
        options("--pair", "real", demo_only=REASON)
    assert f"--pair must be demo: {REASON}" in capsys.readouterr().err
