"""What is installed only with an extra: named by the command that needs it, and imported by nothing that serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli import main as command_line
from cli.main import EXTRAS, main

SERVES = (
    "cli.main, cli.serve, deployments.app, deployments.ingress, deployments.batches.http, pool.local_pool, actors.pool"
)


def test_a_command_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy.stats")

    monkeypatch.setattr(command_line, "app", missing)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "needs scipy.stats: pip install 'turnout[experiments]'" in capsys.readouterr().err


def test_another_missing_module_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'torhc'", name="torhc")

    monkeypatch.setattr(command_line, "app", missing)
    with pytest.raises(ModuleNotFoundError, match="torhc"):
        main()


def test_serving_needs_no_extra() -> None:
    blocked = sorted(name for modules in EXTRAS.values() for name in modules)
    command = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import {SERVES}; print('imported')"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "imported"), done.stderr
