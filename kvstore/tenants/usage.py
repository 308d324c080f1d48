"""Accounts in Redis: what each tenant asked for and found, over all processes, and the names of namespaces.

Names are sealed: who reads Redis sees how many there are, not which.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields

from kvstore.base import ByteStore
from kvstore.keys import Keyring
from kvstore.scripts import ADD, ALL_FIELDS, DROP, NAME
from kvstore.tenants.encrypted_document import SealBroken, Sealer
from kvstore.types import TenantCounts
from turnout.types import Namespace

NAMES = b"to1:{reg}:names"
FIELDS = tuple(field.name for field in fields(TenantCounts))


class Accounts:
    """The accounts of one store. Does I/O; every method raises `StoreFault`.

    Args:
        store: where they lie.
        keyring: the store's keys.
        sealer: of documents.
    """

    def __init__(self, store: ByteStore, keyring: Keyring, sealer: Sealer) -> None:
        self._store = store
        self._keyring = keyring
        self._sealer = sealer
        self._named: set[Namespace] = set()
        self._flushed: dict[tuple[str, str], TenantCounts] = {}

    def name(self, namespaces: Iterable[Namespace], deadline: float, again: bool = False) -> None:
        """Record the namespaces' names for holders of the root key.

        Args:
            namespaces: any.
            deadline: monotonic.
            again: those too that were named before: Redis may have been emptied since.
        """
        wanted = [each for each in dict.fromkeys(namespaces) if again or each not in self._named]
        if not wanted:
            return
        args: list[bytes | int | str] = []
        for namespace in wanted:
            tag = _tag(self._keyring, namespace)
            text = json.dumps([namespace.policy, namespace.id]).encode()
            args += [tag, self._sealer.seal(NAMES + tag, text)]
        self._store.script(NAME, [NAMES], args, deadline)
        self._named.update(wanted)

    def names(self, deadline: float) -> list[Namespace]:
        """List the namespaces that were named; those whose name cannot be read are left out."""
        values = self._store.script(ALL_FIELDS, [NAMES], [], deadline) or []
        found = []
        for tag, sealed in zip(values[::2], values[1::2], strict=True):
            try:
                policy, name = json.loads(self._sealer.open(NAMES + tag, sealed))
            except (SealBroken, ValueError):
                continue
            if policy in ("private", "group", "public"):
                found.append(Namespace(policy, name))
        return sorted(found, key=lambda each: (each.policy, each.id))

    def add(self, model: str, counts: Mapping[str, TenantCounts], deadline: float) -> None:
        """Add what a model's store counted since the last time."""
        for tenant, now in counts.items():
            before = self._flushed.get((model, tenant), TenantCounts())
            grown = [new - old for new, old in zip(astuple(now), astuple(before), strict=True)]
            if not any(grown):
                continue
            whose = Namespace("private", tenant)
            self.name([whose], deadline)
            args = [part for name, value in zip(FIELDS, grown, strict=True) for part in (name, value)]
            self._store.script(ADD, [self._key(whose)], args, deadline)
            self._flushed[model, tenant] = now

    def read(self, tenant: str, deadline: float) -> TenantCounts:
        """Return a tenant's account."""
        values = self._store.script(ALL_FIELDS, [self._key(Namespace("private", tenant))], [], deadline) or []
        pairs = dict(zip(values[::2], values[1::2], strict=True))
        return TenantCounts(**{name: int(pairs.get(name.encode(), 0)) for name in FIELDS})

    def forget(self, tenant: str, deadline: float) -> None:
        """Begin a tenant's account anew."""
        self._store.script(DROP, [self._key(Namespace("private", tenant))], [], deadline)

    def _key(self, namespace: Namespace) -> bytes:
        return b"to1:{%s}:hits" % _tag(self._keyring, namespace)


def _tag(keyring: Keyring, namespace: Namespace) -> bytes:
    return base64.urlsafe_b64encode(keyring.namespace_id(namespace)).rstrip(b"=")
