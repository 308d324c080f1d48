"""The prefix stores of a pool's models: opened at load, summed up, and who shares with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.fingerprint import Marks, content_digests, content_marks, tokenizer_digest
from pool.text import TextTokenizer
from turnout.calls import CacheStats, GenerateCall, ScoreCall
from turnout.config import PoolConfig, TurnoutConfig, model_path
from turnout.errors import Code, TurnoutError
from turnout.types import Sharing, SharingPolicy

if TYPE_CHECKING:
    from engine.model import EngineModel
    from kvstore.build import SharedStore

# (tenant, prompt, what the call says of the tenant) -> whose cache the prompt's tokens belong to.
Share = Callable[[str, list[int], SharingPolicy | None], Sharing]
HEALTH = ("ok", "degraded", "off")  # from well to ill


def shared(share: Share, call: GenerateCall | ScoreCall, prompt: list[int]) -> Sharing:
    """Whose cache the prompt of a call belongs to: within that, with a salt, the calls with the same one."""
    sharing = share(call.tenant, prompt, call.sharing)
    return replace(sharing, salt=call.cache_salt) if call.cache_salt else sharing


def unconfigured(tenant: str, prompt: list[int], policy: SharingPolicy | None) -> Sharing:
    """Without a store and settings: everything is the tenant's own, or its group's where the call says so."""
    return Sharing.private(tenant) if policy is None else Sharing(policy.home(tenant))


def mark_contents(config: TurnoutConfig, names: Iterable[str], folder: Path) -> dict[str, Marks]:
    """By which `open_stores` sees that the models' files are still those that were loaded. Call it before loading.

    Args:
        config: as of `open_stores`.
        names: of the models.
        folder: where their tokenizer lies.
    """
    if not config.kvstore.has_address:
        return {}
    return {name: content_marks(model_path(config.models[name]), folder) for name in names}


def open_stores(
    config: TurnoutConfig,
    models: Mapping[str, EngineModel],
    tokenizer: TextTokenizer,
    folder: Path,
    artifacts: Path | None,
    marks: Mapping[str, Marks],
) -> SharedStore | None:
    """Connect the models to the configured store; None where there is none.

    The embedded server belongs to the serving process: a pool loaded alone has no process to share with.

    Args:
        config: its `kvstore` holds the address.
        models: by their names in the configuration.
        tokenizer: shared by all of them.
        folder: where it lies.
        artifacts: folder of the pool's, where codecs find what they know of the models; None: there are none.
        marks: of `mark_contents`, from before the models were loaded.

    Raises:
        TurnoutError: the store is configured wrongly, or a model's files were changed since. A store that cannot be
            reached is no error.
    """
    if not config.kvstore.has_address:
        return None
    from kvstore.build import build_stores
    from kvstore.profiles import read_profiles

    digests = {name: _digests(name, model_path(config.models[name]), folder, marks[name]) for name in models}
    stores = build_stores(
        config.kvstore,
        {
            name: model.layout({**digests[name], "loaded": model.digest}, read_profiles(artifacts, model.digest))
            for name, model in models.items()
        },
        tokenizer=next(iter(digests.values()))["tokenizer"],
        encode=tokenizer.encode,
    )
    for name, model in models.items():
        model.share(stores.of(name))
    return stores


def _digests(name: str, path: Path, tokenizer: Path, marks: Marks) -> dict[str, str]:
    """Digests of a model's files, which are those that it was loaded from.

    Raises:
        TurnoutError: UNAVAILABLE: they are others by now; keys under their name would stand for other weights.
    """
    digests = content_digests(path, tokenizer)
    if content_marks(path, tokenizer) != marks:
        message = (
            f"models.{name}.path: files in {path} or of its tokenizer were changed while they were loaded;"
            " start again when all of them are in place"
        )
        raise TurnoutError(Code.UNAVAILABLE, message, f"models.{name}.path")
    return digests


def reuse_spans(pool: PoolConfig, models: Iterable[EngineModel]) -> None:
    """Let the models take over spans of other prompts, where the pool says so.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a model's KV cannot be moved.
    """
    if pool.reuse is not None:
        from engine.reuse.settings import ReuseSettings

        for model in models:
            model.reuse(ReuseSettings(**pool.reuse.model_dump()))


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
        servers=tuple(dict.fromkeys(server for each in stats for server in each.servers)),
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
    """Who shares with whom: as calls say, are configured and registered; without a store, groups still share blocks."""
    if stores is not None:
        return stores.sharing
    if not config.kvstore.tenants:
        return unconfigured
    from kvstore.tenants.tenancy import Tenancy

    return Tenancy(config.kvstore.tenants, None).sharing
