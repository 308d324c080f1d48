"""Use of tenants' limits where several processes count together. Every call blocks, and raises StoreFault."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.base import ByteStore
from kvstore.keys import Keyring
from kvstore.scripts import REPORT, TAKE
from turnout.types import Namespace


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use; None: without limit.

    Attributes:
        requests: in a minute.
        tokens: in a minute.
        concurrency: requests at once, of each class.
    """

    requests: float | None
    tokens: float | None
    concurrency: int | None

    @property
    def rates(self) -> tuple[str, str]:
        """Both rates, as scripts read them."""
        return _amount(self.requests), _amount(self.tokens)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A limit that has no room.

    Attributes:
        name: of the limit: concurrency, requests_per_minute, tokens_per_minute.
        left: what is left of it.
        wait_ms: until there is room; 0: until a request ends.
    """

    name: str
    left: int
    wait_ms: int


class LimitAccounts:
    """Accounts of tenants in a store, as one process changes them.

    Args:
        store: holds them.
        keyring: names them.
        process: names this process; no two have one name.
        silence_ms: after which a process that reports nothing has ended, and what ran in it.
    """

    def __init__(self, store: ByteStore, keyring: Keyring, process: str, silence_ms: int) -> None:
        self._store, self._keyring, self._process, self._silence_ms = store, keyring, process, silence_ms

    def take(
        self, tenant: str, kind: str, limits: Limits, tokens: int, kept: float, now_ms: int, deadline: float
    ) -> Refusal | None:
        """Count a request that begins, where all limits have room for it.

        Args:
            tenant: whose it is.
            kind: of the request: interactive or batch.
            limits: its tenant's.
            tokens: that it is expected to use.
            kept: share of both rates that it leaves alone.
            now_ms: the time, in milliseconds since 1970.
            deadline: see `ByteStore`.
        """
        most = -1 if limits.concurrency is None else limits.concurrency
        args = (now_ms, self._process, kind, self._silence_ms, *limits.rates, most, tokens, str(kept))
        refused = self._store.script(TAKE, [self._key(tenant)], args, deadline)
        return Refusal(refused[0].decode(), int(refused[1]), int(refused[2])) if refused else None

    def report(
        self,
        tenant: str,
        running: Mapping[str, int],
        limits: Limits,
        used: tuple[int, int],
        now_ms: int,
        deadline: float,
    ) -> None:
        """Say what runs in this process, and what was used since it was last said.

        Args:
            tenant: whose requests they are.
            running: how many, by kind.
            limits: their tenant's.
            used: requests and tokens; a negative number gives back.
            now_ms: the time, in milliseconds since 1970.
            deadline: see `ByteStore`.
        """
        counts = running.get("interactive", 0), running.get("batch", 0)
        args = (now_ms, self._process, *counts, *used, *limits.rates)
        self._store.script(REPORT, [self._key(tenant)], args, deadline)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _key(self, tenant: str) -> bytes:
        tag = base64.urlsafe_b64encode(self._keyring.namespace_id(Namespace("private", f"limits#{tenant}")))
        return b"to1:%s:limits" % tag.rstrip(b"=")


def _amount(limit: float | None) -> str:
    return "-1" if limit is None else str(limit)
