from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deployments.access.admission import Admission, estimated_tokens
from deployments.access.callers import Caller, Callers
from deployments.access.lease import Lease
from deployments.access.spending import Spending, period_end, period_start
from deployments.access.usage_record import Spent, UsageRecord
from tests.deployments.access.kit import house_config, with_time_to_retry, write_house
from tests.deployments.access.test_tenants_file import until
from turnout.access_config import Budget
from turnout.calls import ChatMessage, Chunk, GenerateCall, ScoreCall, TokenOut, Usage
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams, TokenKind

NOON = datetime(2026, 3, 31, 12, tzinfo=UTC)


class Desk:
    """An admission with hands on its clocks."""

    def __init__(self, folder: Path, tenants: dict[str, dict[str, Any]], **pools: Any) -> None:
        write_house(folder, tenants)
        self.config = house_config(folder)
        self.callers = Callers(self.config.access)
        self.seconds = 0.0
        self.now = NOON
        self.admission = self.open()

    def open(self) -> Admission:
        return Admission(self.config, self.callers, clock=lambda: self.seconds, now=lambda: self.now)

    def admit(self, tenant: str = "a", pool: str = "demo", **changes: Any) -> Lease:
        return self.admission.admit(call(tenant, model=pool, **changes), pool)

    def refused(self, tenant: str = "a", pool: str = "demo", **changes: Any) -> TurnoutError:
        with pytest.raises(TurnoutError) as refusal:
            self.admit(tenant, pool, **changes)
        return with_time_to_retry(refusal.value)

    def close(self) -> None:
        self.admission.close()
        self.callers.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    desks: list[Desk] = []

    def made(**limits: Any) -> Desk:
        desks.append(Desk(tmp_path, {"a": limits, "b": limits}))
        return desks[-1]

    yield made
    for desk in desks:
        desk.close()


def call(tenant: str, prompt: Any = "x" * 40, **changes: Any) -> GenerateCall:
    values: dict[str, Any] = {"model": "demo", "sampling": SamplingParams()} | changes
    return GenerateCall("r", prompt=prompt, tenant=tenant, **values)


def usage(prompt: int, completion: int, flops: float = 0.0, wall_s: float = 0.0) -> Usage:
    cost = CostReport(Cost(0.5, flops, wall_s), Cost(1.0, flops, wall_s), 0.5)
    return Usage(prompt, completion, 0, {}, SpeculationMeter(), 0, cost, "plain", {}, 1, 0.1, 0.2)


def finish(lease: Lease, *, prompt: int = 10, completion: int = 0, **cost: float) -> None:
    with lease:
        lease.served((usage(prompt, completion, **cost),))


def test_requests_drain_at_their_rate_and_the_refusal_says_when(make: Any) -> None:
    desk = make(requests_per_minute=3)
    for _ in range(3):
        finish(desk.admit())
    error = desk.refused()
    assert (error.code, error.field) == (Code.RESOURCE_EXHAUSTED, "tenant.requests_per_minute")
    assert "3 allowed, 0 left" in error.message
    assert error.retry_after_s == pytest.approx(20)
    finish(desk.admit("b"))  # nobody else notices
    desk.seconds += 19.9
    desk.refused()
    desk.seconds += 0.2
    finish(desk.admit())
    desk.refused()


def test_tokens_are_charged_by_estimate_and_settled_with_the_truth(make: Any) -> None:
    desk = make(tokens_per_minute=100)
    lease = desk.admit()  # 40 characters: 10 tokens
    assert desk.admission.left("a", desk.callers.limits("a"))["tokens_per_minute"] == pytest.approx(90)
    finish(lease, prompt=30, completion=60)
    assert desk.admission.left("a", desk.callers.limits("a"))["tokens_per_minute"] == pytest.approx(10)
    finish(desk.admit(), prompt=10, completion=50)
    error = desk.refused()  # in debt by 50, and 10 are needed
    assert error.field == "tenant.tokens_per_minute"
    assert error.retry_after_s == pytest.approx(60 * 60 / 100)
    desk.seconds += 36.1
    finish(desk.admit())


def test_a_prompt_larger_than_the_rate_waits_for_an_empty_bucket(make: Any) -> None:
    desk = make(tokens_per_minute=5)
    lease = desk.admit()
    finish(lease, prompt=10)
    assert desk.refused().retry_after_s == pytest.approx(120)
    desk.seconds += 120
    finish(desk.admit())


