"""A job on a real cluster of two nodes, of which a driver, an actor and a node are killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.batch_chaos import chaos, planned, write_prompts
from benchmarks.batch_outcome import Alone, Kill, Outcome, Sample, page


@pytest.mark.cluster
def test_each_line_is_answered_once_whatever_is_killed() -> None:
    rows = 240
    with chaos(rows, actors=2, block_rows=20, concurrency=4) as made:
        outcome = made.run([Kill("actor", 30), Kill("driver", 90), Kill("node", 150)])
    assert outcome.faults() == []
    assert [kill.part for kill in outcome.kills] == ["actor", "driver", "node"]
    assert len(outcome.ids) == rows
    # Those that were just asked, and no others: what a block had answered is kept.
    assert 0 < outcome.redone <= 8 * len(outcome.kills)


def outcome_of(rows: int = 1, **values: Any) -> Outcome:
    ids = Counter(f"id-{number}" for number in range(rows))
    return Outcome(rows, 10, **{"status": 0, "ids": ids, **values})


def test_what_is_lost_or_there_twice_is_seen() -> None:
    outcome = outcome_of(3, ids=Counter({"id-0": 1, "id-2": 2}))
    assert (outcome.lost, outcome.duplicates) == (1, 1)
    assert outcome.faults() == ["1 lines are lost, 1 are there twice"]
    assert outcome_of(status=1).faults() == ["the last driver ended with status 1"]
    assert outcome_of().faults() == []


def test_kills_that_did_not_happen_are_a_fault() -> None:
    [fault] = outcome_of(wanted=2, kills=[Kill("actor", 1)]).faults()
    assert fault == "1 of 2 kills did not happen"


def test_more_than_a_block_asked_again_for_each_kill_is_a_fault() -> None:
    kills = [Kill("actor", 1), Kill("node", 2)]
    assert outcome_of(wanted=2, kills=kills, summary={"redone_rows": 20}).faults() == []
    [fault] = outcome_of(wanted=2, kills=kills, summary={"redone_rows": 21}).faults()
    assert fault == "21 lines were asked again, more than 20: a block for each kill"


def steady(lines_a_second: int = 10, pause_s: int = 0, size: Callable[[int], int] = lambda _: 100) -> list[Sample]:
    """A minute before a kill and a minute after it, a look a second."""
    times = [*range(60), *range(60 + pause_s, 120 + pause_s)]
    return [Sample(float(at), lines_a_second * place, size(place)) for place, at in enumerate(times)]


def test_the_speed_is_that_between_the_pauses_after_kills() -> None:
    outcome = outcome_of(samples=steady(pause_s=30), kills=[Kill("node", 590, at=59.0)])
    assert outcome.pauses == [31.0]
    assert outcome.rate == pytest.approx(10.0, rel=0.02)
    assert outcome.faults(alone=11.0) == []
    [fault] = outcome.faults(alone=12.0)
    assert "less than 90% of the engine's 12.0" in fault
    # A stop that no kill explains counts.
    [fault] = outcome_of(samples=steady(pause_s=30)).faults(alone=10.0)
    assert fault.startswith("8.")


def test_memory_that_grows_is_seen() -> None:
    assert outcome_of(samples=steady()).growth == 1.0
    leaking = outcome_of(samples=steady(size=lambda place: 100 + place))
    assert leaking.growth > 1.3
    assert "memory has grown" in leaking.faults(alone=10.0)[0]


def test_memory_that_grows_in_processes_that_are_killed_is_seen() -> None:
    """Whoever is killed begins small again: the end of the job, soon after a kill, says nothing."""
    kills = [Kill("actor", 790, at=79.0), Kill("driver", 990, at=99.0)]

    def size(place: int) -> int:
        return 100 + place - max((int(kill.at) for kill in kills if kill.at < place), default=0)

    leaking = outcome_of(samples=steady(size=size), kills=kills)
    assert leaking.growth > 1.3
    assert [leaking.undisturbed[0].at, leaking.undisturbed[-1].at] == [1.0, 79.0]
    assert outcome_of(samples=steady(), kills=kills).growth == 1.0


def test_a_report_says_what_does_not_hold() -> None:
    good = outcome_of(samples=steady(), kills=[Kill("actor", 5, at=1.0)], wanted=1)
    report = page(good, Alone(10.0, 8.0, 16.0), "How it was run.")
    text = report.markdown()
    assert report.failures == []
    assert "All of it holds" in text
    assert "with the job's settings | 10.0; the job is at 101%" in text
    assert "with its default settings | 8.0; the job is at 126%" in text
    assert "as many processes as the job has copies | 16.0; the job is at 63%" in text
    assert page(replace(good, wanted=2), Alone(10.0, 8.0, 16.0), "").failures == ["1 of 2 kills did not happen"]


def test_each_part_is_killed_somewhere(tmp_path: Path) -> None:
    kills = planned(1000, 5, seed=3)
    assert {kill.part for kill in kills} == {"actor", "driver", "node"}
    assert all(0 < kill.after < 900 for kill in kills)
    write_prompts(tmp_path / "in", 20)
    assert [json.loads(line)["custom_id"] for line in (tmp_path / "in").read_text().splitlines()] == [
        f"id-{n}" for n in range(20)
    ]
