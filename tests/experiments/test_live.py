"""Arms of a split and shadows, from route logs made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.live import LiveRule, arms, followed, shadows
from tests.experiments.route_logs import Entry, entry, split
from turnout.errors import TurnoutError


def test_a_planted_difference_is_found_and_stops_the_experiment() -> None:
    control, new = arms(split(-0.25), "old", LiveRule())
    assert (control.verdict, new.verdict) == ("control", "stop: better")
    assert new.p["paper"] < 0.05 < new.p["ttft_s"]
    assert new.interval is not None
    assert new.interval.low < -0.25 < new.interval.high
    assert arms(split(0.25), "old", LiveRule())[1].verdict == "stop: worse"


def test_two_equal_arms_go_on() -> None:
    _, new = arms(split(0.0), "old", LiveRule())
    assert new.verdict == "go on"
    assert min(new.p.values()) > 0.05


def test_more_arms_share_the_chance_of_a_wrong_stop() -> None:
    """With a third arm a difference is known as well as without it at two thirds of the alpha."""
    two = split(-0.05)
    third = [{**each, "request_id": f"x{each['request_id']}", "decision": {**each["decision"], "arm": "third"}}
             for each in two if each["decision"]["arm"] == "old"]  # fmt: skip
    alone, beside = (arms(log, "old", LiveRule())[1].interval for log in (two, [*two, *third]))
    assert alone is not None
    assert beside is not None
    assert beside.low < alone.low < alone.high < beside.high
    assert arms(two, "old", LiveRule(alpha=0.05 * 2 / 3))[1].interval == beside


def test_arms_that_are_all_alike_are_seldom_told_apart() -> None:
    """200 splits of three arms, looked at 60 times each; costs are as far from even as they get: nothing or all."""
    rng = np.random.default_rng(5)
    rule, alarms = LiveRule(most=1.0), 0
    for _ in range(200):
        control, *others = (rng.random((3, 200)) < 0.5).astype(float)
        looks = [look.interval for each in others for look in followed(each, control, rule, 3)]
        alarms += any(interval.low > 0.0 or interval.high < 0.0 for interval in looks)
    assert alarms <= 0.05 * 200


def test_requests_of_one_session_are_one_observation() -> None:
    once, often = arms(split(0.05, 60), "old", LiveRule()), arms(split(0.05, 60, per_session=5), "old", LiveRule())
    assert [line.units for line in once] == [line.units for line in often] == [60, 60]
    assert often[0].requests == 300
    assert once[1].p == often[1].p


def test_what_the_split_divided_is_one_observation_whatever_it_was() -> None:
    """Divided by tenant: requests without a session are of the tenant's unit, by its place."""
    log = []
    for number in range(40):
        for arm, start in (("old", 0.0), ("new", 0.5)):
            place = start + (number % 4) / 10
            made = entry(arm, number, paper=0.5 + (number % 4) / 100 + start / 10)
            log.append({**made, "decision": {**made["decision"], "features": {"place": place}}})
    control, new = arms(log, "old", LiveRule())
    assert (control.units, new.units, new.requests) == (4, 4, 40)
    assert new.p["paper"] > 0.01  # of 70 divisions of 8 two are as far apart


def test_shares_are_watched_within_their_bounds() -> None:
    log = [entry(arm, n, status="INTERNAL" if arm == "new" and n % 4 == 0 else "OK")
           for n in range(150) for arm in ("old", "new")]  # fmt: skip
    wide, narrow = (arms(log, "old", LiveRule("answered", most=most))[1].interval for most in (2.0, 1.0))
    assert wide == narrow


def test_failures_count_where_answers_are_counted() -> None:
    log = [entry("old", n) for n in range(200)]
    log += [entry("new", n, status="INTERNAL" if n % 2 else "OK") for n in range(200)]
    _, new = arms(log, "old", LiveRule("answered", most=1.0))
    assert new.means["answered"].value == 0.5
    assert new.verdict == "stop: worse"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(TurnoutError, match="available: new, old"):
        arms(split(0.0, 2), "other", LiveRule())
    with pytest.raises(TurnoutError, match="no request that a split"):
        arms([], "old", LiveRule())


def test_shadows_are_compared_with_their_own_requests() -> None:
    rng = np.random.default_rng(12)
    log: list[Entry] = []
    for number in range(60):
        cost = float(rng.uniform(0.3, 0.9))
        log.append(entry("a", number, paper=cost))
        shadow = entry("a", number, paper=cost - 0.1, kind="shadow", same_text=number % 4 != 0)
        shadow["decision"] = {"policy": "learned"}
        log.append(shadow)
    log.append({**entry("a", 99), "kind": "shadow"})  # its request is not in the log
    [line] = shadows(log)
    assert (line.policy, line.pairs) == ("learned", 60)
    assert line.same_text.value == 0.75
    assert line.differences["paper"].value == pytest.approx(-0.1)
    assert line.p["paper"] < 0.001
    assert line.p["ttft_s"] == 1.0