def test_a_refusal_by_the_pool_gives_the_tokens_back(make: Any) -> None:
    desk = make(tokens_per_minute=100)
    for code, left in (Code.OUT_OF_RANGE, 100), (Code.INTERNAL, 90):
        with pytest.raises(TurnoutError), desk.admit():
            raise TurnoutError(code, "no")
        assert desk.admission.left("a", desk.callers.limits("a"))["tokens_per_minute"] == pytest.approx(left)


@pytest.mark.parametrize(
    ("code", "left"), [(Code.RESOURCE_EXHAUSTED, 3), (Code.UNAVAILABLE, 3), (Code.INVALID_ARGUMENT, 2)]
)
def test_a_request_that_the_pool_had_no_room_for_does_not_count(make: Any, code: Code, left: float) -> None:
    desk = make(requests_per_minute=3)
    with pytest.raises(TurnoutError), desk.admit():
        raise TurnoutError(code, "no")
    assert desk.admission.left("a", desk.callers.limits("a"))["requests_per_minute"] == pytest.approx(left)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"concurrency": 1}, "tenant.concurrency"),
        ({"requests_per_minute": 1}, "tenant.requests_per_minute"),
        ({"tokens_per_minute": 10}, "tenant.tokens_per_minute"),
        ({"budget": {"amount": 10}}, "tenant.budget"),
    ],
)
def test_what_could_not_be_let_in_is_refused_before_it_is_read(make: Any, limits: dict[str, Any], field: str) -> None:
    desk = make(**limits)
    caller = Caller("a", desk.callers.limits("a"))
    desk.admission.precheck(caller)
    desk.admission.precheck(caller)  # it takes nothing
    lease = desk.admit()
    if field != "tenant.concurrency":
        finish(lease)
    with pytest.raises(TurnoutError) as refusal:
        desk.admission.precheck(caller)
    assert (refusal.value.code, refusal.value.field) == (Code.RESOURCE_EXHAUSTED, field)
    assert refusal.value.retry_after_s


def test_what_another_process_records_is_spent_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.access.recording.LOOK_S", 0.02)
    desk = make(budget={"amount": 100})
    before, desk.admission = desk.admission, desk.open()
    try:
        with before.admit(call("a"), "demo") as lease:
            lease.served((usage(60, 40),))
        until(lambda: desk.admission.used("a")["tokens"] == 100, 10)
        assert desk.refused().field == "tenant.budget"
    finally:
        before.close()


def test_the_seconds_of_what_tells_no_cost_are_what_others_took_and_never_longer_than_it_was_there(make: Any) -> None:
    desk = make(budget={"amount": 1e9, "unit": "seconds"})
    with desk.admit() as lease:
        desk.seconds += 3
        lease.scored(50)
    assert desk.admission.used("a")["seconds"] == pytest.approx(3)
    finish(desk.admit(), prompt=10, completion=10, wall_s=1.1)  # 0.1 s for 10 tokens read
    with desk.admit() as lease:
        desk.seconds += 3
        lease.scored(50)
    assert desk.admission.used("a")["seconds"] == pytest.approx(3 + 1.1 + 0.5)


def test_whoever_leaves_early_has_still_used_what_was_estimated(make: Any) -> None:
    desk = make(tokens_per_minute=100)
    with pytest.raises(GeneratorExit), desk.admit():
        raise GeneratorExit
    assert desk.admission.left("a", desk.callers.limits("a"))["tokens_per_minute"] == pytest.approx(90)


def test_concurrency_is_what_runs_at_once(make: Any) -> None:
    desk = make(concurrency=2)
    first, _ = desk.admit(), desk.admit()
    assert desk.refused().field == "tenant.concurrency"
    finish(first)
    desk.admit()
    assert desk.refused().retry_after_s == 1.0
    desk.admit(billed=False)  # what we ask ourselves is nobody's


def test_a_tenants_batch_leaves_room_for_its_other_requests(make: Any) -> None:
    desk = make(concurrency=2, requests_per_minute=10, tokens_per_minute=1000)
    running = [desk.admit(priority="batch") for _ in range(2)]
    assert "concurrency" in str(desk.refused(priority="batch"))
    assert desk.admission.left("a", desk.callers.limits("a"))["concurrency"] == 2
    for lease in [*running, desk.admit()]:
        finish(lease)
    for _ in range(2):
        finish(desk.admit(priority="batch"))
    assert "requests_per_minute" in str(desk.refused(priority="batch"))
    for _ in range(5):
        finish(desk.admit())
    assert "requests_per_minute" in str(desk.refused())


