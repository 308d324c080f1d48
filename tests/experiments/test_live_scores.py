"""Scores of the answers in route logs: what is scored, what has none and why, and what the report says of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.grid.scorers import judge
from experiments.grid.scoring import Item, JudgeChoice, RegexChoice, Score
from experiments.live import LiveRule
from experiments.live_scores import Scored, read_scorer, score_entries
from experiments.reports.live import LiveReport, make_live_report, to_html, to_json, to_markdown
from tests.experiments.route_logs import Entry, entry
from turnout.errors import TurnoutError, invalid

GOOD = RegexChoice(kind="regex", pattern="yes")


def said(arm: str, number: int, answer: str, **more: Any) -> Entry:
    """A request that was answered, with its texts."""
    return entry(arm, number, **{"request": {"prompt": f"{number}?"}, "answers": [answer], **more})


def shadow_of(request: Entry, answer: str) -> Entry:
    return {**request, "kind": "shadow", "decision": {"policy": "learned"}, "answers": [answer], "same_text": False}


def scored(log: list[Entry], choice: Any = GOOD, control: str = "old") -> Scored:
    return asyncio.run(score_entries(log, choice, control))


def report_of(log: list[Entry], control: str = "old", rule: LiveRule | None = None) -> LiveReport:
    found = scored(log, control=control)
    return make_live_report(found.entries, control, rule or LiveRule(), scores=found.notes)


def test_arms_are_compared_by_their_scores() -> None:
    """Of 40 answers each, 10 of the control's are good and 30 of the other arm's."""
    log = [said(arm, n, "yes" if n % 4 < good else "no") for n in range(40) for arm, good in (("old", 1), ("new", 3))]
    control, new = report_of(log).arms
    assert (control.means["score"].value, new.means["score"].value) == (0.25, 0.75)
    # Newcombe's; Wilson's are 0.5981 to 0.8581 and 0.1419 to 0.4019: 0.5 less hypot(0.1519, 0.1519).
    found = new.differences["score"]
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.2852, 0.6529), abs=1e-3)
    assert new.p["score"] < 0.01


def test_the_stop_rule_follows_scores_upwards() -> None:
    log = [said(arm, n, answer) for n in range(120) for arm, answer in (("old", "no"), ("new", "yes"))]
    assert report_of(log, rule=LiveRule("score")).arms[1].verdict == "stop: better"


def test_shadows_are_compared_pair_by_pair() -> None:
    """Of 20 pairs the shadow is better in 5; the control's arms are not asked for and stay without scores."""
    log: list[Entry] = []
    for number in range(20):
        request = said("", number, "no")
        log += [request, shadow_of(request, "no" if number % 4 else "yes")]
    log.append(said("old", 99, "yes"))
    found = scored(log, control="")
    assert found.notes == ["scored by regex: 40 of 40 answers"]
    assert "score" not in found.entries[-1]
    [line] = make_live_report(found.entries, "", LiveRule(), scores=found.notes).shadows
    assert line.differences["score"].value == 0.25
    assert 0.0 < line.differences["score"].low < 0.25 < line.differences["score"].high
    assert line.p["score"] < 0.5


def test_shadows_that_are_never_better_leave_open_what_so_few_pairs_leave_open() -> None:
    log = [each for n in range(30) for each in (said("", n, "no"), shadow_of(said("", n, "no"), "nor"))]
    [line] = report_of(log, control="").shadows
    assert (line.differences["score"].low, line.differences["score"].high) == pytest.approx((-0.1, 0.1))


