"""Policies that ask a probe: whom they send a request to, with which settings, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoding.artifacts import Artifact
from router import experiment_winner as decided_file
from router.allocation import Bins
from router.decision import Decision
from router.difficulty.curve import ALWAYS, NEVER, Cut, RouterCurve
from router.difficulty.drift import LIMIT, WINDOW, GainDrift
from router.difficulty.strategies import STRATEGIES
from router.experiment_winner import write_decided
from router.routing import Router
from tests.router.probes import CHANCES, asked, models_of, policy, save_router, save_strategies
from turnout.config import StickyConfig
from turnout.errors import Code, TurnoutError


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 1.0])
async def test_the_share_asked_for_goes_to_the_large_model(tmp_path: Path, share: float):
    save_router(tmp_path, CHANCES)
    models, router = models_of(tmp_path), policy("learned", large_share=share)
    router.check(models)
    sides = [(await router.decide(asked(last), models)).params["model"] for last in range(10)]
    num = round(share * 10)
    assert sides == ["small"] * (10 - num) + ["large"] * num


async def test_a_decision_says_what_it_saw_predicted_and_compared(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models, router = models_of(tmp_path), policy("learned", threshold=0.25)
    decision = await router.decide(asked(3), models)
    assert (decision.method, decision.params, decision.policy) == ("plain", {"model": "large"}, "learned")
    assert decision.version.split("+")[0] == Artifact.load(tmp_path / "router.safetensors").version
    assert set(decision.features) == {"log_prompt_tokens", "entropy_bits", "margin_nats", "top_logprob"}
    assert decision.scores == pytest.approx({"p_small": 0.65, "p_large": 0.95, "gain": 0.3, "worth": 0.3}, abs=1e-4)
    assert decision.limits == {"worth_from": 0.25}
    assert decision.reason == "predicted gain 0.300 is at least 0.250"
    assert decision == await policy("learned", threshold=0.25).decide(asked(3), models)


async def test_the_small_model_reads_the_prompt_once_and_the_large_one_nothing(tmp_path: Path):
    """The probe adds no forward to the one in which the small model reads the prompt, however many policies ask."""
    save_router(tmp_path, CHANCES)
    save_strategies(tmp_path, ["easy"] * 10)
    models = models_of(tmp_path)
    request = asked(5)
    for name in ("learned", "adaptive_best_of", "strategies"):
        await policy(name).decide(request, models)
    assert (models.small.forwards, models.small.fed_tokens, models.large.forwards) == (1, 4, 0)
    assert models.small.cached[request.request.sequence] == [0, 1, 2, 5]


async def test_cost_and_quality_are_read_from_the_held_out_curve(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models = models_of(tmp_path)
    curve = RouterCurve.of(Artifact.load(tmp_path / "router.safetensors"))
    # cost = 0.1 + 0.9 share; quality = 0.4 + 0.4 share of the large model's 0.8
    assert curve.share_at_cost(0.1 + 0.9 * 0.35, "cost") == pytest.approx(0.35)
    assert curve.share_at_cost(1.0, "cost") == 1.0
    assert curve.share_at_quality(0.75, "quality") == pytest.approx(0.5)
    assert curve.share_at_quality(0.5, "quality") == 0.0
    assert (curve.cut(0.0), curve.cut(1.0)) == (Cut(NEVER), Cut(ALWAYS))
    decisions = [await policy("learned", **p).decide(asked(4), models) for p in ({"cost": 0.55}, {"large_share": 0.5})]
    assert decisions[0].limits == decisions[1].limits
    decisions = [
        await policy("learned", **p).decide(asked(4), models) for p in ({"quality": 0.75}, {"large_share": 0.5})
    ]
    assert decisions[0].limits == pytest.approx(decisions[1].limits)


def with_errors(folder: Path, hard: float = 0.3, easy: float = 0.5) -> Artifact:
    """A router whose rates at share s are (1 - s)^2 of what is hard and s^2 of what is easy."""
    save_router(folder, CHANCES)
    artifact = Artifact.load(folder / "router.safetensors")
    routing = artifact.settings["routing"]
    routing.update(hard=hard, easy=easy)
    for point in routing["curve"]:
        point["hard_sent_small"] = (1.0 - point["share"]) ** 2 if hard else None
        point["easy_sent_large"] = point["share"] ** 2 if easy else None
    artifact.save(folder / "router.safetensors")
    return artifact


@pytest.mark.parametrize(("weight", "share"), [(0.0, 0.0), (1.0, 0.4), (4.0, 0.7), (1e6, 1.0)])
async def test_the_share_of_least_weighted_loss_goes_to_the_large_model(tmp_path: Path, weight: float, share: float):
    """At weight 1 the losses of 0.3, 0.4 and 0.5 are 0.192, 0.188 and 0.2; at 4, of 0.6 to 0.8, 0.372, 0.353, 0.368."""
    curve = RouterCurve.of(with_errors(tmp_path))
    assert curve.share_of_least_loss(weight, "miss_weight") == pytest.approx(share)
    models = models_of(tmp_path)
    for last in range(10):
        weighed, shared = policy("learned", miss_weight=weight), policy("learned", large_share=share)
        made, same = [await each.decide(asked(last), models) for each in (weighed, shared)]
        assert (made.params, made.limits) == (same.params, pytest.approx(same.limits))


def test_an_error_that_no_prompt_allows_weighs_nothing(tmp_path: Path):
    assert RouterCurve.of(with_errors(tmp_path, hard=0.0)).share_of_least_loss(9.0, "miss_weight") == 0.0
    assert RouterCurve.of(with_errors(tmp_path, easy=0.0)).share_of_least_loss(0.1, "miss_weight") == 1.0


def test_an_artifact_without_error_rates_is_refused_for_a_weight_alone(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models = models_of(tmp_path)
    policy("learned", large_share=0.3).check(models)
    with pytest.raises(TurnoutError, match=r"^routing\.policy\.params\.miss_weight: .*train it anew") as refused:
        policy("learned", miss_weight=5.0).check(models)
    assert refused.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"cost": 0.05}, "routing.policy.params.cost: 0.05 cannot be reached; reachable: 0.100 to 1.000"),
        ({"quality": 0.999}, None),
        ({"artifact": "none"}, "routing.policy.params.artifact: 'none' is not known; available: router"),
    ],
)
def test_targets_that_nothing_reaches_are_refused_at_the_start(tmp_path: Path, params: dict, said: str | None):
    save_router(tmp_path, CHANCES)
    router = policy("learned", **params)
    if said is None:
        router.check(models_of(tmp_path))
        return
    with pytest.raises(TurnoutError) as refused:
        router.check(models_of(tmp_path))
    assert str(refused.value) == said


def test_a_quality_beyond_the_curve_is_refused_with_what_can_be_reached(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    artifact = Artifact.load(tmp_path / "router.safetensors")
    artifact.settings["routing"]["large_only"]["value"] = 0.9
    with pytest.raises(TurnoutError, match=r"quality: 0.95 cannot be reached; reachable: at most 0.889"):
        RouterCurve.of(artifact).share_at_quality(0.95, "quality")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"large_share": 0.3, "cost": 0.5},
            "give one of large_share, cost, quality, threshold, miss_weight, not large_share and cost",
        ),
        ({"large_share": 0.3, "miss_weight": 5.0}, "not large_share and miss_weight"),
        ({"miss_weight": -1.0}, "greater than or equal to 0"),
        ({"large_share": 1.2}, "less than or equal to 1"),
        ({"small": {"method": "nobody"}}, "routing.policy.params.small.method.name: 'nobody' is not known"),
        ({"large": {"method": {"name": "plain", "model": 3}}}, "routing.policy.params.large.method"),
    ],
)
def test_wrong_parameters_are_refused_with_their_field(params: dict, said: str):
    with pytest.raises(TurnoutError) as refused:
        policy("learned", **params)
    assert said in str(refused.value)


async def test_sides_can_be_any_method_or_policy(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models = models_of(tmp_path)
    router = policy(
        "learned",
        large_share=0.5,
        small={"policy": {"name": "adaptive_best_of", "average": 2}},
        large={"method": {"name": "speculative", "length": "fixed", "draft_length": 4}},
    )
    router.check(models)
    low, high = [await router.decide(asked(last), models) for last in (1, 8)]
    assert (high.method, high.params) == ("speculative", {"length": "fixed", "draft_length": 4})
    assert (low.method, low.policy) == ("best_of", "learned/adaptive_best_of")
    assert {"gain", "p_small", "samples"} <= set(low.scores)


async def test_a_replaced_artifact_holds_from_the_next_request_on_and_is_named(tmp_path: Path):
    save_router(tmp_path, CHANCES)
    models, router = models_of(tmp_path), policy("learned", threshold=0.5)
    before = await router.decide(asked(9), models)
    save_router(tmp_path, CHANCES[::-1])
    after = await router.decide(asked(9), models)
    assert (before.params, after.params) == ({"model": "large"}, {"model": "small"})
    versions = [each.version.split("+") for each in (before, after)]
    assert versions[0][0] != versions[1][0] == Artifact.load(tmp_path / "router.safetensors").version
    assert versions[0][1] == versions[1][1]


@pytest.mark.parametrize("name", ["learned", "adaptive_best_of"])
@pytest.mark.parametrize("fault", ["below the target", "without settings", "gone"])
async def test_a_replacement_that_cannot_serve_changes_nothing(tmp_path: Path, caplog, name: str, fault: str):
    save_router(tmp_path, CHANCES)
    path = tmp_path / "router.safetensors"
    models, router = models_of(tmp_path), policy(name, **({"quality": 0.97} if name == "learned" else {}))
    router.check(models)
    before = await router.decide(asked(9), models)
    artifact = Artifact.load(path)
    if fault == "below the target":
        artifact.settings["routing"]["curve"] = artifact.settings["routing"]["curve"][:8]
    else:
        del artifact.settings["quantiles"]
    artifact.save(path)
    if fault == "gone":
        path.unlink()
    usable = name == "adaptive_best_of" and fault == "below the target"  # it has no target
    for _ in range(3):
        after = await router.decide(asked(9), models)
        assert (after.version.split("+")[0] == artifact.version, after == before) == (usable, not usable)
    told = [record.message for record in caplog.records if "going on with version" in record.message]
    assert len(told) == (0 if usable else 1)
    fresh = policy(name, **({"quality": 0.97} if name == "learned" else {}))
    if usable:
        fresh.check(models)
    else:
        with pytest.raises(TurnoutError, match=r"^routing\.policy\.params\.(artifact|quality): "):
            fresh.check(models)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("learned", {"large_share": 0.3}, {"large_share": 0.4}),
        ("adaptive_best_of", {"average": 2}, {"average": 3}),
        ("strategies", {}, {"suffixes": {"hard": ""}}),
    ],
)
async def test_other_settings_of_one_artifact_have_another_version(tmp_path: Path, name: str, one: dict, other: dict):
    """Whoever compares answers by version must not take two targets for one."""
    save_router(tmp_path, CHANCES)
    save_strategies(tmp_path, ["easy"] * 10)
    models = models_of(tmp_path)
    made = [(await policy(name, **params).decide(asked(1), models)).version for params in (one, other, one)]
    assert made[0] == made[2] != made[1]
    assert made[0].split("+")[0] == made[1].split("+")[0]


async def test_drift_is_named_where_there_is_some_and_only_there(tmp_path: Path, caplog):
    save_router(tmp_path, CHANCES)
    models, router = models_of(tmp_path), policy("learned")
    rng = np.random.default_rng(0)
    for _ in range(2 * WINDOW):
        request = asked(int(rng.integers(0, 10)))
        await router.decide(request, models)
        assert request.request.notes == []
    [calm] = request.drift
    assert (calm.calibration, calm.answers, calm.limit) == ("router", WINDOW, LIMIT)
    assert calm.index < LIMIT
    for _ in range(WINDOW):
        request = asked(9)
        await router.decide(request, models)
    assert [reading.index > LIMIT for reading in request.drift] == [True]
    assert "predicted gains have left what router router" in request.request.notes[0]
    assert [record.message.count("have left") for record in caplog.records] == [1]
    for _ in range(2 * WINDOW):
        await router.decide(request := asked(int(rng.integers(0, 10))), models)
    assert request.request.notes == []
    assert "come back" in caplog.records[-1].message


def test_false_alarms_of_drift_are_rare():
    """Held-out gains (200) and live ones from one law: how many streams ever seem to have drifted."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(100):
        gains = np.quantile(rng.normal(0.2, 0.1, 200), np.linspace(0, 1, 101)).tolist()
        watch = GainDrift(gains, "router", "v")
        readings = [watch.add(float(gain)) for gain in rng.normal(0.2, 0.1, WINDOW + 100)]
        assert readings[: WINDOW - 1] == [None] * (WINDOW - 1)
        alarms += any(each is not None and each.index > each.limit for each in readings)
    assert alarms <= 2


