"""Administration of a store, from outside any server: report, flush, register, pin."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvstore.base import ByteStore
from kvstore.keys import Chain, Keyring, redis_key
from kvstore.tenants.encrypted_document import Sealer
from kvstore.tenants.manifest import Enrolled, check_root_key, enrolled
from kvstore.tenants.quotas import Quotas
from kvstore.tenants.registry import PUBLIC, Prefix, Registry
from kvstore.tenants.tenancy import Tenancy
from kvstore.tenants.usage import Accounts
from turnout.errors import Code, TurnoutError, invalid, not_found
from turnout.types import Namespace

if TYPE_CHECKING:
    from turnout.kvstore_config import KVStoreConfig

CALL_S = 5.0


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """Totals of one namespace; `quota` in bytes, None without limit; `gone`: share of a sample that Redis dropped."""

    policy: str
    id: str
    bytes: int
    values: int
    quota: int | None
    gone: float


@dataclass(frozen=True, slots=True)
class TenantRow:
    """Look-ups of one tenant; `hit_rate` in tokens; `tokens_found` were not computed."""

    tenant: str
    lookups: int
    hit_rate: float
    tokens_asked: int
    tokens_found: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Report:
    """Contents of a store."""

    namespaces: list[NamespaceRow]
    tenants: list[TenantRow]
    prefixes: list[dict[str, Any]]
    models: list[dict[str, Any]]


class StoreAdmin:
    """Operations on one store. Every method does I/O and raises `StoreFault` where Redis does not answer.

    Args:
        config: whose tenants and quotas count.
        store: Redis.
        keyring: the store's keys.

    Raises:
        TurnoutError: Redis was filled under another root key.
        StoreFault: it does not answer.
    """

    def __init__(self, config: KVStoreConfig, store: ByteStore, keyring: Keyring) -> None:
        self._store = store
        self._keyring = keyring
        self._sealer = Sealer(keyring)
        check_root_key(store, self._sealer, self._deadline(), claims=False)
        self._registry = Registry(store, self._sealer)
        self._registry.refresh(self._deadline())
        self._config = config
        self._tenancy = Tenancy(config.tenants, config.quota_bytes, self._registry)
        self._ttl_ms = int(1000 * config.ttl_s)
        self._quotas = Quotas(store, keyring, self._tenancy.limit, self._ttl_ms)
        self._accounts = Accounts(store, keyring, self._sealer)

    def report(self, tenant: str | None = None) -> Report:
        """Report the contents of the store.

        Args:
            tenant: of this one only; None: of all.

        Raises:
            TurnoutError: NOT_FOUND: that name was never used.
        """
        wanted = self.namespaces() if tenant is None else self.of_tenant(tenant)
        namespaces = [self._namespace_row(each) for each in wanted]
        names = [each.id for each in self.namespaces() if each.policy == "private"]
        tenants = [self._tenant_row(name) for name in names if tenant is None or name == tenant]
        return Report(
            [each for each in namespaces if each.values or tenant is not None],
            [each for each in tenants if each.lookups or each.bytes_written or tenant is not None],
            [_prefix_row(each) for each in self._registry.prefixes],
            [asdict(each) for each in self._models()],
        )

    def namespaces(self) -> list[Namespace]:
        """List the namespaces that are configured or registered, and those that were ever used."""
        known = self._accounts.names(self._deadline())
        private = [Namespace("private", name) for name in self._config.tenants]
        return list(dict.fromkeys([*self._tenancy.namespaces(), *private, *known]))

    def of_tenant(self, tenant: str) -> list[Namespace]:
        """List the namespaces of a tenant's own chunks, now and under earlier policies.

        Raises:
            TurnoutError: NOT_FOUND: that name was never used.
        """
        private = Namespace("private", tenant)
        known = self.namespaces()
        if private not in known:
            raise not_found("tenant", tenant, sorted(each.id for each in known if each.policy == "private"))
        return list(dict.fromkeys([private, self._tenancy.home(tenant)]))

    def of_group(self, group: str) -> Namespace:
        """Return the namespace of a group.

        Raises:
            TurnoutError: NOT_FOUND: no such group was ever here.
        """
        namespace = Namespace("group", group)
        known = self.namespaces()
        if namespace not in known:
            raise not_found("group", group, sorted(each.id for each in known if each.policy == "group"))
        return namespace

    def flush(self, namespaces: Iterable[Namespace]) -> int:
        """Remove what namespaces hold; how many values there were. What is registered stays registered.

        Raises:
            StoreFault: some node could not be reached, so that some may be left.
        """
        return sum(self._quotas.flush(each, self._deadline(60.0)) for each in namespaces)

    def register(self, prefix: Prefix) -> Prefix:
        """Register a prefix, or replace what has its name; what is there of it lives for ever from now on.

        Raises:
            TurnoutError: nothing could ever be shared: it is shorter than any chunk, or no server has its tokens; the
                name is taken by a pin.
        """
        self._check_tokens(prefix)
        self._put(prefix)
        self._touch(prefix, None)
        return prefix

    def unregister(self, name: str) -> Prefix:
        """Take a prefix out; what is there of it expires like everything else.

        Raises:
            TurnoutError: NOT_FOUND: nothing has this name.
        """
        self._registry.refresh(self._deadline())
        prefix = next((each for each in self._registry.prefixes if each.name == name), None)
        if prefix is None:
            raise not_found("name", name, [each.name for each in self._registry.prefixes])
        keys = self._all_keys(prefix)
        self._registry.remove(name, self._deadline())
        self._live(keys, self._ttl_ms)
        return prefix

    def pin(self, prefix: Prefix) -> int:
        """Keep the chunks of a tenant's prefix, those that are there and those that come; how many are there.

        Raises:
            TurnoutError: NOT_FOUND: none is; INVALID_ARGUMENT: the name is taken by a prefix that is shared, or no
                server has its tokens.
        """
        self._check_tokens(prefix)
        self._named_like(prefix)
        found = self._touch(prefix, None)
        if not found:
            raise TurnoutError(
                Code.NOT_FOUND,
                f"nothing to pin: no chunk of this prefix is in the store for tenant {prefix.id!r};"
                " have it answered twice (once with kvstore.admission: always), then pin it",
            )
        self._put(prefix)
        return found

    def _put(self, prefix: Prefix) -> None:
        """Enter a prefix; what it replaces expires like everything else."""
        old = self._named_like(prefix)
        replaced = self._all_keys(old) if old is not None else []
        self._registry.put(prefix, self._deadline())
        self._live(sorted(set(replaced) - set(self._all_keys(prefix))), self._ttl_ms)

    def _named_like(self, prefix: Prefix) -> Prefix | None:
        """Return the prefix of that name; a name stands for a shared prefix or for a pinned one, not for both."""
        self._registry.refresh(self._deadline())
        old = next((each for each in self._registry.prefixes if each.name == prefix.name), None)
        if old is not None and (old.policy == "private") != (prefix.policy == "private"):
            kinds = ("pinned", "registered") if old.policy == "private" else ("registered", "pinned")
            raise invalid("name", f"{prefix.name!r} is {kinds[0]} already and cannot be {kinds[1]} too; take another")
        return old

    def _models(self) -> list[Enrolled]:
        return enrolled(self._store, self._sealer, self._deadline())

    def _check_tokens(self, prefix: Prefix) -> None:
        """See that some server may make chunks of it; before any server was here, any may."""
        tokens, models = prefix.tokens, self._models()
        sizes = [model.chunk_tokens for model in models if model.tokenizer in tokens]
        if prefix.text is None and not sizes and (models or not tokens):
            raise invalid(
                "tokens",
                "are ids of no tokenizer that a server here has; give the servers' models in --config, or the prefix"
                " as --text",
            )
        longest = max(map(len, tokens.values()), default=0)
        if tokens and sizes and longest < min(sizes):
            raise TurnoutError(
                Code.INVALID_ARGUMENT,
                f"prefix: {longest} tokens are less than a chunk of {min(sizes)}; nothing of it can be stored",
                "prefix",
            )

    def _touch(self, prefix: Prefix, ttl_ms: int | None) -> int:
        """Set the life of the chunks that are there of a prefix; return the number of values."""
        return self._live(self._all_keys(prefix), ttl_ms)

    def _live(self, keys: list[bytes], ttl_ms: int | None) -> int:
        return sum(self._store.touch(keys, ttl_ms, self._deadline())) if keys else 0

    def _all_keys(self, prefix: Prefix) -> list[bytes]:
        return [key for model in self._models() for key in self._keys(prefix, model)]

    def _keys(self, prefix: Prefix, model: Enrolled) -> list[bytes]:
        tokens = prefix.tokens.get(model.tokenizer, ())
        fingerprint = bytes.fromhex(model.fingerprint)
        registry = Registry(self._store, self._sealer, model.tokenizer)
        registry.refresh(self._deadline())
        tenancy = Tenancy(self._config.tenants, self._config.quota_bytes, registry)
        sharing = tenancy.sharing_of(prefix, list(tokens))
        links = Chain(self._keyring, fingerprint, model.chunk_tokens, sharing).links(
            tokens, len(tokens) // model.chunk_tokens
        )
        return [
            redis_key(self._keyring, fingerprint, link, codec, group)
            for link in links
            for codec in model.codecs
            for group in range(model.groups)
        ]

    def _namespace_row(self, namespace: Namespace) -> NamespaceRow:
        gone = self._quotas.sweep(namespace, self._deadline())
        held = self._quotas.held(namespace, self._deadline())
        limit = self._tenancy.limit(namespace)
        name = "" if namespace == PUBLIC else namespace.id
        return NamespaceRow(namespace.policy, name, held.bytes, held.values, limit, gone)

    def _tenant_row(self, tenant: str) -> TenantRow:
        counts = self._accounts.read(tenant, self._deadline())
        rate = counts.tokens_found / counts.tokens_asked if counts.tokens_asked else 0.0
        return TenantRow(tenant, counts.lookups, rate, counts.tokens_asked, counts.tokens_found, counts.bytes_written)

    @staticmethod
    def _deadline(seconds: float = CALL_S) -> float:
        return time.monotonic() + seconds


def _prefix_row(prefix: Prefix) -> dict[str, Any]:
    return {
        "name": prefix.name,
        "policy": "pinned" if prefix.policy == "private" else prefix.policy,
        "id": prefix.id,
        "tokens": max(map(len, prefix.tokens.values()), default=0),
        "text": (prefix.text or "")[:60],
    }
