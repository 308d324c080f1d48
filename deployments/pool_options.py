"""Options of a pool's and the ingress's Serve deployment: sizes, placement, number, choice, update and drain."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.access.tarpit import MOST_HELD
from deployments.bodies import MOST_SLOW
from turnout.config import PoolConfig, TurnoutConfig
from turnout.sources import sources_digest

# Requests wait inside the replica, which knows their tenants. Calls that ask for no place in a pool (its models, its
# state) get through while all that do are running.
CONTROL_CALLS = 16
REPORT_S = 1.0  # how often replicas say what they are busy with, and what they hold
LOOK_BACK_S = 10.5  # Serve's own mean of waiting calls; it wants more than its default interval of 10 s
HEALTH_PERIOD_S = 5.0
HALF_LIFE_S = 3600.0  # see `deployments.autoscaling.PoolPolicy`


def pool_options(name: str, config: TurnoutConfig, late: int = 0) -> dict[str, Any]:
    """Options of `serve.deployment` for a pool.

    A call that finds no replica (none is wanted, or the last one is being replaced) waits for one, until its
    deadline. A replica that is to stop is given `server.shutdown_grace_s`; what still runs then continues in another
    one. When its configuration changes, old replicas go before new ones come, one in five at a time: nodes with spare
    GPUs are rare.

    Args:
        name: the pool's.
        config: holds it.
        late: replicas of the version before that may fail to start; see `deployments.serve_status.unsettled_pools`.
    """
    pool = config.pools[name]
    bundles = replica_bundles(config, pool)
    options: dict[str, Any] = {
        "name": f"pool-{name}",
        "max_ongoing_requests": num_in_replica(pool),
        "max_queued_requests": pool.max_queued_requests,
        # A pool that does not load now will not load in a minute; but Serve counts late failures as the new version's.
        "max_constructor_retry_count": 1 + late,
        "ray_actor_options": {"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0].get("GPU", 0)},
        "graceful_shutdown_timeout_s": config.server.shutdown_grace_s,
        "health_check_period_s": HEALTH_PERIOD_S,
    }
    if pool.choice == "prefix":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="deployments.replica_choice:PrefixRouter",
            request_router_kwargs={
                "sticky": pool.routing is not None and pool.routing.sticky is not None,
                "grace_s": config.server.shutdown_grace_s,
                "room": pool.max_ongoing_requests + pool.max_queued_requests,
                "places": pool.max_ongoing_requests,
            },
            request_routing_stats_period_s=REPORT_S,
        )
    if pool.placement.models == "actors":
        from actors import placement

        options |= {"placement_group_bundles": bundles, "placement_group_strategy": placement.strategy(pool)}
    if pool.autoscaling is None:
        return options | {"num_replicas": pool.replicas}
    return options | {"autoscaling_config": _autoscaling(pool)}


def ingress_options(config: TurnoutConfig) -> dict[str, Any]:
    """Options of `serve.deployment` for the ingress.

    Its successor comes before it goes, and it goes when the last answer it passes on has ended.
    """
    admitted = sum(_num_admitted(pool) for pool in config.pools.values())
    return {
        "name": "ingress",
        # Never the bottleneck: pools refuse, and their refusal names the pool.
        "max_ongoing_requests": admitted + MOST_HELD + MOST_SLOW + 64,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": config.server.request_timeout_s,
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_surge_percent": 100,
        "num_replicas": max(config.server.ingress_processes, 1),
    }


def replica_bundles(config: TurnoutConfig, pool: PoolConfig) -> list[dict[str, float]]:
    """What one replica asks of nodes: its own process first, then one bundle for each of its actors."""
    if pool.placement.models == "actors":
        from actors import placement

        return placement.bundles(pool, config)
    devices = {config.models[name].device for name in pool.members if name in config.local_models} - {"cpu"}
    return [{"CPU": 1.0, **({"GPU": float(len(devices))} if devices else {})}]


def all_bundles(config: TurnoutConfig) -> dict[str, list[dict[str, float]]]:
    """What one replica asks of nodes, of each pool that runs in replicas."""
    return {name: replica_bundles(config, pool) for name, pool in config.replica_pools.items()}


def num_replicas(pool: PoolConfig) -> int:
    """How many a pool begins with."""
    if pool.autoscaling is None:
        return pool.replicas
    return min(max(pool.replicas, pool.autoscaling.min_replicas), pool.autoscaling.max_replicas)


def most_replicas(pool: PoolConfig) -> int:
    """How many a pool may have."""
    return pool.replicas if pool.autoscaling is None else pool.autoscaling.max_replicas


def num_in_replica(pool: PoolConfig) -> int:
    """Calls that are in one replica at most."""
    # Those of batches take no places of others, and as many of their own.
    return 2 * (pool.max_ongoing_requests + pool.max_queued_requests) + CONTROL_CALLS


def _num_admitted(pool: PoolConfig) -> int:
    return most_replicas(pool) * num_in_replica(pool) + pool.max_queued_requests


def _autoscaling(pool: PoolConfig) -> AutoscalingConfig:
    wanted = pool.autoscaling
    assert wanted is not None
    policy = AutoscalingPolicy(
        policy_function="deployments.autoscaling:PoolPolicy",
        policy_kwargs={
            "requests": wanted.target_requests,
            "waiting_s": wanted.target_waiting_s,
            "kv": wanted.target_kv,
            "half_life_s": max(HALF_LIFE_S, 30 * wanted.downscale_delay_s),
        },
    )
    with warnings.catch_warnings():
        # The environment variables that are to come instead are read by nothing yet.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=wanted.min_replicas,
            initial_replicas=num_replicas(pool),
            max_replicas=wanted.max_replicas,
            target_ongoing_requests=wanted.target_requests,
            metrics_interval_s=REPORT_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=wanted.upscale_delay_s,
            downscale_delay_s=wanted.downscale_delay_s,
            downscale_to_zero_delay_s=wanted.idle_s,
            policy=policy,
        )


def pool_version(name: str, config: TurnoutConfig, load: Callable[..., Any]) -> str:
    """Names what a replica of a pool runs: replicas of an equal version are kept when the configuration changes."""
    pool = config.pools[name]
    logged = pool.routing is not None and pool.routing.log is not None
    values = {
        "pool": pool.model_dump(mode="json", exclude={"replicas", "autoscaling"}),
        # The name of the route log depends on it.
        "alone": logged and pool.replicas == 1 and pool.autoscaling is None,
        "models": {member: config.models[member].model_dump(mode="json") for member in pool.members},
        "engine": config.engine.model_dump(mode="json"),
        "kvstore": config.kvstore.model_dump(mode="json"),
        "telemetry": config.telemetry.model_dump(mode="json", include={"traces", "audit"}),
        "load": _named(load),
    }
    return _digest(json.dumps(values, sort_keys=True), sources_digest())


def ingress_version(config: TurnoutConfig, load: Callable[..., Any]) -> str:
    """Names what the ingress runs."""
    return _digest(config.model_dump_json(), _named(load), sources_digest())


def _named(load: Callable[..., Any]) -> str:
    return f"{load.__module__}.{load.__qualname__}"


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
