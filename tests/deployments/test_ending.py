"""Ending an application waits for what runs, and not for a Ray that ends itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest
from ray import serve
from ray.exceptions import GetTimeoutError
from ray.serve.exceptions import RayServeException

from deployments import ending

NAME = "turnout"


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited, on a clock of this test."""
    waited: list[float] = []
    # Of that module alone: other threads of this process wait, too.
    clock = SimpleNamespace(sleep=waited.append, monotonic=lambda: sum(waited))
    monkeypatch.setattr(ending, "time", clock)
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: None)
    return waited


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this one that runs until its input is closed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as made:
        yield made


def _answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], set[str]]) -> None:
    monkeypatch.setattr(ending, "served_applications", lambda timeout_s: answer())


def test_it_waits_until_the_application_is_gone(monkeypatch: pytest.MonkeyPatch, passed: list[float]) -> None:
    _answers(monkeypatch, lambda: {NAME, "other"} if sum(passed) < 3 else {"other"})
    ending.end_app(NAME, 5)
    assert sum(passed) == pytest.approx(3)


def test_it_waits_no_longer_than_its_grace(monkeypatch: pytest.MonkeyPatch, passed: list[float]) -> None:
    _answers(monkeypatch, lambda: {NAME})
    ending.end_app(NAME, 5)
    assert sum(passed) == pytest.approx(5 + ending.ENDING_S)


def test_a_controller_that_is_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, passed: list[float], child: subprocess.Popen[bytes]
) -> None:
    def answer() -> set[str]:
        if sum(passed) < 2:
            raise GetTimeoutError
        return set()

    _answers(monkeypatch, answer)
    monkeypatch.setattr(psutil.Process, "children", lambda _: [psutil.Process(child.pid)])
    ending.end_app(NAME, 5)
    assert sum(passed) == pytest.approx(2)


def test_it_does_not_wait_for_a_ray_whose_processes_end(
    monkeypatch: pytest.MonkeyPatch, passed: list[float], child: subprocess.Popen[bytes]
) -> None:
    def answer() -> set[str]:
        raise GetTimeoutError

    _answers(monkeypatch, answer)
    ended = psutil.Process(child.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda _: [ended])
    assert child.stdin is not None
    child.stdin.close()
    while ended.status() != psutil.STATUS_ZOMBIE:  # nothing reaps it before the fixture does
        pass
    ending.end_app(NAME, 5)
    assert passed == []


def test_a_serve_that_never_came_up_has_nothing_to_end(monkeypatch: pytest.MonkeyPatch, passed: list[float]) -> None:
    def refuse(name: str, _blocking: bool) -> None:
        raise RayServeException

    monkeypatch.setattr(serve, "delete", refuse)
    ending.end_app(NAME, 5)
    assert passed == []
