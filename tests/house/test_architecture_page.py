"""docs/architecture.md: its example runs, the step it quotes is that of the code, its table has every package."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from engine.scheduler.batcher import Batcher

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EXAMPLE, STEP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_quoted_step_is_the_one_that_runs() -> None:
    assert inspect.getsource(Batcher.step) == STEP
    code = STEP.partition('"""')[2].partition('"""')[2].strip().splitlines()
    assert len(code) <= 10


def test_the_example_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(EXAMPLE, "docs/architecture.md", "exec"), {"__name__": "__main__"})
    assert "14" in capsys.readouterr().out


def test_every_package_has_its_row_and_every_named_file_exists() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    packages = "|".join(rows)
    named = re.findall(rf"`((?:{packages})/[\w./]+)`", PAGE)
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(named) > 10
