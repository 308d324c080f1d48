"""Reports of live experiments: whole pages, several pools and files, what a log can tell, and what ends a split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from experiments.live import LOOKS, LiveRule, arms
from experiments.reports.live import make_live_report, to_html, to_json, to_markdown, winner
from tests.experiments.pages import unclosed
from tests.experiments.route_logs import Entry, entry, split
from turnout.errors import Code, TurnoutError


def moved(entries: list[Entry], pool: str, **names: str) -> list[Entry]:
    """The same requests in another pool, whose arms are named otherwise."""
    return [
        {**each, "pool": pool, "decision": {**each["decision"], "arm": names[each["decision"]["arm"]]}}
        for each in entries
    ]


def shadowed(count: int = 30) -> list[Entry]:
    found = []
    for number in range(count):
        cost = 0.5 + number / 100
        found.append(entry("old", 10_000 + number, f"h{number}", cost))
        shadow = entry("old", 10_000 + number, paper=cost - 0.1 - number % 3 / 100, kind="shadow", same_text=True)
        found.append({**shadow, "decision": {"policy": "learned"}})
    return found


def test_a_report_is_a_page_a_text_and_figures() -> None:
    report = make_live_report([*split(-0.3, 200), *shadowed()], "old", LiveRule())
    page, text, figures = to_html(report), to_markdown(report), json.loads(to_json(report))
    assert unclosed(page) == []
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in page
    assert page.count('class="chart"') == 1, "one for each arm that the rule looks at"
    for shown in ("stop: better", "learned", "demo, new: stop: better"):
        assert shown in page
    assert "| demo | new | FLOPs |" in text
    assert "| demo | learned | 30 |" in text
    control, new = figures["arms"]
    assert (control["interval"], new["looks"][-1]["interval"]) == (None, new["interval"])
    assert new["differences"]["paper"]["low"] < -0.3 < new["differences"]["paper"]["high"] < 0
    assert figures["shadows"][0]["apart"]["paper"] < 0.01


def test_what_a_log_names_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>"
    page = to_html(make_live_report(moved(split(-0.3, 40), evil, old="old", new=evil), "old", LiveRule()))
    assert "<script>alert" not in page


def test_pools_whose_controls_have_other_names_are_looked_at_one_by_one() -> None:
    log = [*split(-0.3, 200), *moved(split(0.3, 200), "other", old="a", new="b")]
    with pytest.raises(TurnoutError, match=r"'old' is not known; available: a, b in pool 'other'.*--pool") as refused:
        make_live_report(log, "old", LiveRule())
    assert (refused.value.code, refused.value.field) == (Code.NOT_FOUND, "control")
    one, other = (make_live_report(log, *given) for given in (("old", LiveRule(), "demo"), ("a", LiveRule(), "other")))
    assert [(line.pool, line.arm) for line in one.arms] == [("demo", "old"), ("demo", "new")]
    assert [line.verdict for line in other.arms] == ["control", "stop: worse"]
    assert (one.title, other.title) == ("live-demo", "live-other")
    with pytest.raises(TurnoutError, match="pool: 'third' is not known; available: demo, other"):
        make_live_report(log, "old", LiveRule(), "third")


def test_a_log_that_was_begun_anew_is_read_in_any_order_of_its_files() -> None:
    log = [{**each, "time": f"2026-01-01T00:00:00.{place:03d}"} for place, each in enumerate(shadowed())]
    log = [*log, *({**each, "time": f"2026-01-02T{n:06d}"} for n, each in enumerate(split(-0.2, 80)))]
    reports = [to_json(make_live_report(given, "old", LiveRule())) for given in (log, log[31:] + log[:31])]
    assert reports[0] == reports[1]
    assert json.loads(reports[0])["shadows"][0]["pairs"] == 30


def test_a_log_without_anything_to_compare_says_which_arms_there_are() -> None:
    with pytest.raises(TurnoutError, match="name one of the arms new, old with --control"):
        make_live_report(split(0.0, 4), "", LiveRule())
    with pytest.raises(TurnoutError, match="nothing to compare: no shadow with its request"):
        make_live_report([entry("", 1)], "", LiveRule())


def test_what_so_many_units_tell_apart_is_said() -> None:
    report = make_live_report(split(0.0, 100), "old", LiveRule(margin=0.01))
    [line] = report.power
    # 0.1 is the spread of either arm: (z(0.05 / 6 / 2) + z(0.8)) * sqrt(0.01 / 100 + 0.01 / 100) = 0.049.
    assert report.arms[1].apart["paper"] == pytest.approx(0.049, rel=0.1)
    assert line.startswith("demo, new: 100 and 100 units tell 0.0")
    assert "apart (power 80%, 6 comparisons); 0.01 would take 2" in line
    fourfold = make_live_report(split(0.0, 400), "old", LiveRule()).arms[1].apart["paper"]
    assert report.arms[1].apart["paper"] / fourfold == pytest.approx(2.0, rel=0.1)
    [same] = make_live_report(split(0.0, 20), "old", LiveRule("ttft_s")).power
    assert "first token, s does not vary" in same


def test_what_the_rule_knew_is_never_unlearned() -> None:
    for count in (7, 200):
        looks = arms(split(-0.3, count), "old", LiveRule())[1].looks
        assert [look.units for look in looks] == sorted({look.units for look in looks})
        assert looks[-1].units == 2 * count
        assert len(looks) <= LOOKS
        for before, after in pairwise(looks):
            assert before.interval.low <= after.interval.low
            assert after.interval.high <= before.interval.high


def test_what_came_after_a_split_was_decided_is_no_part_of_it() -> None:
    log = split(-0.3, 100)
    later = [{**each, "decision": {**each["decision"], "features": {"decided": 1.0}}} for each in split(0.5, 300)]
    assert to_json(make_live_report([*log, *later], "old", LiveRule())) == to_json(
        make_live_report(log, "old", LiveRule())
    )


def test_a_split_is_decided_once_one_arm_is_left() -> None:
    def left(log: list[Entry]) -> str:
        return winner(make_live_report(log, "old", LiveRule()))

    more = moved(split(0.3, 200), "demo", old="old", new="third")
    third = [each for each in more if each["decision"]["arm"] == "third"]
    assert (left(split(-0.3, 200)), left(split(0.3, 200)), left(split(0.0, 200))) == ("new", "old", "")
    assert left([*split(-0.3, 200), *third]) == "new"
    assert left([*split(0.0, 200), *third]) == ""
    with pytest.raises(TurnoutError, match="decides the split of one pool; name it with --pool"):
        left([*split(0.0, 9), *moved(split(0.0, 9), "other", old="old", new="new")])


@pytest.mark.parametrize(
    ("difference", "status", "said"),
    [
        (-0.3, "OK", "demo: new is better in paper: arms.new.share: 1, and 0 for the others, ends the split"),
        (0.3, "OK", "demo: new is worse in paper: arms.new.share: 0, and what it had for old, ends the arm"),
        (-0.3, "INTERNAL", "ends the split; but look at what it leaves unanswered first: -0.2"),
    ],
)
def test_where_the_rule_has_decided_it_is_said_how_to_end_the_split(difference: float, status: str, said: str) -> None:
    log: list[dict[str, Any]] = split(difference, 200)
    for number, each in enumerate(log):
        if each["decision"]["arm"] == "new" and number // 2 % 4 == 0:
            each["outcome"]["status"] = status
    report = make_live_report(log, "old", LiveRule())
    [told] = report.ends
    assert said in told
    # Cheap, but failing: no timer gives it all traffic.
    assert winner(report) == ("" if status != "OK" else "new" if difference < 0 else "old")
    assert make_live_report(split(0.0, 50), "old", LiveRule()).ends == []
