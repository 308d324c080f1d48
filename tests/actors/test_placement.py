"""Bundles of a replica's placement group: who lies in which, and what is said where none can be had."""

from __future__ import annotations

from typing import Any

import pytest

from actors.placement import bundles, check_hosts, device_settings, not_free, slots
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig, parse_config
from turnout.errors import Code, TurnoutError


def config_of(placement: dict[str, Any], large_is: str = "large", **models: dict[str, Any]) -> TurnoutConfig:
    return parse_config(
        {
            "models": {name: {"path": name, **models.get(name, {})} for name in ("small", "large")},
            "pools": {"p": {"small": "small", "large": large_is, "placement": {"models": "actors", **placement}}},
        }
    )


def shown(config: TurnoutConfig) -> list[tuple[int, str, str, int, int]]:
    pool: PoolConfig = config.pools["p"]
    return [(slot.bundle, slot.model, slot.role, slot.copy, slot.rank) for slot in slots(pool, config)]


def test_the_replica_comes_first_then_small_large_and_prefill_ranks():
    config = config_of(
        {"prefill": 2, "cpus": 2, "resources": {"large": {"target": 1}, "prefill": {"prompts": 0.5}}},
        small={"device": "cuda:1"},
        large={"device": "cuda", "tensor_parallel": 2},
    )
    assert shown(config) == [
        (1, "small", "small", 0, 0),
        (2, "large", "large", 0, 0),
        (3, "large", "large", 0, 1),
        (4, "large", "prefill", 1, 0),
        (5, "large", "prefill", 1, 1),
        (6, "large", "prefill", 2, 0),
        (7, "large", "prefill", 2, 1),
    ]
    target, prompts = {"CPU": 2, "GPU": 1, "target": 1}, {"CPU": 2, "GPU": 1, "prompts": 0.5}
    assert bundles(config.pools["p"], config) == [
        {"CPU": 1},
        {"CPU": 2, "GPU": 1},
        *[target] * 2,
        *[prompts] * 4,
    ]


def test_a_model_in_both_roles_runs_once_where_both_may():
    config = config_of({"resources": {"small": {"draft": 1}, "large": {"draft": 2, "target": 1}}}, large_is="small")
    assert shown(config) == [(1, "small", "large", 0, 0)]
    assert bundles(config.pools["p"], config)[1:] == [{"CPU": 1, "draft": 2, "target": 1}]


def test_models_in_the_replica_need_no_bundles_of_their_own():
    config = config_of({"models": "colocated"})
    assert bundles(config.pools["p"], config) == [{"CPU": 1}]


def test_an_actor_sees_one_gpu_which_is_the_first():
    assert device_settings(ModelConfig(path="-", device="cuda:3")).device == "cuda"
    assert device_settings(ModelConfig(path="-")).device == "cpu"


def test_a_bundle_no_node_can_host_is_refused_with_what_nodes_offer():
    wanted = [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0, "target": 1.0}]
    nodes = [
        {"CPU": 4.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0, "object_store_memory": 1e8},
        {"CPU": 8.0, "target": 1.0, "bundle_group_0_ab": 1000.0},
    ]
    with pytest.raises(TurnoutError) as caught:
        check_hosts("p", wanted, nodes)
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.field == "pools.p.placement"
    for part in ("{CPU: 1, GPU: 1, target: 1}", "{CPU: 4, GPU: 2}", "{CPU: 8, target: 1}", "add such a node"):
        assert part in caught.value.message
    check_hosts("p", wanted, [*nodes, {"CPU": 1.0, "GPU": 1.0, "target": 1.0}])


@pytest.mark.parametrize(
    ("bundle", "short", "change"),
    [
        ({"CPU": 1.0, "GPU": 1.0}, "GPU is short (1 asked, 0 there)", "change models.*.device"),
        ({"CPU": 1.0, "draft": 2.0}, "draft is short (2 asked, 1 there)", "change pools.p.placement.resources"),
        ({"CPU": 9.0}, "CPU is short (9 asked, 8 there)", "change pools.p.placement"),
        ({"CPU": 8.0, "draft": 1.0}, "no node has all of it at once", "change pools.p.placement"),
    ],
)
def test_what_is_short_is_named_with_what_to_change(bundle: dict[str, float], short: str, change: str):
    with pytest.raises(TurnoutError) as caught:
        check_hosts("p", [bundle], [{"CPU": 4.0, "draft": 1.0}, {"CPU": 8.0}])
    assert short in caught.value.message
    assert caught.value.message.endswith(change)


def test_bundles_that_are_taken_are_told_from_those_that_nobody_has():
    error = not_free("p", [{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 2.0}], 5.0)
    assert "5 s" in error.message
    assert "{CPU: 1} and {CPU: 2}" in error.message
    assert "ray status" in error.message


def test_a_third_role_has_an_actor_and_resources_of_its_own():
    placement = {"models": "actors", "prefill": 1, "resources": {"judge": {"critic": 1}}}
    config = parse_config(
        {
            "models": {name: {"path": name} for name in ("a", "b", "c")},
            "pools": {"p": {"small": "a", "large": "b", "models": {"judge": "c"}, "placement": placement}},
        }
    )
    assert shown(config) == [
        (1, "a", "small", 0, 0),
        (2, "b", "large", 0, 0),
        (3, "c", "judge", 0, 0),
        (4, "b", "prefill", 1, 0),
    ]
    assert bundles(config.pools["p"], config)[3] == {"CPU": 1, "critic": 1}