async def test_forced_strategies_set_exactly_what_they_say(tmp_path: Path):
    names = ["easy", "normal", "hard"]
    save_strategies(tmp_path, [names[token % 3] for token in range(10)])
    models, router = models_of(tmp_path), policy("strategies")
    router.check(models)
    wanted = {"easy": (0.5, 0.4), "normal": (0.8, 1.0), "hard": (0.4, 0.5)}
    for token in range(10):
        name = names[token % 3]
        decision = await router.decide(asked(token, temperature=1.3), models)
        assert (decision.method, decision.params) == ("plain", {"model": "small"})
        assert decision.sampling == dict(zip(("temperature", "max_tokens_share"), wanted[name], strict=True))
        assert decision.suffix == STRATEGIES[name].suffix
        assert max(decision.scores, key=decision.scores.__getitem__) == name
        assert decision.reason.startswith(f"the question looks {name}")


async def test_a_strategys_words_can_be_replaced(tmp_path: Path):
    save_strategies(tmp_path, ["hard"] * 10)
    router = policy("strategies", suffixes={"hard": ""}, method={"name": "plain", "model": "large"})
    decision = await router.decide(asked(1), models_of(tmp_path))
    assert (decision.suffix, decision.params) == ("", {"model": "large"})
    with pytest.raises(TurnoutError, match=r"routing.policy.params.suffixes"):
        policy("strategies", suffixes={"absurd": "x"})


