"""An artifact and its report: both or neither, whatever fails while they are written."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import artifact_output as keeping
from cli.artifact_output import keep
from decoding.artifacts import Artifact
from turnout.errors import TurnoutError

FIRST = Artifact("probe", "test", {"n": 1}, {"small": "a"}, {"w": torch.ones(3)})
SECOND = replace(FIRST, settings={"n": 2})


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read(out: Path) -> tuple[int, str, Any]:
    """The setting of the artifact, its version, and the version and number that its report tells."""
    loaded, told = Artifact.load(out), json.loads(out.with_suffix(".report.json").read_text(encoding="utf-8"))
    return loaded.settings["n"], loaded.version, (told["version"], told["number"])


def test_a_report_stands_beside_its_artifact_and_names_its_version(tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.safetensors"
    for artifact, number in ((FIRST, 1), (SECOND, 2)):
        told = keep(artifact, {"number": number}, out)
        assert told == {"version": artifact.version, "number": number}
        assert read(out) == (number, artifact.version, (artifact.version, number))
    assert sorted(path.name for path in out.parent.iterdir()) == ["x.report.json", "x.safetensors"]


@pytest.mark.parametrize("where", ["decoding.artifacts.write_whole", "cli.artifact_output.write_whole"])
@pytest.mark.parametrize("again", [False, True])
def test_where_one_cannot_be_written_neither_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, again: bool
) -> None:
    out = tmp_path / "x.safetensors"
    if again:
        keep(FIRST, {"number": 1}, out)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(where, full)
    with pytest.raises(TurnoutError, match=r"out: cannot write .*x\.safetensors: No space left on device"):
        keep(SECOND, {"number": 2}, out)
    assert sorted(tmp_path.iterdir()) == before
    if again:
        assert read(out) == (1, FIRST.version, (FIRST.version, 1))


def test_a_report_that_is_no_json_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        keep(FIRST, {"number": object()}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_doubts_are_told_and_only_they(capsys: pytest.CaptureFixture[str]) -> None:
    keeping.warn({"number": 1})
    assert capsys.readouterr().err == ""
    keeping.warn({"warning": "few rows"})
    assert capsys.readouterr().err == "warning: few rows\n"
