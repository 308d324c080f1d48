"""Background maintenance of a store: check that Redis is there and ours, read the registered prefixes,
keep registered prefixes from expiring, and settle accounts and quotas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread

from kvstore.base import ByteStore, StoreFault
from kvstore.encodings import Encodings
from kvstore.keys import Keyring, Link
from kvstore.store import PrefixStore
from kvstore.tenants.encrypted_document import Sealer
from kvstore.tenants.manifest import check_root_key, enrol
from kvstore.tenants.quotas import Quotas
from kvstore.tenants.registry import Prefix, Registry
from kvstore.tenants.tenancy import Tenancy
from kvstore.tenants.usage import Accounts
from turnout.errors import TurnoutError
from turnout.types import Namespace

log = logging.getLogger(__name__)

TICK_S = 0.5
TIMEOUT_S = 1.0
REFRESH_S = 2.0
ACCOUNTS_S = 5.0
KEEP_S = 30.0
SWEEP_S = 30.0
VERDICTS = 3


@dataclass(frozen=True, slots=True)
class MaintenanceContext:
    """Dependencies of maintenance."""

    store: ByteStore
    keyring: Keyring
    sealer: Sealer
    registry: Registry
    tenancy: Tenancy
    quotas: Quotas
    accounts: Accounts
    tokenizer: str


class Maintenance:
    """The thread, and what it does; each task can be run by itself.

    Args:
        context: what it works with.
        stores: of all models.
        clock: monotonic, seconds.
    """

    def __init__(
        self, context: MaintenanceContext, stores: Sequence[PrefixStore], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.context = context
        self._stores = stores
        self._clock = clock
        self._stop = Event()
        self._ours = False
        self._kept: dict[Namespace, dict[bytes, int]] = {}
        self._due = dict.fromkeys((self.refresh, self.settle_accounts, self.keep, self.sweep), 0.0)
        self._swept = 0
        self._thread = Thread(target=self._work, name="kv-maintenance", daemon=True)

    def introduce(self) -> None:
        """Check the root key, say which models and namespaces there are, read what is registered and what serves it.

        Raises:
            TurnoutError: Redis was filled under another root key.
            StoreFault: it does not answer.
        """
        context, deadline = self.context, self._deadline()
        check_root_key(context.store, context.sealer, deadline)
        for each in self._stores:
            enrol(context.store, context.sealer, each.name, each.encodings, context.tokenizer, deadline)
        context.registry.refresh(deadline)
        context.accounts.name(self._namespaces(), deadline, again=True)
        servers = tuple(context.store.servers(deadline))
        for each in self._stores:
            each.servers = servers
        self._ours = True

    def start(self) -> None:
        """Begin; `introduce` is tried until it succeeds."""
        self._thread.start()

    def stop(self) -> None:
        """End, with the accounts settled."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * TIMEOUT_S)
        if self._ours and self.context.store.health() != "off":
            try:
                self.settle_accounts()
            except StoreFault:
                log.warning("prefix store: the last accounts of this process are lost")

    def refresh(self) -> None:
        """Read what is registered, and keep it if that is new."""
        if self.context.registry.refresh(self._deadline()):
            self.keep()

    def settle_accounts(self) -> None:
        """Add to the accounts what was counted since the last time."""
        self.context.accounts.name(self._namespaces(), self._deadline())
        for each in self._stores:
            self.context.accounts.add(each.name, each.counts.tenants(), self._deadline())

    def keep(self) -> None:
        """Take away the time limit of chunks of registered prefixes, and give it back to those of others.

        Introduces us again to an emptied Redis first.
        """
        self.introduce()
        context, kept = self.context, self._kept_keys()
        for namespace, keys in self._kept.items():
            if gone := sorted(keys.keys() - kept.get(namespace, {}).keys()):
                context.store.touch(gone, context.quotas.ttl_ms, self._deadline())
        self._kept = kept
        for namespace, keys in kept.items():
            there = context.store.touch(list(keys), None, self._deadline())
            used = [(key, size if is_there else 0) for (key, size), is_there in zip(keys.items(), there, strict=True)]
            context.quotas.record(namespace, [], used, self._deadline())  # the index forgets unused keys

    def _kept_keys(self) -> dict[Namespace, dict[bytes, int]]:
        """Return the keys of the chunks of all registered prefixes, with their bytes at most.

        The beginnings of all prefixes come before what follows them: over a quota the last go first.
        """
        context, stores = self.context, self._stores
        links = [
            (link, each.encodings)
            for prefix in context.registry.prefixes
            for each in stores
            for link in _links(context, each.encodings, prefix)
        ]
        found: dict[Namespace, dict[bytes, int]] = {}
        for link, encodings in sorted(links, key=lambda each: each[0].index):
            found.setdefault(link.namespace, {}).update(encodings.entries(link))
        return found

    def sweep(self) -> None:
        """Compare a sample of one namespace's index with what is there; next time, another namespace's."""
        namespaces = self._namespaces()
        if not namespaces:
            return
        self._swept = (self._swept + 1) % len(namespaces)
        drift = self.context.quotas.sweep(namespaces[self._swept], self._deadline())
        for each in self._stores:
            each.drift = drift

    def _namespaces(self) -> list[Namespace]:
        tenants = {tenant for each in self._stores for tenant in each.counts.tenants()}
        homes = [self.context.tenancy.home(tenant) for tenant in sorted(tenants)]
        return list(dict.fromkeys([*self.context.tenancy.namespaces(), *homes, *self.context.quotas.namespaces]))

    def _work(self) -> None:
        refused = 0  # times in a row that the root key was another one: a spoilt answer looks like that too
        while not self._stop.wait(TICK_S):
            try:
                self._tick()
                refused = 0
            except StoreFault as fault:
                log.debug("prefix store: maintenance: %s", fault)
            except TurnoutError as error:
                refused += 1
                self._due[self.keep] = 0.0  # which looks again
                if refused == VERDICTS:
                    log.error("prefix store: %s; registered prefixes and accounts stand still", error.message)
                    for each in self._stores:
                        each.counts.fault("root_key")
            except Exception:
                log.exception("maintenance of the prefix store failed")

    def _tick(self) -> None:
        if not self._ours:
            self.introduce()
            log.info("prefix store: Redis answers")
        keep_s = min(KEEP_S, self.context.quotas.ttl_ms / 3000)  # every read of a chunk gives it a time limit again
        periods = (REFRESH_S, ACCOUNTS_S, keep_s, SWEEP_S)
        for (task, due), period in zip(list(self._due.items()), periods, strict=True):
            now = self._clock()
            if now >= due and not self._stop.is_set():
                self._due[task] = now + period
                task()
        if self.context.store.health() != "ok":
            self.context.store.count_prefix([b"to1:{reg}:root"], self._deadline())  # lets a breaker close again

    def _deadline(self) -> float:
        return self._clock() + TIMEOUT_S


def _links(context: MaintenanceContext, encodings: Encodings, prefix: Prefix) -> list[Link]:
    tokens = context.registry.tokens_of(prefix)
    return encodings.chain(context.tenancy.sharing_of(prefix, tokens)).links(
        tokens, len(tokens) // encodings.chunk_tokens
    )
