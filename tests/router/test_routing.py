"""Sessions that keep a decision, the log, its summary, and replays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.model import ModelPool
from router import experiment_winner as decided_file
from router.base import Asked, RoutingPolicy, make_policy
from router.decision import Decision
from router.experiment_winner import DECIDED, write_decided
from router.log import RouteLog
from router.replay import compare
from router.routing import Router
from router.shadows import Shadows
from router.summary import read_log, summarise
from tests.router.asking import NO_MODELS, asked
from turnout.config import PolicyChoice, RouteLogConfig, ShadowConfig, StickyConfig
from turnout.errors import TurnoutError, out_of_range
from turnout.part_choice import PartChoice

DECISION = Decision("plain", {"model": "small"}, "static", "0" * 12, {"x": 1.0}, {"gain": 0.25}, {}, "because")


class Counting(RoutingPolicy):
    """Numbers its decisions."""

    count = 0

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        self.count += 1
        asked.read_limits.add("quality")
        return replace(DECISION, reason=f"number {self.count}")


async def test_a_session_keeps_its_first_decision() -> None:
    router = Router(Counting(), StickyConfig(seconds=60))
    first = await router.decide(asked(session="s", id="r1"), NO_MODELS)
    again = await router.decide(asked(session="s", id="r2"), NO_MODELS)
    assert (first.reason, first.kept_from) == ("number 1", "")
    assert (again.kept_from, again.method) == ("r1", "plain")
    assert again.reason == "the session keeps what was decided for request r1: number 1"
    others = [{"session": "t"}, {"session": "s", "tenant": "u"}, {"session": "s", "quality": 0.5}, {}, {}]
    reasons = [(await router.decide(asked(**given), NO_MODELS)).reason for given in others]
    assert reasons == [f"number {number}" for number in range(2, 7)]
    alone = Router(Counting())
    assert [(await alone.decide(asked(session="s"), NO_MODELS)).reason for _ in range(2)] == ["number 1", "number 2"]


async def test_a_session_keeps_a_time_limit_for_answers_no_longer_than_the_first() -> None:
    ways = [("large", 1.0, 0.05), ("small", 0.1, 0.01)]
    table = [
        {"method": {"name": "plain", "model": m}, "cost": c, "quality": c, "seconds_per_token": s} for m, c, s in ways
    ]
    policy = make_policy(PartChoice(name="budget", params={"table": table}), "policy")
    router = Router(policy, StickyConfig())
    made = []
    for max_tokens, limit in ((40, 2.0), (20, 2.0), (60, 2.0), (60, 2.0), (40, None), (400, None)):
        limits = {} if limit is None else {"max_latency_s": limit}
        request = asked(session="s", id=f"r{len(made)}", max_tokens=max_tokens, **limits)
        decision = await router.decide(request, NO_MODELS)
        made.append((decision.params["model"], decision.kept_from))
    assert made == [("large", ""), ("large", "r0"), ("small", ""), ("small", "r2"), ("large", ""), ("large", "r4")]


async def test_what_was_decided_elsewhere_holds_here_for_answers_no_longer_than_it_was_decided_for() -> None:
    elsewhere = replace(DECISION, kept_from="r0", limits={"max_latency_s": 2.0, "max_tokens": 40.0})
    router = Router(Counting(), StickyConfig())
    assert await router.decide(asked(session="s", max_tokens=40), NO_MODELS, elsewhere) == elsewhere
    assert await router.decide(asked(session="s", max_tokens=20, id="r2"), NO_MODELS) == elsewhere
    longer = await router.decide(asked(session="s", max_tokens=41, id="r3"), NO_MODELS, elsewhere)
    assert (longer.reason, longer.kept_from) == ("number 1", "")
    assert (await router.decide(asked(session="s", max_tokens=99, id="r4"), NO_MODELS)).kept_from == "r3"


async def test_what_a_session_keeps_is_decided_anew_where_it_cannot_be_run_any_more() -> None:
    """As after a new calibration that does not reach so far; the new decision is kept from then on."""
    router = Router(Counting(), StickyConfig())
    reachable = {"number 1"}

    def check(decision: Decision) -> None:
        if not any(decision.reason.endswith(each) for each in reachable):
            raise out_of_range("large_share", "reachable: 0 to 0.5")

    def made(id: str, **more: object) -> Awaitable[Decision]:
        return router.decide(asked(session="s", id=id), NO_MODELS, check=check, **more)  # type: ignore[arg-type]

    assert [(await made(id)).kept_from for id in ("r1", "r2")] == ["", "r1"]
    reachable = {"number 2"}
    again = await made("r3")
    assert (again.reason, again.kept_from) == ("number 2", "")
    assert (await made("r4")).kept_from == "r3"
    # What whoever takes requests in remembers of the session is no better; what was decided about the request binds.
    old = replace(DECISION, reason="number 1", kept_from="r1")
    assert (await made("r5", before=old)).reason == "number 3"
    assert await made("r6", before=replace(old, kept_from="")) == replace(old, kept_from="")


@pytest.mark.parametrize("nested", [False, True])
async def test_a_session_leaves_its_arm_once_the_split_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    monkeypatch.setattr(decided_file, "LOOK_S", 0.0)
    path = tmp_path / "decided.json"
    arms = {"a": {"share": 0.5, "method": "plain"}, "b": {"share": 0.5, "method": "entropy_adaptive"}}
    choice: dict[str, Any] = {"name": "split", "params": {"arms": arms, "decided": str(path)}}
    if nested:
        choice = {"name": "static", "params": {"default": {"policy": {"name": "split", **choice["params"]}}}}
    router = Router(make_policy(PartChoice(**choice), "policy"), StickyConfig())

    async def made(session: str) -> Decision:
        request = asked(session=session, id=f"r-{session}")
        return await router.decide(request, NO_MODELS, check=lambda decision: None)

    before = {f"s{number}": (await made(f"s{number}")).arm for number in range(20)}
    assert set(before.values()) == {"a", "b"}
    assert all([(await made(each)).kept_from for each in before])
    write_decided(path, {"arm": "b"})
    after = [await made(each) for each in before]
    assert {each.arm for each in after} == {"b"}
    assert all(DECIDED in each.features for each in after)  # none of them counts for the experiment
    assert all([(await made(each)).kept_from for each in before])


def entry(number: int, **given: object) -> dict[str, object]:
    outcome = {
        "status": "OK", "large_share": 0.5, "paper": 0.5, "flops": 1.0, "flops_large_only": 4.0,
        "completion_tokens": 3, "ttft_s": 0.1, "wall_s": float(number),
    }  # fmt: skip
    known = {"kind": "request", "pool": "p", "request_id": f"r{number}", "decision": DECISION.as_json()}
    return {**known, "outcome": outcome, **given}


def test_the_log_is_written_in_turn_and_renamed_when_full(tmp_path: Path) -> None:
    log = RouteLog(RouteLogConfig(path=str(tmp_path / "logs" / "route.jsonl"), max_bytes=4096, backups=2))
    for number in range(30):
        log.write(entry(number))
    log.close()
    files = [log.path.with_name(f"route.jsonl{ending}") for ending in (".2", ".1", "")]
    assert all(path.stat().st_size <= 4096 for path in files)
    numbers = [int(each["request_id"][1:]) for path in files for each in read_log(path)]
    assert numbers == list(range(numbers[0], 30))
    assert "time" in json.loads(log.path.read_text().splitlines()[0])
    assert not log.path.with_name("route.jsonl.3").exists()


def test_entries_that_are_lost_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.log.MOST_WAITING", 2)
    log = RouteLog(RouteLogConfig(path=str(tmp_path / "log")))
    log._listener.stop()
    for number in range(5):
        log.write(entry(number))
    assert log.num_dropped == 3
    log._listener.start()
    log.close()
    assert ["lost" in record.message for record in caplog.records] == [True, True]
    assert "3 entries were lost" in caplog.records[-1].message
    assert [each["request_id"] for each in read_log(log.path)] == ["r0", "r1"]


@pytest.mark.parametrize("cut", ["", '{"kind": "request", "requ', '{"kind": "' + "x" * 200_000])
def test_an_entry_that_a_kill_cut_short_is_dropped_by_whoever_writes_on(tmp_path: Path, cut: str) -> None:
    config = RouteLogConfig(path=str(tmp_path / "log"))
    for number in range(2):
        log = RouteLog(config)
        log.write(entry(number))
        log.close()
        with log.path.open("a") as file:
            file.write(cut)
    assert [each["request_id"] for each in read_log(log.path)] == ["r0", "r1"]
    RouteLog(config).close()
    assert log.path.read_text().count("\n") == 2
    assert log.path.read_text().endswith("\n")
    log.path.write_text(cut)
    RouteLog(config).close()
    assert log.path.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_entries_that_a_full_disk_costs_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    log = RouteLog(RouteLogConfig(path="/dev/full"))
    for number in range(3):
        log.write(entry(number))
    log.close()
    assert log.num_dropped == 3
    assert ["cannot be written" in record.message for record in caplog.records] == [True, False]
    assert "3 entries were lost" in caplog.records[-1].message


def test_a_log_that_cannot_be_opened_is_refused_and_a_shared_one_named_by_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TurnoutError, match=r"^routing\.log\.path: cannot write"):
        RouteLog(RouteLogConfig(path=str(tmp_path / "file" / "route.jsonl")))
    shared = RouteLog(RouteLogConfig(path=str(tmp_path / "route.jsonl")), alone=False)
    shared.close()
    assert shared.path.name.startswith("route-")


def test_the_summary_counts_by_policy_arm_and_method(tmp_path: Path) -> None:
    other = replace(DECISION, method="speculative", arm="b").as_json()
    entries = [entry(n) for n in range(1, 4)] + [entry(9, decision=other)]
    entries += [entry(5, decision=None, outcome={"status": "OUT_OF_RANGE"})]
    entries += [entry(6, kind="shadow", same_text=True), entry(7, kind="shadow", same_text=False)]
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(each) + "\n" for each in entries) + '{"cut of')
    groups = summarise(read_log(path))
    shown = [(g.kind, g.policy, g.arm, g.method, g.requests, g.share, g.answered) for g in groups]
    assert shown == [
        ("request", "static", "", "plain", 3, 0.6, 3),
        ("request", "", "", "", 1, 0.2, 0),
        ("request", "static", "b", "speculative", 1, 0.2, 1),
        ("shadow", "static", "", "plain", 2, 1.0, 2),
    ]
    assert (groups[0].wall_p50_s, groups[0].flops, groups[0].large_share) == (2.0, 0.25, 0.5)
    assert (groups[3].same_text, groups[1].paper) == (0.5, None)
    path.write_text("{}\n")
    with pytest.raises(TurnoutError, match="line 1: is no entry of a route log"):
        list(read_log(path))


def test_a_log_with_line_separators_inside_its_texts_is_read_back(tmp_path: Path) -> None:
    session = "a\u2028b\u2029c\u0085d"
    log = RouteLog(RouteLogConfig(path=str(tmp_path / "log")))
    log.write(entry(1, session=session))
    log.write(entry(2))
    log.close()
    with log.path.open("a") as file:
        file.write('{"cut of')
    assert [each.get("session") for each in read_log(log.path)] == [session, entry(2).get("session")]


def test_a_replay_says_what_differs_and_what_may_be_why() -> None:
    assert compare(DECISION, DECISION).same
    close = replace(DECISION, scores={"gain": 0.25001})
    assert compare(DECISION, close).notes == ()
    changed = replace(DECISION, params={"model": "large"}, version="1" * 12, scores={"gain": 0.5})
    replay = compare(DECISION, changed)
    assert not replay.same
    assert replay.differences == ("params: {'model': 'small'} then, {'model': 'large'} now",)
    assert [note.split(":")[0] for note in replay.notes] == ["version", "scores.gain"]
    kept = compare(replace(DECISION, kept_from="r0"), DECISION)
    assert kept.same
    assert "request r0" in kept.notes[0]


def test_a_decision_survives_json_and_what_is_none_is_refused() -> None:
    assert Decision.of_json(json.loads(json.dumps(DECISION.as_json()))) == DECISION
    for wrong in ({}, [], {**DECISION.as_json(), "colour": 1}):
        with pytest.raises(TurnoutError, match=r"^decision: must be the object"):
            Decision.of_json(wrong)


def shadow_config(**given: object) -> ShadowConfig:
    return ShadowConfig(**{"share": 1.0, "policy": PolicyChoice(name="static"), **given})  # type: ignore[arg-type]


async def test_shadows_wait_while_a_request_is_in_progress_and_are_bounded() -> None:
    shadows = Shadows(shadow_config(max_waiting=2))
    began: list[str] = []

    async def run(name: str) -> None:
        began.append(name)

    with shadows.during_request(lambda: False):
        for name in ("a", "b", "c", "d"):
            shadows.offer(name, lambda name=name: run(name))  # type: ignore[misc]
        for _ in range(20):
            await asyncio.sleep(0)
        assert (began, len(shadows), shadows.num_dropped) == ([], 3, 1)
    while len(shadows):
        await asyncio.sleep(0)
    assert began == ["a", "b", "c"]
    await shadows.close()
    shadows.offer("late", lambda: run("late"))
    assert len(shadows) == 0


async def test_a_request_that_finds_the_pool_full_ends_all_shadows() -> None:
    shadows = Shadows(shadow_config())
    freed: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            freed.append("freed")

    shadows.offer("a", forever)
    shadows.offer("b", forever)
    await asyncio.sleep(0)
    with shadows.during_request(lambda: True):
        while len(shadows):
            await asyncio.sleep(0)
    assert (freed, shadows.num_dropped) == (["freed"], 2)


def test_the_share_of_shadows_is_kept_and_always_the_same() -> None:
    shadows = Shadows(shadow_config(share=0.25))
    chosen = [shadows.wants("t", f"r{n}") for n in range(4000)]
    assert abs(sum(chosen) / 4000 - 0.25) < 0.03
    assert [Shadows(shadow_config(share=0.25)).wants("t", f"r{n}") for n in range(4000)] == chosen
    assert not any(Shadows(shadow_config(share=0.0)).wants("t", f"r{n}") for n in range(100))
