from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deployments.cluster
from deployments.app import RunningServer
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` asks of a cluster, in order; a cluster that has no nodes to spare."""
    asked: list[Any] = []

    def deploy(config: TurnoutConfig, address: str, tell: Any) -> RunningServer:
        asked.append(("deploy", tuple(config.pools), address))
        tell("pool 'demo' waits for nodes that the autoscaler adds")
        return RunningServer("10.0.0.1:9000", "http://10.0.0.1:8000", tuple(config.pools))

    monkeypatch.setattr(RunningServer, "stats", lambda server: {pool: [] for pool in server.pools})
    monkeypatch.setattr(deployments.cluster, "connect", lambda address: asked.append(("connect", address)))
    monkeypatch.setattr(deployments.cluster, "deploy", deploy)
    monkeypatch.setattr(deployments.cluster, "leave", lambda: asked.append("leave"))
    monkeypatch.setattr(deployments.cluster, "stop", lambda address: asked.append(("stop", address)) or True)
    return asked


def test_serve_on_a_cluster_returns_and_leaves_the_application_there(run: Any, calls: list[Any]) -> None:
    result = run("serve", "--cluster", "10.0.0.1:6379")
    assert result.code == 0
    assert calls == [("connect", "10.0.0.1:6379"), ("deploy", ("demo",), "10.0.0.1:6379"), "leave"]
    lines = result.out.splitlines()
    assert "pool 'demo' waits for nodes that the autoscaler adds" in lines
    assert "  gRPC  10.0.0.1:9000" in lines
    assert "Ctrl-C" not in result.out


def test_what_a_cluster_refuses_is_one_line(run: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise TurnoutError(Code.UNAVAILABLE, f"no cluster answers at {address} (UNAVAILABLE)")

    monkeypatch.setattr(deployments.cluster, "connect", refuse)
    assert run("serve", "--cluster", "10.0.0.1:6379") == (
        1, "", "turnout: no cluster answers at 10.0.0.1:6379 (UNAVAILABLE)\n"
    )  # fmt: skip
    assert calls == []


def test_stop_needs_no_configuration(run: Any, calls: list[Any]) -> None:
    assert run("serve", "--cluster", "auto", "--stop") == (0, "stopped\n", "")
    assert calls == [("stop", "auto")]


@pytest.mark.parametrize("option", ["wait", "stop"])
def test_what_goes_with_a_cluster_is_refused_without_one(run: Any, calls: list[Any], option: str) -> None:
    assert run("serve", f"--{option}") == (1, "", f"turnout: {option}: goes together with --cluster\n")
    assert calls == []


def test_a_faulty_file_is_refused_before_the_cluster_is_asked(run: Any, calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "turnout.yaml").write_text("pools: {}", encoding="utf-8")
    assert run("serve", str(tmp_path / "turnout.yaml"), "--cluster", "auto").code == 1
    assert calls == []


def test_weights_are_needed_where_models_are_loaded(run: Any, calls: list[Any], config_file: Path) -> None:
    """A node from which others are made to serve hosts no model; without a cluster this machine hosts them all."""
    (config_file.parent / "l" / "model.safetensors").unlink()
    assert run("serve", str(config_file), "--cluster", "auto").code == 0
    assert calls == [("connect", "auto"), ("deploy", ("p",), "auto"), "leave"]
    code, out, error = run("serve", str(config_file))
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert error.startswith(f"turnout: models.l.path: {config_file.parent / 'l'} has no weights: neither ")