def test_entries_that_have_no_score_are_counted_and_told() -> None:
    tools = {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}
    chat = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]}
    log = [
        said("old", 1, "yes", request=chat), said("new", 2, "yes"), entry("old", 3), entry("new", 4),
        said("old", 5, "yes", request=tools), said("old", 6, "yes", request={"prompt": [1, 2]}),
        said("new", 7, "yes", answers=[]), said("old", 8, "yes", status="INTERNAL"),
        said("new", 9, "yes", answers=["yes", "no"]),
    ]  # fmt: skip
    found = scored(log)
    assert found.notes == [
        "scored by regex: 3 of 8 answers",
        "not scored: 2 without texts in the log (set routing.log.texts)",
        "not scored: 3 asked with tools or token ids, or answered without text",
    ]
    assert [each.get("score") for each in found.entries] == [1.0, 1.0, *[None] * 6, 0.5]
    with pytest.raises(TurnoutError, match=r"^scorer: scored none of 2 answers: not scored: 2 without texts"):
        scored([entry("old", 1), entry("new", 2)])


class Moody:
    """Grades by the number of the call, and fails where it is told to."""

    asked: list[tuple[str, str]]

    def __init__(self, choice: JudgeChoice) -> None:
        self.asked = type(self).asked = []

    async def score(self, item: Item, answer: str, pool: None, model: str) -> Score:
        self.asked.append((item.prompt, answer))
        if answer == "odd":
            raise invalid("scorer.judge", "the judge gave no number: 'well'")
        return Score(len(self.asked) / 100)


def test_a_judge_is_asked_once_about_the_same_answer_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "SCORER", Moody)
    requests = [said("", n, "odd" if n < 2 else "same") for n in range(5)]
    log = [each for request in requests for each in (request, shadow_of(request, "same"))]
    found = scored(log, JudgeChoice(kind="judge", address="localhost:1"), control="")
    assert sorted(Moody.asked) == sorted({(each["request"]["prompt"], each["answers"][0]) for each in log})
    assert found.notes == [
        "scored by judge: 8 of 10 answers",
        "not scored: 2 that the scorer could not score, the first: scorer.judge: the judge gave no number: 'well'",
    ]
    [line] = make_live_report(found.entries, "", LiveRule(), scores=found.notes).shadows
    assert line.differences["score"].value == 0.0


def test_scores_stand_in_the_page_the_text_and_the_figures() -> None:
    log = [said(arm, n, "yes" if arm == "new" else "no") for n in range(20) for arm in ("old", "new")]
    log += [each for n in range(90, 99) for each in (said("", n, "no"), shadow_of(said("", n, "no"), "yes"))]
    report = report_of(log)
    page, text, figures = to_html(report), to_markdown(report), json.loads(to_json(report))
    assert "| demo | new | score | 1.000" in text
    assert "- scored by regex: 58 of 58 answers" in text
    assert "<li>scored by regex: 58 of 58 answers</li>" in page
    assert page.count(">score<") == 3  # two arms and a shadow
    assert figures["arms"][1]["differences"]["score"]["value"] == 1.0
    assert figures["shadows"][0]["differences"]["score"]["value"] == 1.0
    without = to_markdown(make_live_report(log, "old", LiveRule()))
    assert "score" not in without


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("scorer: {kind: judge}", "scorer.address: is missing: name the gRPC address"),
        ("scorer: {kind: exact}", "scorer.kind: exact needs answer of each row, which no route log holds; take judge"),
        ("scorer: {kind: demo, task: lists}", "scorer.kind: demo needs result"),
        ("scorer: {kind: regex, pattern: '('}", "is no regular expression"),
        ("{}", "scorer: "),
    ],
)
def test_scorers_that_a_log_has_nothing_for_are_refused(tmp_path: Path, text: str, refused: str) -> None:
    file = tmp_path / "scorer.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(TurnoutError) as error:
        read_scorer(file)
    assert refused in str(error.value)


def test_a_judges_key_lies_beside_its_file(tmp_path: Path) -> None:
    file = tmp_path / "scorer.yaml"
    file.write_text("scorer: {kind: judge, address: 'host:9000', key_file: key}", encoding="utf-8")
    found = read_scorer(file)
    assert isinstance(found, JudgeChoice)
    assert found.key_file == str(tmp_path / "key")