def test_the_calls_of_one_request_are_let_in_together_or_not_at_all(make: Any) -> None:
    desk = make(concurrency=3, requests_per_minute=6, tokens_per_minute=100)
    running = desk.admit()
    desk.admission.check([call("a")] * 2)
    error = _refused(desk, 3)
    assert (error.code, error.field) == (Code.RESOURCE_EXHAUSTED, "tenant.concurrency")
    assert "2 left, 3 needed" in error.message
    finish(running)
    desk.admission.check([call("a")] * 3)
    for number, limit in (4, "concurrency"), (7, "concurrency"):
        error = _refused(desk, number)
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "prompt")
        assert limit in error.message
    error = _refused(desk, 2, prompt="x" * 204)
    assert error.code is Code.INVALID_ARGUMENT
    assert "tokens_per_minute" in error.message
    for _ in range(3):
        finish(desk.admit())
    assert _refused(desk, 3).field == "tenant.requests_per_minute"
    assert desk.admission.left("a", desk.callers.limits("a"))["concurrency"] == 3


def _refused(desk: Desk, number: int, **changes: Any) -> TurnoutError:
    with pytest.raises(TurnoutError) as refusal:
        desk.admission.check([call("a", **changes)] * number)
    return refusal.value


def test_limits_that_change_hold_at_once(make: Any) -> None:
    desk = make(requests_per_minute=1)
    finish(desk.admit())
    desk.refused()
    desk.callers._file._value = desk.callers._file._value.__class__({}, {})
    assert desk.refused().code is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("limits", "asked", "field"),
    [
        ({"pools": ["d*"]}, {"pool": "other"}, "model"),
        ({"pools": []}, {}, "model"),
        ({"methods": ["spec*", "plain"]}, {"method": "best_of"}, "method"),
        ({"methods": ["spec*"]}, {}, "method"),  # the pool's default is entropy_adaptive
        ({"methods": ["entropy_adaptive"]}, {"model_given": "small"}, "method"),  # a model alone is plain
        ({"methods": ["monitored"]}, {"method": "monitored", "params": {"inner": "best_of"}}, "method"),
        (
            {"methods": ["monitored", "plain"]},
            {"method": "monitored", "params": {"inner": {"name": "monitored", "inner": "best_of"}}},
            "method",
        ),
        (
            {"methods": ["monitored", "plain"]},
            {
                "method": "monitored",
                "params": {"inner": {"name": "monitored", "params": {"inner": {"name": "best_of"}}}},
            },
            "method",
        ),
    ],
)
def test_pools_and_methods_are_allowed_by_pattern(
    make: Any, limits: dict[str, Any], asked: dict[str, Any], field: str
) -> None:
    desk = make(**limits)
    model = asked.pop("model_given", None)
    pool = asked.pop("pool", "demo")
    with pytest.raises(TurnoutError) as refusal:
        desk.admission.admit(call("a", **{"model": model or pool, **asked}), pool)
    assert (refusal.value.code, refusal.value.field) == (Code.PERMISSION_DENIED, field)
    assert "allowed: " in refusal.value.message


def test_what_is_allowed_is_let_in(make: Any) -> None:
    desk = make(pools=["demo"], methods=["entropy_*", "monitored", "plain"])
    finish(desk.admit())
    finish(desk.admit(method="plain"))
    finish(desk.admit(method="monitored", params={"inner": "plain"}))
    assert desk.admission.used("a")["tokens"] == 30


@pytest.mark.parametrize(
    ("unit", "used"), [("tokens", {}), ("flops", {"flops": 100.0}), ("seconds", {"wall_s": 100.0})]
)
def test_a_budget_is_spent_once_and_begins_anew(make: Any, unit: str, used: dict[str, float]) -> None:
    desk = make(budget={"amount": 100, "unit": unit, "per": "day"})
    finish(desk.admit(), prompt=60, completion=40, **used)
    error = desk.refused()
    assert (error.code, error.field) == (Code.RESOURCE_EXHAUSTED, "tenant.budget")
    assert error.retry_after_s == pytest.approx(12 * 3600)
    assert f"100 {unit} a day" in error.message
    # Another process reads what this one has recorded.
    assert desk.admission.flush()
    again = desk.open()
    try:
        with pytest.raises(TurnoutError, match=r"tenant\.budget"):
            again.admit(call("a"), "demo")
    finally:
        again.close()
    desk.now = datetime(2026, 4, 1, tzinfo=UTC)
    finish(desk.admit())