async def test_samples_follow_the_bins_of_the_artifact(tmp_path: Path):
    chances = [[token / 10, 0.9] for token in range(10)]
    save_router(tmp_path, chances)
    artifact = Artifact.load(tmp_path / "router.safetensors")
    held_out = [place / 100 * 0.9 for place in range(101)]
    artifact.settings["quantiles"]["p_small"] = held_out
    artifact.save(tmp_path / "router.safetensors")
    models, router = models_of(tmp_path), policy("adaptive_best_of", average=3, most=6)
    router.check(models)
    bins = Bins.solve(held_out, 3, 6, 10, least=1)
    counts = []
    for token in range(10):
        decision = await router.decide(asked(token), models)
        counts.append(decision.params["k"])
        assert decision.params == {"model": "small", "k": bins.of(decision.scores["p_small"]), "rerank": "majority"}
        assert decision.sampling == ({"greedy_temperature": 0.8} if counts[-1] > 1 else {})
    assert counts[9] < max(counts) <= 6
    assert min(counts) == 1


async def test_a_greedy_request_is_warmed_where_it_gets_several_samples(tmp_path: Path):
    save_router(tmp_path, [[0.3, 0.9]] * 10)
    models, router = models_of(tmp_path), policy("adaptive_best_of", average=4)
    decision = await router.decide(asked(1, temperature=0.0), models)
    assert (decision.params["k"], decision.sampling) == (4, {"greedy_temperature": 0.8})


