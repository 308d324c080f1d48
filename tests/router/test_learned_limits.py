"""What a caller sets, and what a target promises: kept, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.artifacts import Artifact
from router.difficulty.curve import Point, RouterCurve
from router.policies.learned import LearnedParams, LearnedPolicy
from router.routing import Router
from tests.router.probes import CHANCES, asked, models_of, policy, save_router, save_strategies
from turnout.calls import RouteLimits
from turnout.config import POLICIES_PACKAGE
from turnout.errors import TurnoutError
from turnout.registry import names


def test_a_lucky_point_of_the_curve_promises_nothing(tmp_path: Path):
    """A share of 0.2 that did as well as 0.7 by chance is pooled with those that did worse."""
    save_router(tmp_path, CHANCES)
    artifact = Artifact.load(tmp_path / "router.safetensors")
    artifact.settings["routing"]["curve"][2]["quality"] = 0.7
    curve = RouterCurve.of(artifact)
    qualities = [point.quality for point in curve.points]
    assert qualities == sorted(qualities)
    assert curve.share_at_quality(0.7 / 0.8, "quality") > 0.7
    assert qualities[2] == pytest.approx(np.mean([0.7, 0.52, 0.56]))


@pytest.mark.parametrize(
    ("cost", "share"), [(0.4, 0.1), (0.45, 0.15), (0.5, 0.4), (0.55, 0.45), (0.6, 0.5), (0.8, 0.75), (1.0, 1.0)]
)
def test_the_largest_share_within_a_cost_is_found_where_the_cost_falls(cost: float, share: float):
    """It falls with the share where the large model's answers are the cheaper ones."""
    costs = {0.0: 0.5, 0.1: 0.4, 0.2: 0.5, 0.25: 0.7, 0.4: 0.5, 0.5: 0.6, 1.0: 1.0}
    curve = RouterCurve((0.0, 1.0), (0.0, 1.0), tuple(Point(at, each, 0.5) for at, each in costs.items()), 0.5)
    assert curve.share_at_cost(cost, "cost") == pytest.approx(share)
    with pytest.raises(TurnoutError, match=r"cost: 0.39 cannot be reached; reachable: 0.400 to 1.000"):
        curve.share_at_cost(0.39, "cost")


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8, 0.95])
async def test_of_equal_gains_as_many_go_to_the_large_model_as_were_asked_for(tmp_path: Path, share: float):
    """As an isotonic map makes them: 60% of the prompts have the gain 0, and a threshold sends all or none of them."""
    chances = [[0.9, 0.9]] * 6 + [[0.8 - 0.1 * place, 0.9] for place in range(4)]
    save_router(tmp_path, chances)
    artifact = Artifact.load(tmp_path / "router.safetensors")
    artifact.settings["quantiles"]["worth"] = [0.0] * 61 + [0.1] * 10 + [0.2] * 10 + [0.3] * 10 + [0.4] * 10
    artifact.save(tmp_path / "router.safetensors")
    models, router = models_of(tmp_path), policy("learned", large_share=share)
    made = [[await router.decide(asked(last, before=number), models) for last in range(10)] for number in range(50)]
    sides = np.array([[each.params["model"] == "large" for each in row] for row in made])
    assert sides.mean() == pytest.approx(share, abs=0.04)
    assert made[3] == [await policy("learned", large_share=share).decide(asked(n, before=3), models) for n in range(10)]
    if share == 0.5:  # of the ties a sixth goes there, and all that gain something
        assert sides[:, 6:].all()
        assert made[0][0].limits["of_ties"] == pytest.approx(1 / 6, abs=0.02)
        assert made[0][0].reason.startswith("predicted gain 0.000 is one of many, of which 17% go to the large model")


