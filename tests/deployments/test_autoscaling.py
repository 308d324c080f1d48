"""How many replicas the policy wants."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from deployments.autoscaling import METRICS, PoolPolicy
from deployments.pool_options import pool_options
from deployments.replica_load import ReplicaLoad, kv_share
from tests.deployments.served_pool import call
from turnout.calls import MemberStats, PoolStats
from turnout.config import TurnoutConfig, parse_config


@dataclass
class Context:
    """What Serve shows a policy; each replica's metrics are series, of which the last value counts."""

    replicas: list[dict[str, float]]
    total_queued_requests: float = 0.0
    policy_state: dict[str, Any] = field(default_factory=dict)

    @property
    def current_num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def raw_metrics(self) -> dict[str, dict[int, list[Any]]]:
        return {
            name: {
                place: [SimpleNamespace(value=99.0), SimpleNamespace(value=said.get(name, 0.0))]
                for place, said in enumerate(self.replicas)
            }
            for name in METRICS
        }


POLICY = PoolPolicy(requests=4, waiting_s=1.0, kv=0.5)


@pytest.mark.parametrize(
    ("replicas", "queued", "wanted"),
    [
        ([], 0.0, 0.0),
        ([], 1.0, 0.25),  # rounded up: one
        ([{}], 0.0, 0.0),
        ([{"requests": 12}], 0.0, 3.0),
        ([{"requests": 4}, {"requests": 4}], 4.0, 2.0),  # those that wait now may be among those that had waited
        ([{"requests": 4}, {"requests": 4}], 12.0, 3.0),
        ([{"requests": 1, "waiting_s": 2.5}], 0.0, 2.5),
        ([{"requests": 1, "kv": 0.9}], 0.0, 1.8),
        ([{"requests": 1, "kv": 0.2}, {"kv": 0.2}], 0.0, 0.8),
    ],
)
def test_the_scarcest_thing_decides(replicas: list[dict[str, float]], queued: float, wanted: float) -> None:
    assert POLICY(Context(replicas, queued))[0] == pytest.approx(wanted)


def test_fewer_only_where_they_can_write_as_much() -> None:
    busy = [{"requests": 0.5, "tokens_per_second": 100.0}] * 3
    wanted, state = POLICY(Context(busy))
    assert wanted == 3  # all three write as much as any ever did
    assert state["most"] == 100.0
    slower = [{"requests": 0.5, "tokens_per_second": 30.0}] * 3
    assert POLICY(Context(slower, policy_state=state))[0] == pytest.approx(1.0, abs=0.01)
    idle: list[dict[str, float]] = [{}] * 3
    assert POLICY(Context(idle, policy_state=state))[0] == 0


@pytest.mark.parametrize("pause_s", [0.1, 1.0])
def test_after_a_peak_a_steady_fifth_of_it_needs_fewer(pause_s: float) -> None:
    now, state = 0.0, dict[str, Any]()
    policy = PoolPolicy(requests=4, waiting_s=1.0, kv=0.5, clock=lambda: now)
    busy, steady = ([{"requests": 4.0, "tokens_per_second": rate}] * 10 for rate in (100.0, 20.0))
    assert policy(Context(busy))[0] == 10
    _, state = policy(Context(busy, policy_state=state))
    calm = [{**each, "requests": 0.5} for each in steady]
    while now < 600.0:  # ten times as long as Serve waits before it ends replicas
        wanted, state = policy(Context(calm, policy_state=state))
        assert wanted < 3
        now += pause_s
    now += 100 * 3600.0
    assert policy(Context(calm, policy_state=state))[0] == 10  # nobody remembers that they could write more


def test_a_cold_start_is_not_counted_twice() -> None:
    assert POLICY(Context([], 8.0))[0] == 2.0
    assert POLICY(Context([{"requests": 8.0}], 8.0))[0] == 2.0


def test_before_replicas_have_reported_calls_that_wait_count() -> None:
    context = SimpleNamespace(raw_metrics=None, total_queued_requests=8.0, policy_state={}, current_num_replicas=0)
    assert POLICY(context)[0] == 2.0


