"""`turnout bench speculation`, on a tiny pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cli.main import main
from experiments.grid.contenders import automatic_names
from experiments.speculation.tasks import GROUPS
from tests.experiments.speculation_models import checkpoint


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def only_arithmetic() -> Iterator[None]:
    """As if there were no other texts. `monkeypatch.delitem` would put them back in another order."""
    every = dict(GROUPS)
    GROUPS.clear()
    GROUPS["arithmetic"] = every["arithmetic"]
    yield
    GROUPS.clear()
    GROUPS.update(every)


@pytest.fixture
def command(
    only_arithmetic: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """Run it on the pair, with everything it writes in a folder of the test's."""
    target, draft = checkpoint(tmp_path / "target"), checkpoint(tmp_path / "draft", seed=1)
    places = ("--target", target, "--draft", draft, "--out", tmp_path / "cells", "--results", tmp_path / "results")

    def run(*arguments: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["turnout", "bench", "speculation", *map(str, places), *arguments])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run


QUICK = ("--quick", "--methods", "plain,copyspec", "--dtype", "float32", "--threads", "1", "--no-peers")


def test_it_prints_a_table_and_writes_the_page(command: Callable[..., Outcome], tmp_path: Path) -> None:
    result = command(*QUICK)
    assert result.code == 0, result.err
    assert "Greedy, one prompt at a time" in result.out
    assert "2 equal" in result.out
    assert "not run: medusa" in result.out
    assert "0 of 2 cells; arithmetic" in result.err
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert written == {"speculation-target.md", "speculation-target.json", "speculation-target.png"}

    again = command(*QUICK, "--json")  # from what is saved
    assert "2 of 2 cells are there already" in again.err
    found = json.loads(again.out)
    assert found == json.loads((tmp_path / "results" / "speculation-target.json").read_text(encoding="utf-8"))
    assert {each["contender"] for each in found["figures"]} == {"plain", "copyspec"}
    assert found["setting"]["max_tokens"] == 16


def test_all_that_choose_by_themselves_have_a_name_together(command: Callable[..., Outcome]) -> None:
    result = command("--quick", "--methods", "automatic,copyspec+smartspec", "--threads", "1", "--no-peers", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    measured = {each["contender"] for each in found["figures"]}
    assert {"copyspec+smartspec", "model_chain+thompson", "ucb+smartspec"} <= measured
    assert measured == set(automatic_names()) - set(found["not run"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--methods", "plain,nonsense"), "methods: 'nonsense' is not known"),
        (("--groups", "poems"), "groups: 'poems' is not known; available: arithmetic"),
        (("--temperatures", "warm"), "must be numbers, got 'warm'"),
        (("--batches", "0"), "must be 0 to 2, and 1 to 64"),
    ],
)
def test_what_does_not_exist_is_refused(command: Callable[..., Outcome], arguments: Any, says: str) -> None:
    result = command(*arguments)
    assert result.code == 1
    assert says in result.err


def test_a_wrong_answer_is_a_failure(command: Callable[..., Outcome], tmp_path: Path) -> None:
    assert command(*QUICK).code == 0
    [path] = (tmp_path / "cells").glob("copyspec-*.json")
    cell = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(cell | {"equality": {"equal": 1, "ties": 0, "wrong": 1, "unlike": 0}}), encoding="utf-8")
    result = command(*QUICK)
    assert result.code == 1
    assert "1 answers differ from plain decoding's where they must not" in result.err
    assert "1 equal, 1 WRONG" in result.out