async def test_what_the_caller_sets_goes_before_the_pools_target(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models, router = models_of(tmp_path), policy("learned", large_share=0.5)
    cheap = await router.decide(asked(9, RouteLimits(max_cost=0.5)), models)
    assert (cheap.params, cheap.limits["max_cost"]) == ({"model": "small"}, 0.5)
    assert cheap.reason.startswith("max_cost 0.5 leaves the small model only")
    # Token 2: 0.75 of 0.95 is 0.79 of the large model's chance.
    for quality, side in ((0.7, "small"), (0.9, "large")):
        decision = await router.decide(asked(2, RouteLimits(quality=quality)), models)
        assert decision.params == {"model": side}
    with pytest.raises(TurnoutError, match=r"max_cost: 0.05; the small model alone costs 0.100"):
        await router.decide(asked(9, RouteLimits(max_cost=0.05)), models)
    with pytest.raises(TurnoutError, match=r"quality: 0.9 needs the large model, which costs more than max_cost 0.5"):
        await router.decide(asked(9, RouteLimits(max_cost=0.5, quality=0.9)), models)


CASCADE = {"method": {"name": "cascade", "threshold": -0.5}}
SAMPLES = {"policy": {"name": "adaptive_best_of", "average": 2}}


@pytest.mark.parametrize("limits", [{"max_cost": 0.3}, {"max_cost": 1.05}, {"quality": 0.1}])
@pytest.mark.parametrize("small", [CASCADE, SAMPLES])
async def test_a_limit_is_refused_where_the_small_side_is_more_than_the_small_model(
    tmp_path: Path, small: dict, limits: dict
):
    """A cascade that escalates costs more than the large model, and several samples as many times the small one."""
    save_router(tmp_path, CHANCES)
    models, router = models_of(tmp_path), Router(policy("learned", large_share=0.5, small=small))
    [limit] = limits
    with pytest.raises(TurnoutError, match=rf"^limits\.{limit}: the routing policy learned.* keeps none"):
        await router.decide(asked(1, RouteLimits(**limits)), models)
    # Where the large model itself answers, both of them are kept.
    if limits != {"max_cost": 0.3}:
        assert (await router.decide(asked(9, RouteLimits(**limits)), models)).params == {"model": "large"}


async def test_a_large_side_that_may_cost_more_or_answer_worse_keeps_no_limit(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models = models_of(tmp_path)
    lossy, lossless = {"method": {"name": "entropy_adaptive", "threshold": 1.0}}, {"method": "speculative"}
    for large, limits, kept in (
        (lossy, {"quality": 0.9}, False),
        (lossless, {"quality": 0.9}, True),
        (lossless, {"max_cost": 1.0}, False),
    ):
        router = Router(policy("learned", large_share=0.5, large=large))
        if kept:
            assert (await router.decide(asked(9, RouteLimits(**limits)), models)).method == "speculative"
        else:
            with pytest.raises(TurnoutError, match=rf"^limits\.{next(iter(limits))}: "):
                await router.decide(asked(9, RouteLimits(**limits)), models)


@pytest.mark.parametrize("limits", [{"max_cost": 0.3}, {"max_cost": 0.3, "quality": 0.5}])
async def test_a_policy_on_the_small_side_keeps_the_limits_that_it_looks_at(tmp_path: Path, limits: dict):
    save_router(tmp_path, CHANCES)
    ways = [({"name": "plain", "model": "small"}, 0.1, 0.6), ({"name": "entropy_adaptive", "threshold": 1.0}, 0.4, 0.8)]
    table = [{"method": method, "cost": cost, "quality": quality} for method, cost, quality in ways]
    router = Router(policy("learned", large_share=0.5, small={"policy": {"name": "budget", "table": table}}))
    decision = await router.decide(asked(9, RouteLimits(**limits)), models_of(tmp_path))
    assert (decision.policy, decision.params) == ("learned/budget", {"model": "small"})
    assert decision.reason.startswith("max_cost 0.3 leaves the small side only")


KEEP: dict[str, tuple[dict[str, object], set[str]]] = {
    "learned": ({}, {"max_cost", "quality"}),
    "strategies": ({}, set()),
    "adaptive_best_of": ({}, set()),
    "split": ({"arms": {"a": {"share": 1.0, "method": "plain"}}}, set()),
    "static": (
        {"default": {"method": "plain"}, "rules": [{"when": {"max_cost": {"min": 5}}, "method": "plain"}]},
        {"max_cost"},
    ),
    "budget": (
        {"table": [{"method": "plain", "cost": 0.5, "quality": 0.9, "seconds_per_token": 0.001}]},
        {"max_cost", "max_latency_s", "quality"},
    ),
}
LIMITS: dict[str, float] = {"max_cost": 0.9, "max_latency_s": 100.0, "quality": 0.1}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", KEEP)
async def test_a_limit_is_kept_or_refused(tmp_path: Path, name: str, limit: str):
    save_router(tmp_path, CHANCES)
    save_strategies(tmp_path, ["easy"] * 10)
    params, keeps = KEEP[name]
    request = asked(1, RouteLimits(**{limit: LIMITS[limit]}))
    # A policy that leaves the choice to another one keeps what that one keeps.
    outer = policy("static", default={"policy": {"name": name, **params}})
    for each in (policy(name, **params), outer):
        if limit in keeps:
            await Router(each).decide(request, models_of(tmp_path))
            continue
        with pytest.raises(TurnoutError, match=rf"^limits\.{limit}: the routing policy .*{name} keeps none"):
            await Router(each).decide(request, models_of(tmp_path))
        await Router(each, checks_limits=False).decide(request, models_of(tmp_path))


def test_every_policy_says_which_limits_it_keeps():
    assert set(KEEP) == set(names(POLICIES_PACKAGE))


@pytest.mark.parametrize("target", [{"cost": 0.5}, {"quality": 0.9}])
@pytest.mark.parametrize(
    ("sides", "refused"),
    [
        ({}, ()),
        ({"large": {"method": {"name": "speculative"}}}, ("cost",)),
        ({"large": {"method": {"name": "entropy_adaptive"}}}, ("cost", "quality")),
        ({"small": {"method": {"name": "entropy_adaptive"}}}, ("cost", "quality")),
        ({"small": {"policy": {"name": "static", "default": {"method": "plain"}}}}, ("cost", "quality")),
    ],
)
def test_a_target_that_was_read_from_other_answers_is_refused(
    target: dict[str, float], sides: dict[str, Any], refused: tuple[str, ...]
) -> None:
    params = LearnedParams(**target, **sides)
    [name] = target
    if name in refused:
        with pytest.raises(TurnoutError, match=f"^where.{name}: is read from answers of each model alone"):
            LearnedPolicy.check_params(params, "where")
    else:
        LearnedPolicy.check_params(params, "where")
    LearnedPolicy.check_params(LearnedParams(large_share=0.5, **sides), "where")
