"""The page of the hop benchmark: every measured figure stands on it, and a busy machine is owned up to."""

from __future__ import annotations

import pytest

from benchmarks import harness
from benchmarks.bench_hop import Transfer, page
from benchmarks.hop.operations import Operation, Spoken
from experiments.stats.intervals import Interval

QUIET = {"processor": "p", "cores": "2", "load average at start": "0.4"}
BUSY = {**QUIET, "load average at start": "6.0"}


def page_of(monkeypatch: pytest.MonkeyPatch, machine: dict[str, str]) -> str:
    monkeypatch.setattr(harness, "describe", lambda device: machine)
    setup = Interval(0.02, 0.01, 0.03)
    transfer = Transfer(1 << 20, Interval(0.001, 0.001, 0.002), Interval(0.008, 0.008, 0.009))
    operation = Operation("decode 1 token", 0.010, 0.0005, 0.0002, 0.004, 0.0003, 0.005, 70.0, 117.0)
    spoken = Spoken("plain", 267, 0.23, 31.0, 36.0, 0.0)
    return page(5, setup, [transfer], [operation], [spoken]).markdown()


def test_the_page_has_every_figure_and_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = page_of(monkeypatch, QUIET).splitlines()
    row = "| 1024 KiB | 1.000 [1.000, 2.000] | 1.05 | 8.000 [8.000, 9.000] | 0.13 | 8.0 |"
    assert row in lines
    assert "| decode 1 token | 10.000 | 0.500 | 0.200 | 4.000 | 0.300 | 5.000 | 70 | 117 |" in lines
    assert "| plain | 267 | 0.23 | 31 | 36 | 0 |" in lines


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "busy with other work" in page_of(monkeypatch, BUSY)
    assert "busy" not in page_of(monkeypatch, QUIET)