def test_requests_in_progress_count_against_a_budget_of_tokens(make: Any) -> None:
    desk = make(budget={"amount": 100})
    lease = desk.admit()  # 40 characters: 10 tokens
    others = [desk.admit(prompt="x" * 80) for _ in range(4)]
    assert desk.admission.left("a", desk.callers.limits("a"))["budget"] == 10
    lease.served((Chunk(0, "ab", tuple(TokenOut(1, "a", "small", TokenKind.DECODED) for _ in range(10))),))
    error = desk.refused()
    assert (error.field, error.retry_after_s) == ("tenant.budget", 1.0)
    assert "0 spent, 100 of requests in progress" in error.message
    finish(desk.admit("b"))  # nobody else notices
    for other in others:
        with pytest.raises(TurnoutError), other:
            raise TurnoutError(Code.UNAVAILABLE, "no")
    finish(desk.admit())
    finish(lease, prompt=10, completion=75)
    left = desk.admission.left("a", desk.callers.limits("a"))
    assert left["budget"] == 5, "what has ended is what was recorded of it"


@pytest.mark.parametrize(("unit", "used"), [("flops", {"flops": 40.0}), ("seconds", {"wall_s": 20.1})])
def test_requests_that_begin_at_once_do_not_pass_a_budget_of_flops_or_seconds_together(
    make: Any, unit: str, used: dict[str, float]
) -> None:
    desk = make(budget={"amount": 140, "unit": unit})
    finish(desk.admit("b"), prompt=10, completion=10, **used)  # 2 a token
    streams = [desk.admit() for _ in range(5)]  # 10 tokens each
    assert desk.admission.left("a", desk.callers.limits("a"))["budget"] == pytest.approx(40)
    streams[0].served((Chunk(0, "ab", tuple(TokenOut(1, "a", "small", TokenKind.DECODED) for _ in range(20))),))
    error = desk.refused()
    assert (error.field, error.retry_after_s) == ("tenant.budget", 1.0)
    assert "0 spent, 140 of requests in progress" in error.message
    for stream in streams:
        with pytest.raises(TurnoutError), stream:
            raise TurnoutError(Code.UNAVAILABLE, "no")
    finish(desk.admit("a"))


def test_cutting_streams_short_does_not_evade_a_budget(make: Any) -> None:
    desk = make(budget={"amount": 100, "unit": "flops"})
    finish(desk.admit(), prompt=10, completion=10, flops=40.0)  # 2 a token
    lease = desk.admit()
    lease.prompt_tokens, lease.sources["small"] = 20, 12
    with pytest.raises(GeneratorExit), lease:
        raise GeneratorExit
    assert desk.refused().field == "tenant.budget"


def test_without_the_section_nothing_is_counted(tmp_path: Path) -> None:
    config = house_config(tmp_path).model_copy(update={"access": None})
    admission = Admission(config, Callers(None))
    lease = admission.admit(call("default"), "demo")
    assert not admission.counts
    assert not lease.counts


def test_estimates() -> None:
    assert estimated_tokens(call("a", prompt=(1, 2, 3))) == 3
    assert estimated_tokens(call("a", prompt=None, messages=(ChatMessage("user", "x" * 9),))) == 3 + 4
    assert estimated_tokens(ScoreCall("r", "m", "abcd", ("ab", (1, 2)))) == 1 + 1 + 2


def test_periods_are_of_utc() -> None:
    assert period_start("month", NOON) == datetime(2026, 3, 1, tzinfo=UTC)
    assert period_end("month", NOON) == datetime(2026, 4, 1, tzinfo=UTC)
    assert period_end("day", datetime(2026, 12, 31, 23, tzinfo=UTC)) == datetime(2027, 1, 1, tzinfo=UTC)


def test_spending_of_before_is_not_of_now() -> None:
    records = [
        UsageRecord(time=time, request_id="r", tenant="a", model="m", prompt_tokens=1, cost=Spent(flops=2, wall_s=3))
        for time in (datetime(2026, 2, 28, tzinfo=UTC), datetime(2026, 3, 2, tzinfo=UTC), NOON)
    ]
    spending = Spending(records)
    assert spending.spent("a", Budget(amount=1, per="month"), NOON) == 2
    assert spending.spent("a", Budget(amount=1, per="day"), NOON) == 1
    assert spending.spent("a", Budget(amount=1, unit="flops"), NOON) == 4
    assert spending.spent("b", Budget(amount=1), NOON) == 0
