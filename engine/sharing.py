"""The prefix stores of a pool's models: opened at load, summed up, and who shares with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.fingerprint import content_digests
from engine.model import EngineModel
from engine.text import TextTokenizer
from turnout.calls import CacheStats
from turnout.config import PoolConfig, TurnoutConfig, model_path
from turnout.types import Sharing

if TYPE_CHECKING:
    from kvstore.build import SharedStore

# (tenant, prompt) -> whose cache the prompt's tokens belong to.
Share = Callable[[str, list[int]], Sharing]
HEALTH = ("ok", "degraded", "off")  # from well to ill


def private(tenant: str, prompt: list[int]) -> Sharing:
    """Without a store: everything is the tenant's own."""
    return Sharing.private(tenant)


def open_stores(
    config: TurnoutConfig,
    models: Mapping[str, EngineModel],
    tokenizer: TextTokenizer,
    folder: Path,
    artifacts: Path | None,
) -> SharedStore | None:
    """Connect the models to the configured store; None where there is none.

    The embedded server belongs to who serves: a pool loaded alone has nobody to share with.

    Args:
        config: its `kvstore` holds the address.
        models: by their names in the configuration.
        tokenizer: shared by all of them.
        folder: where it lies.
        artifacts: folder of the pool's, where codecs find what they know of the models; None: there are none.

    Raises:
        TurnoutError: the store is configured wrongly. One that cannot be reached is no error.
    """
    if not config.kvstore.has_address:
        return None
    from kvstore.build import build_stores
    from kvstore.profiles import read_profiles

    digests = {name: content_digests(model_path(config.models[name]), folder) for name in models}
    stores = build_stores(
        config.kvstore,
        {name: model.layout(digests[name], read_profiles(artifacts, model.digest)) for name, model in models.items()},
        tokenizer=next(iter(digests.values()))["tokenizer"],
        encode=tokenizer.encode,
    )
    for name, model in models.items():
        model.share(stores.of(name))
    return stores


def reuse_spans(pool: PoolConfig, models: Iterable[EngineModel]) -> None:
    """Let the models take over spans of other prompts, where the pool says so.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a model's KV cannot be moved.
    """
    if pool.reuse is not None:
        from engine.reuse.settings import ReuseSettings

        for model in models:
            model.reuse(ReuseSettings(**pool.reuse.model_dump()))


def cache_stats(models: Iterable[EngineModel]) -> CacheStats | None:
    """What the stores of these models did, summed; None where they have none."""
    bridges = [model.shared for model in models if model.shared is not None]
    if not bridges:
        return None
    stats = [bridge.store.stats() for bridge in bridges]
    tokens, faults, dropped = Counter[str](), Counter[str](), Counter[str]()
    for bridge, store in zip(bridges, stats, strict=True):
        tokens.update(bridge.tokens)
        faults.update(store.faults)
        faults.update({"internal": bridge.faults} if bridge.faults else {})
        dropped.update(store.dropped)
    return CacheStats(
        health=max((store.health for store in stats), key=HEALTH.index),
        lookups=sum(store.lookups for store in stats),
        tokens=dict(tokens),
        faults=dict(faults),
        dropped=dict(dropped),
        writes=sum(store.writes for store in stats),
        bytes_read=sum(store.bytes_read for store in stats),
        bytes_written=sum(store.bytes_written for store in stats),
        memory_bytes=max(store.memory_bytes for store in stats),
        regret_s=sum(store.regret_s for store in stats),
    )


def share_of(config: TurnoutConfig, stores: SharedStore | None) -> Share:
    """Who shares with whom: as configured and registered; without a store, groups still share the models' blocks."""
    if stores is not None:
        return stores.sharing
    if not config.kvstore.tenants:
        return private
    from kvstore.tenants.tenancy import Tenancy

    return Tenancy(config.kvstore.tenants, None).sharing