async def test_samples_can_be_told_apart_by_a_reward_model_that_is_named(tmp_path: Path):
    save_router(tmp_path, [[0.3, 0.9]] * 10)
    models, router = models_of(tmp_path), policy("adaptive_best_of", average=4, rerank="reward", reward_model="judge")
    decision = await router.decide(asked(1), models)
    assert decision.params == {"model": "small", "k": 4, "rerank": "reward", "artifact": "judge"}
    [(field, most)] = router.methods("routing.policy.params")
    assert (field, most.name) == ("routing.policy.params.reward_model", "best_of")
    assert most.params == {**decision.params, "k": 8}


async def test_a_window_of_requests_keeps_its_budget(tmp_path: Path):
    save_router(tmp_path, [[token / 10, 0.9] for token in range(10)])
    models, router = models_of(tmp_path), policy("adaptive_best_of", average=2, by="window", window=10)
    rng = np.random.default_rng(0)
    given = [(await router.decide(asked(int(last)), models)).params["k"] for last in rng.integers(0, 10, 100)]
    assert max(sum(given[start : start + 10]) for start in range(91)) <= 20
    assert len(set(given)) > 2


async def test_a_session_leaves_its_arm_inside_a_learned_policy_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decided_file, "LOOK_S", 0.0)
    save_router(tmp_path, CHANCES)
    path = tmp_path / "decided.json"
    arms = {"a": {"share": 0.5, "method": "plain"}, "b": {"share": 0.5, "method": "entropy_adaptive"}}
    inner = {"policy": {"name": "split", "arms": arms, "decided": str(path)}}
    models, learned = models_of(tmp_path), policy("learned", threshold=NEVER, small=inner)
    router = Router(learned, StickyConfig())

    async def made(session: str) -> Decision:
        request = replace(asked(5), session=session)
        return await router.decide(request, models, check=lambda decision: None)

    before = [await made(f"s{number}") for number in range(20)]
    assert {each.policy for each in before} == {"learned/split"}
    assert {each.arm for each in before} == {"a", "b"}
    write_decided(path, {"arm": "b"})
    assert {(await made(f"s{number}")).arm for number in range(20)} == {"b"}


@pytest.mark.parametrize(("by", "kept"), [("window", False), ("bins", True)])
async def test_a_session_does_not_keep_samples_that_a_window_counts(tmp_path: Path, by: str, kept: bool) -> None:
    """Turns that kept many samples would go beyond the budget uncounted."""
    save_router(tmp_path, [[token / 10, 0.9] for token in range(10)])
    models = models_of(tmp_path)
    router = Router(policy("adaptive_best_of", average=2, by=by, window=10), StickyConfig())
    turns = [
        await router.decide(replace(asked(5), session="s"), models, check=lambda decision: None) for _ in range(30)
    ]
    assert all(bool(each.kept_from) is kept for each in turns[1:])
    if by == "window":
        given = [each.params["k"] for each in turns]
        assert max(sum(given[start : start + 10]) for start in range(21)) <= 20
