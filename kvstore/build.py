"""Assembly of the stores of a process: one set of connections, one memory, one writer; a store for each model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.base import ByteStore, StoreFault
from kvstore.encodings import Encodings
from kvstore.keys import Keyring
from kvstore.lookup.admission import Doorkeeper
from kvstore.lookup.controller import Controller
from kvstore.lookup.fetcher import Fetcher
from kvstore.lookup.locks import ComputeLocks
from kvstore.lookup.memory import HostMemory
from kvstore.lookup.reader import ReadContext
from kvstore.lookup.writer import RemoteTier, Writer
from kvstore.maintenance import Maintenance, MaintenanceContext
from kvstore.opening import open_keyring, open_store
from kvstore.store import PrefixStore
from kvstore.tenants.encrypted_document import Sealer
from kvstore.tenants.quotas import Quotas
from kvstore.tenants.registry import Registry
from kvstore.tenants.tenancy import Tenancy
from kvstore.tenants.usage import Accounts
from kvstore.types import Counts, Health, ModelLayout
from turnout.errors import not_found
from turnout.types import Sharing, SharingPolicy

if TYPE_CHECKING:
    from turnout.kvstore_config import KVStoreConfig

log = logging.getLogger(__name__)

DECODERS = 2


class SharedStore:
    """All of a process's stores. Made by `build_stores`.

    Args:
        stores: by model.
        tenancy: whose tokens are whose.
        writer: of all stores.
        maintenance: of all stores; None: there is no Redis.
        store: Redis; None: there is none.
        owns_store: whether it is closed with this.
        pools: threads that the stores use.
    """

    def __init__(
        self,
        stores: Mapping[str, PrefixStore],
        tenancy: Tenancy,
        writer: Writer,
        maintenance: Maintenance | None,
        store: ByteStore | None,
        owns_store: bool,
        pools: Sequence[Executor],
    ) -> None:
        self._stores = stores
        self._tenancy = tenancy
        self._writer = writer
        self.maintenance = maintenance
        self._store = store
        self._owns_store = owns_store
        self._pools = pools
        self._closed = False

    @property
    def models(self) -> list[str]:
        """Names of the models."""
        return list(self._stores)

    def of(self, model: str) -> PrefixStore:
        """Return a model's store.

        Raises:
            TurnoutError: NOT_FOUND: the process has no such model.
        """
        if model not in self._stores:
            raise not_found("model", model, self.models)
        return self._stores[model]

    def sharing(self, tenant: str, prompt: Sequence[int], policy: SharingPolicy | None = None) -> Sharing:
        """Return the namespaces of a tenant's prompt; see `Tenancy.sharing`."""
        return self._tenancy.sharing(tenant, prompt, policy)

    def health(self) -> Health:
        """Return the health of Redis: ok, degraded or off."""
        return "off" if self._store is None else self._store.health()

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was offered is stored or dropped; False when that takes longer. Blocks."""
        return self._writer.settle(timeout_s)

    def refresh(self) -> None:
        """Read what is registered now rather than within seconds. Blocks; a Redis that is away changes nothing."""
        if self.maintenance is not None:
            try:
                self.maintenance.refresh()
            except StoreFault as fault:
                log.warning("prefix store: what is registered could not be read: %s", fault)

    def close(self) -> None:
        """Write what is queued, for a short time, and let go of everything. Blocks; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        if self.maintenance is not None:
            self.maintenance.stop()
        if self._store is not None and self._owns_store:
            self._store.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def build_stores(
    config: KVStoreConfig,
    models: Mapping[str, ModelLayout],
    *,
    tokenizer: str = "",
    encode: Callable[[str], list[int]] | None = None,
    store: ByteStore | None = None,
    keyring: Keyring | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SharedStore:
    """Build the stores of a process.

    Args:
        config: what is wanted; a URL that is no address ("off", "embedded") means host memory only.
        models: by name, as the engine has them.
        tokenizer: digest of their tokenizer, for registered prefixes; "": the fingerprint part of that name.
        encode: text -> token ids, for prefixes registered as text only.
        store: to use instead of what the URL says; it stays open.
        keyring: to use instead of the root key in the configured file.
        clock: monotonic, seconds.

    Raises:
        TurnoutError: what will not mend itself: a setting, a codec, a right, a version, another root key. A Redis that
            is away is a warning in the log.
    """
    if not tokenizer:
        tokenizer = next((str(each.fingerprint_parts.get("tokenizer", "")) for each in models.values()), "")
    if keyring is None:
        keyring = open_keyring(config)
    owns_store = store is None
    if store is None and config.has_address:
        store = open_store(config)
    try:
        return _assemble(config, models, tokenizer, encode, store, owns_store, keyring, clock)
    except BaseException:
        if store is not None and owns_store:
            store.close()
        raise


@dataclass(frozen=True, slots=True)
class _Parts:
    """Objects that the stores of a process share."""

    config: KVStoreConfig
    keyring: Keyring
    memory: HostMemory
    remote: RemoteTier | None
    writer: Writer
    readers: Executor
    decoders: Executor
    clock: Callable[[], float]


def _assemble(
    config: KVStoreConfig,
    models: Mapping[str, ModelLayout],
    tokenizer: str,
    encode: Callable[[str], list[int]] | None,
    store: ByteStore | None,
    owns_store: bool,
    keyring: Keyring,
    clock: Callable[[], float],
) -> SharedStore:
    memory, sealer = HostMemory(config.host_memory_bytes), Sealer(keyring)
    registry = None if store is None else Registry(store, sealer, tokenizer, encode)
    tenancy = Tenancy(config.tenants, config.quota_bytes, registry)
    remote = None if store is None else _remote(config, store, keyring, tenancy, clock)
    writer = Writer(memory, remote, config.write_queue, tenancy.may_write, clock)
    readers = ThreadPoolExecutor(config.connections, "kv-read")
    decoders = ThreadPoolExecutor(DECODERS, "kv-decode")
    parts = _Parts(config, keyring, memory, remote, writer, readers, decoders, clock)
    stores = {name: _store(name, layout, parts) for name, layout in models.items()}
    maintenance = None
    if remote is not None and registry is not None:
        accounts = Accounts(remote.store, keyring, sealer)
        context = MaintenanceContext(
            remote.store, keyring, sealer, registry, tenancy, remote.quotas, accounts, tokenizer
        )
        maintenance = Maintenance(context, list(stores.values()), clock)
        _begin(maintenance)
    return SharedStore(stores, tenancy, writer, maintenance, store, owns_store, (readers, decoders))


def _remote(
    config: KVStoreConfig, store: ByteStore, keyring: Keyring, tenancy: Tenancy, clock: Callable[[], float]
) -> RemoteTier:
    ttl_ms = int(1000 * config.ttl_s)
    quotas = Quotas(store, keyring, tenancy.limit, ttl_ms)
    locks = ComputeLocks(store, clock)
    return RemoteTier(store, quotas, locks, ttl_ms, config.fetch_timeout_s)


def _store(name: str, layout: ModelLayout, parts: _Parts) -> PrefixStore:
    config, remote, clock = parts.config, parts.remote, parts.clock
    encodings = Encodings(parts.keyring, layout, config.codecs, config.chunk_tokens)
    counts = Counts()
    controller = Controller(clock)
    doorkeeper = Doorkeeper(config.admission, config.admission_window_s, clock=clock)
    context = None
    if remote is not None:
        context = ReadContext(remote.store, encodings, controller, counts, parts.decoders, remote.ttl_ms, clock)
    fetcher = Fetcher(
        parts.memory,
        context,
        parts.readers,
        remote.locks if remote is not None else None,
        doorkeeper,
        config.fetch_timeout_s,
        config.residual_tokens,
        clock,
    )
    return PrefixStore(name, encodings, fetcher, parts.writer, doorkeeper, counts, controller, parts.memory, remote)


def _begin(maintenance: Maintenance) -> None:
    try:
        maintenance.introduce()
    except StoreFault as fault:
        log.warning("prefix store: Redis does not answer (%s); it is tried again", fault)
    maintenance.start()
