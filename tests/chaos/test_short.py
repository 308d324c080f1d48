"""A short chaos run: draft, target and replica are killed once each under load; one expected answer is falsified."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from benchmarks.chaos import run as chaos_run
from benchmarks.chaos.requests import Answer, Asked
from benchmarks.chaos.run import Settings, break_cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
PLANTED = 5


def test_nothing_is_lost_and_only_the_planted_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = chaos_run.undisturbed

    async def falsified(address: str, requests: list[Asked]) -> list[Answer]:
        expected = await undisturbed(address, requests)
        right = expected[PLANTED]
        assert right.ids is not None
        expected[PLANTED] = replace(right, ids=(*right.ids[:-1], right.ids[-1] + 1), text=f"{right.text}!")
        return expected

    monkeypatch.setattr(chaos_run, "undisturbed", falsified)
    settings = Settings(seconds=0.0, calm_s=30.0, least_each=1, parts=("draft", "target", "replica"), tokens=32)
    report = break_cluster(settings, network=f"127.1.{os.getpid() % 200 + 40}")
    assert report.wrong != []
    assert all(told.startswith(f"request {PLANTED},") for told in report.wrong), report.wrong
    assert replace(report, wrong=[]).failures == []
    assert sorted(strike.part for strike in report.strikes) == ["draft", "replica", "target"]
