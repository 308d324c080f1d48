"""The prefix stores of a pool's models: opened at load, summed up, and who shares with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.fingerprint import content_digests, tokenizer_digest
from engine.text import TextTokenizer
from turnout.calls import CacheStats
from turnout.config import PoolConfig, TurnoutConfig, model_path
from turnout.types import Sharing

if TYPE_CHECKING:
    from engine.cache.shared import SharedPrefixes
    from engine.model import EngineModel
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


def cache_stats(bridge: SharedPrefixes) -> CacheStats:
    """What one model's store did."""
    store = bridge.store.stats()
    return CacheStats(
        health=store.health,
        lookups=store.lookups,
        tokens=dict(bridge.tokens),
        faults={**store.faults, **({"internal": bridge.faults} if bridge.faults else {})},
        dropped=dict(store.dropped),
        writes=store.writes,
        bytes_read=store.bytes_read,
        bytes_written=store.bytes_written,
        memory_bytes=store.memory_bytes,
        regret_s=store.regret_s,
    )


def summed(stats: Collection[CacheStats]) -> CacheStats | None:
    """What several models' stores did, together; None where there are none."""
    if not stats:
        return None
    tokens, faults, dropped = Counter[str](), Counter[str](), Counter[str]()
    for each in stats:
        tokens.update(each.tokens)
        faults.update(each.faults)
        dropped.update(each.dropped)
    return CacheStats(
        health=max((each.health for each in stats), key=HEALTH.index),
        lookups=sum(each.lookups for each in stats),
        tokens=dict(tokens),
        faults=dict(faults),
        dropped=dict(dropped),
        writes=sum(each.writes for each in stats),
        bytes_read=sum(each.bytes_read for each in stats),
        bytes_written=sum(each.bytes_written for each in stats),
        memory_bytes=max(each.memory_bytes for each in stats),
        regret_s=sum(each.regret_s for each in stats),
    )


def open_tenancy(config: TurnoutConfig, tokenizer: TextTokenizer, folder: Path) -> SharedStore | None:
    """What a process without models knows of the configured store: who shares with whom. None where there is none.

    Args:
        config: its `kvstore` holds the address.
        tokenizer: of the models that others run.
        folder: where it lies.

    Raises:
        TurnoutError: as `open_stores`.
    """
    if not config.kvstore.has_address:
        return None
    from kvstore.build import build_stores

    return build_stores(config.kvstore, {}, tokenizer=tokenizer_digest(folder), encode=tokenizer.encode)


def share_of(config: TurnoutConfig, stores: SharedStore | None) -> Share:
    """Who shares with whom: as configured and registered; without a store, groups still share the models' blocks."""
    if stores is not None:
        return stores.sharing
    if not config.kvstore.tenants:
        return private
    from kvstore.tenants.tenancy import Tenancy

    return Tenancy(config.kvstore.tenants, None).sharing
