"""Rules, splits and budgets; what is wrong with their parameters is said by field."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2

from router import experiment_winner as decided_file
from router.base import RoutingPolicy, make_policy
from router.decision import Decision
from router.patterns import Pattern
from tests.router.asking import NO_MODELS, asked
from turnout.errors import Code, TurnoutError
from turnout.part_choice import PartChoice

SMALL, LARGE = {"name": "plain", "model": "small"}, {"name": "plain", "model": "large"}
ARMS = {"a": {"share": 0.3, "method": "plain"}, "b": {"share": 0.7, "method": "entropy_adaptive"}}


def policy(name: str, **params: Any) -> RoutingPolicy:
    return make_policy(PartChoice(name=name, params=params), "routing.policy")


async def decided(chosen: RoutingPolicy, *args: Any, **given: Any) -> Decision:
    return await chosen.decide(asked(*args, **given), NO_MODELS)


RULES = [
    {"name": "long", "when": {"prompt_tokens": {"min": 50}}, "method": LARGE},
    {"when": {"tenants": ["gold"], "quality": {"min": 0.9}}, "method": LARGE},
    {"when": {"pattern": r"\bprove\b", "ignore_case": True}, "method": "entropy_adaptive"},
    {"when": {"sessions": ["night"], "max_tokens": {"max": 20}}, "method": SMALL},
]


@pytest.mark.parametrize(
    ("given", "rule", "method", "reason"),
    [
        ({"tokens": 50}, 1, "plain", "rule long: prompt_tokens 50 is at least 50"),
        ({"tokens": 49}, 0, "speculative", "no rule fits"),
        ({"tenant": "gold", "quality": 0.95}, 2, "plain", "rule 2: quality 0.95 is at least 0.9, tenant 'gold'"),
        ({"tenant": "gold"}, 0, "speculative", "no rule fits"),
        ({"text": "Prove it"}, 3, "entropy_adaptive", "rule 3: pattern found"),
        ({"text": "improve it"}, 0, "speculative", "no rule fits"),
        ({"text": "Prove it", "tokens": 60}, 1, "plain", "rule long: prompt_tokens 60 is at least 50"),
        ({"session": "night", "max_tokens": 20}, 4, "plain", "rule 4: max_tokens 20 is at most 20, session 'night'"),
        ({"session": "night", "max_tokens": 21}, 0, "speculative", "no rule fits"),
    ],
)
async def test_the_first_rule_that_fits_decides(given: dict[str, Any], rule: int, method: str, reason: str) -> None:
    static = policy("static", rules=RULES, default={"method": "speculative"})
    decision = await decided(static, **given)
    assert (decision.features["rule"], decision.method, decision.reason) == (rule, method, reason)
    assert decision.policy == "static"
    again = await decided(policy("static", rules=RULES, default={"method": "speculative"}), **given)
    assert again == decision
    other = await decided(policy("static", rules=RULES[1:], default={"method": "speculative"}), **given)
    assert other.version != decision.version


async def test_a_rule_can_leave_the_choice_to_another_policy() -> None:
    inner = {"name": "split", "arms": ARMS, "by": "request"}
    decision = await decided(policy("static", default={"policy": inner}))
    assert decision.policy == "static/split"
    assert len(decision.version.split("/")) == 2
    assert decision.arm in ARMS
    assert decision.reason.startswith("no rule fits; this request is in arm")


async def test_a_split_gives_each_arm_its_share_and_a_session_always_the_same() -> None:
    split = policy("split", arms=ARMS)
    sessions = [f"s{number}" for number in range(4000)]
    arms = [(await decided(split, session=name)).arm for name in sessions]
    counts = Counter(arms)
    statistic = sum((counts[arm] - 4000 * ARMS[arm]["share"]) ** 2 / (4000 * ARMS[arm]["share"]) for arm in ARMS)
    assert chi2.sf(statistic, 1) > 0.001
    assert [(await decided(split, session=name, id="other", tokens=9)).arm for name in sessions] == arms
    other = [(await decided(policy("split", arms=ARMS, seed=1), session=name)).arm for name in sessions]
    agree = sum(one == two for one, two in zip(arms, other, strict=True)) / 4000
    assert abs(agree - (0.3**2 + 0.7**2)) < 0.04  # as two independent splits agree


async def test_a_split_that_is_decided_gives_everything_to_the_arm_that_its_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decided_file, "LOOK_S", 0.0)
    path = tmp_path / "decided.json"
    split = policy("split", arms=ARMS, decided=str(path))

    async def arms_now() -> set[str]:
        return {(await decided(split, session=f"s{n}")).arm for n in range(40)}

    both = await arms_now()
    assert len(both) == 2
    for wrong in ("{", '{"arm": "other"}', "[]"):
        path.write_text(wrong)
        assert await arms_now() == both
    assert caplog.text.count("cannot be used") == 3
    path.unlink()
    arm = min(both)
    decided_file.write_decided(path, {"arm": arm})
    decided_file.write_decided(path, {"arm": max(both)})  # what was decided first stays
    assert await arms_now() == {arm}
    decision = await decided(split, session="s")
    assert (decision.features["decided"], decision.reason) == (1.0, f"the split was decided for arm {arm}")
    assert decision.version.startswith((await decided(policy("split", arms=ARMS, decided=str(path)))).version[:12])
    path.unlink()
    assert await arms_now() == both


async def test_places_of_a_split_are_uniform() -> None:
    split = policy("split", arms=ARMS, by="request")
    counts = Counter([int(10 * (await decided(split, id=f"r{n}")).features["place"]) for n in range(5000)])
    assert chi2.sf(sum((counts[bin_] - 500) ** 2 / 500 for bin_ in range(10)), 9) > 0.001


async def test_a_session_without_a_name_and_other_tenants_are_divided_for_themselves() -> None:
    split = policy("split", arms=ARMS)
    by_request = {(await decided(split, id=f"r{n}")).arm for n in range(50)}
    by_tenant = {(await decided(split, session="s", tenant=f"t{n}")).arm for n in range(50)}
    assert by_request == by_tenant == {"a", "b"}
    tenants = policy("split", arms=ARMS, by="tenant")
    assert len({(await decided(tenants, session=f"s{n}", id=f"r{n}")).arm for n in range(50)}) == 1


async def test_an_arm_without_a_share_gets_nothing() -> None:
    arms = {"none": {"share": 0, "method": "plain"}, **ARMS, "last": {"share": 0, "method": "plain"}}
    split = policy("split", arms=arms, by="request")
    assert {(await decided(split, id=f"r{n}")).arm for n in range(500)} == {"a", "b"}


TABLE = [
    {"method": SMALL, "cost": 0.1, "quality": 0.6, "seconds_per_token": 0.01},
    {"method": "entropy_adaptive", "cost": 0.4, "quality": 0.95, "seconds": 0.5, "seconds_per_token": 0.03},
    {"method": LARGE, "cost": 1.0, "quality": 1.0, "seconds_per_token": 0.05},
    {"method": "speculative", "cost": 1.0, "quality": 1.0},
]


@pytest.mark.parametrize(
    ("given", "method", "cost"),
    [
        ({}, LARGE, 1.0),  # the best, and of two equal ones the first
        ({"max_cost": 0.5}, "entropy_adaptive", 0.4),
        ({"quality": 0.9}, "entropy_adaptive", 0.4),  # the cheapest that is good enough
        ({"quality": 0.96}, LARGE, 1.0),
        ({"max_latency_s": 4.0}, "entropy_adaptive", 0.4),  # 0.5 + 100 * 0.03 = 3.5
        ({"max_latency_s": 3.4}, SMALL, 0.1),
        ({"max_latency_s": 3.4, "max_tokens": 50}, LARGE, 1.0),  # 50 * 0.05 = 2.5
        ({"quality": 0.5, "max_cost": 0.5}, SMALL, 0.1),
    ],
)
async def test_a_budget_keeps_every_limit(given: dict[str, Any], method: Any, cost: float) -> None:
    decision = await decided(policy("budget", table=TABLE), **given)
    expected = method if isinstance(method, dict) else {"name": method}
    assert {"name": decision.method, **decision.params} == expected
    assert decision.scores["cost"] == cost
    holds_for = {"max_tokens": given.get("max_tokens", 100)} if "max_latency_s" in given else {}
    assert decision.limits == {name: value for name, value in given.items() if name != "max_tokens"} | holds_for


async def test_a_configured_limit_holds_where_the_request_sets_none() -> None:
    budget = policy("budget", table=TABLE, max_cost=0.2)
    assert (await decided(budget)).params == {"model": "small"}
    assert (await decided(budget, max_cost=0.5)).method == "entropy_adaptive"


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"max_cost": 0.05}, "limits.max_cost", "0.05 cannot be kept: 0.1 can be had"),
        ({"max_latency_s": 0.5}, "limits.max_latency_s", "0.5 cannot be kept: 1 can be had"),
        ({"max_cost": 0.2, "quality": 0.9}, "limits", "no way of answering keeps all of max_cost 0.2, quality 0.9"),
    ],
)
async def test_limits_that_cannot_be_kept_are_refused(given: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        await decided(policy("budget", table=TABLE), **given)
    assert (caught.value.field, caught.value.code) == (field, Code.OUT_OF_RANGE)
    assert says in caught.value.message
    nearest = await decided(policy("budget", table=TABLE, when_none="nearest"), **given)
    assert nearest.params == {"model": "small"}
    assert "exceeds them least" in nearest.reason


@pytest.mark.parametrize(
    ("name", "params", "field", "says"),
    [
        ("magic", {}, "routing.policy.name", "'magic' is not known; available: "),
        ("split", {"arms": {"a": {"share": 0.5, "method": "plain"}}}, "routing.policy.params", "to 1, not to 0.5"),
        ("split", {"arms": {}}, "routing.policy.params.arms", "at least 1"),
        ("split", {"arms": {"a": {"share": 1}}}, "routing.policy.params.arms.a", "exactly one of method and policy"),
        (
            "split", {"arms": {"a": {"share": 1, "method": "magic"}}},
            "routing.policy.params.arms.a.method.name", "'magic' is not known",
        ),
        (
            "split", {"arms": {"a": {"share": 1, "policy": {"name": "static", "rules": []}}}},
            "routing.policy.params.arms.a.policy.default", "required",
        ),
        (
            "static", {"default": {"method": {"name": "plain", "model": "Huge!"}}},
            "routing.policy.params.default.method.model", "pattern",
        ),
        (
            "static", {"default": {"method": "plain"}, "rules": [{"when": {"pattern": "("}, "method": "plain"}]},
            "routing.policy.params.rules.0.when.pattern", "is no regular expression",
        ),
        (
            "static", {"default": {"method": "plain"}, "rules": [{"when": {}, "method": "plain"}]},
            "routing.policy.params.rules.0.when", "at least one condition",
        ),
        (
            "static", {"default": {"method": "plain"}, "rules": [{"when": {"quality": {"min": 2, "max": 1}}}]},
            "routing.policy.params.rules.0.when.quality", "min must be at most max",
        ),
        ("budget", {}, "routing.policy.params", "give a table, calibrations or both"),
        (
            "budget", {"table": [{"method": "plain", "cost": -1, "quality": 1}]},
            "routing.policy.params.table.0.cost", "greater than 0",
        ),
        (
            "budget", {"table": [{"method": {"name": "plain", "depth": 3}, "cost": 1, "quality": 1}]},
            "routing.policy.params.table.0.method.depth", "unknown",
        ),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_field(name: str, params: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        make_policy(PartChoice(name=name, params=params), "routing.policy")
    assert caught.value.field == field
    assert says in caught.value.message


async def test_other_requests_go_on_while_patterns_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    met = threading.Event()
    monkeypatch.setattr(Pattern, "found_in", lambda self, text: met.wait(10))
    rules = [{"when": {"pattern": "x"}, "method": {"name": "plain", "model": "small"}}]
    deciding = asyncio.create_task(decided(policy("static", rules=rules, default={"method": "plain"})))
    await asyncio.sleep(0)
    met.set()
    assert (await deciding).params == {"model": "small"}