def test_the_policy_travels_by_value() -> None:
    copied = cloudpickle.loads(cloudpickle.dumps(PoolPolicy))
    assert copied(requests=4, waiting_s=1.0, kv=0.5)(Context([{"requests": 8}]))[0] == 2.0


def member(used: int, total: int) -> MemberStats:
    return MemberStats("m", 0, used, 0, total, 0, 0, 0.0)


def test_the_fullest_model_is_what_counts() -> None:
    stats = PoolStats(0, 0, 60, 0, 200, 0, 0.0, {}, members=(member(50, 100), member(10, 100)))
    assert kv_share(stats) == 0.5
    assert kv_share(PoolStats(0, 0, 60, 0, 200, 0, 0.0, {})) == 0.3
    assert kv_share(PoolStats(0, 0, 0, 0, 0, 0, 0.0, {})) == 0.0


def test_what_a_call_costs_is_the_busy_time_between_two_ends() -> None:
    now = 0.0
    load = ReplicaLoad(lambda: PoolStats(2, 0, 0, 0, 10, 0, 7.0, {}, waiting_s=0.5), 16, lambda: now)
    for _ in range(3):  # three at once take three seconds: one second each, and nothing for the idle time between
        for _ in range(3):
            load.begun()
        for _ in range(3):
            now += 1.0
            load.ended(call("a prompt"), answered=True)
        now += 100.0
    assert load.routing()["call_s"] == pytest.approx(1.0)
    load.begun()
    now += 50.0
    load.ended(call("a prompt"), answered=False)  # who gives up has not been a call's worth of work
    assert load.routing()["call_s"] == pytest.approx(1.0)
    assert load.autoscaling() == {"requests": 2.0, "waiting_s": 0.5, "kv": 0.0, "tokens_per_second": 7.0}
    assert set(load.autoscaling()) == set(METRICS)


def test_calls_that_end_at_once_cost_what_they_do_together() -> None:
    now = 0.0
    load = ReplicaLoad(lambda: PoolStats(2, 0, 0, 0, 10, 0, 7.0, {}), 16, lambda: now)

    def burst(calls: int, seconds: float) -> float:
        nonlocal now
        for _ in range(calls):
            load.begun()
        now += seconds
        for _ in range(calls):
            load.ended(call("a prompt"), answered=True)
        cost: float = load.routing()["call_s"]
        return cost

    assert [burst(20, 4.0) for _ in range(3)] == [pytest.approx(0.2)] * 3
    first, *_, last = [burst(1, 1.0) for _ in range(150)]
    assert first < 0.3
    assert last == pytest.approx(1.0, rel=0.05)  # what was long ago fades


def config_with(**pool: Any) -> TurnoutConfig:
    pair = {"small": "small", "large": "large"}
    models = {"small": {"path": "none"}, "large": {"path": "none"}}
    return parse_config({"models": models, "pools": {"p": {**pair, **pool}}})


def test_what_serve_is_told() -> None:
    options = pool_options(
        "p", config_with(replicas=9, autoscaling={"min_replicas": 0, "max_replicas": 3, "idle_s": 7})
    )
    assert "num_replicas" not in options
    told = options["autoscaling_config"]
    assert (told.min_replicas, told.initial_replicas, told.max_replicas) == (0, 3, 3)
    assert told.downscale_to_zero_delay_s == 7
    assert told.policy.policy_kwargs["half_life_s"] >= 30 * told.downscale_delay_s
    assert told.look_back_period_s > 10  # or Serve warns
    assert pool_options("p", config_with(replicas=2))["num_replicas"] == 2
    assert pickle.loads(pickle.dumps(told)).metrics_interval_s == 1.0


def test_actors_have_bundles_and_the_replica_lies_in_the_first() -> None:
    options = pool_options("p", config_with(placement={"models": "actors", "strategy": "SPREAD", "cpus": 2}))
    assert options["placement_group_bundles"] == [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}]
    assert options["placement_group_strategy"] == "SPREAD"
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0}
    assert "placement_group_bundles" not in pool_options("p", config_with())
