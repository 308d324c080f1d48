"""Limits of tenants that several ingress processes keep together, in the prefix store.

Each process also keeps them by itself: where the store does not answer, a tenant may use its limits in each of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

from deployments.access.lease import Lease
from kvstore.base import ByteStore, StoreFault
from kvstore.keys import Keyring
from kvstore.opening import connect_store, open_keyring
from kvstore.tenants.limit_accounts import LimitAccounts, Limits, Refusal
from turnout.access_config import TenantLimits
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

CALL_S = 0.5  # for one call of the store; as long a request waits for it
BEAT_S = 2.0  # between two reports of what runs
SILENCE_S = 10.0  # after which a process has ended, and what ran in it
CONCURRENCY_RETRY_S = 1.0

log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class _Held:
    """A request that runs: the limits that it was let in by, and what of it was counted here: itself, and tokens."""

    limits: Limits
    requests: int
    tokens: int


@dataclass(slots=True)
class _Use:
    """Use of one tenant here: requests that run, by class; requests and tokens that the store does not know of."""

    limits: Limits
    running: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0


class SharedLimits:
    """One process's part in limits that several share.

    Args:
        store: where they are kept.
        keyring: names the tenants' accounts.
        process: names this process; no two have one name.
        now: seconds since 1970.
    """

    def __init__(self, store: ByteStore, keyring: Keyring, process: str, now: Callable[[], float] = time.time) -> None:
        self._accounts, self._now = LimitAccounts(store, keyring, process, int(1000 * SILENCE_S)), now
        # One thread makes all calls, so that the store learns of them in the order in which they are made here.
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="shared limits")
        self._held: dict[Lease, _Held] = {}
        self._uses: dict[str, _Use] = {}
        self._reached = True
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="shared limits beat", daemon=True).start()

    @asynccontextmanager
    async def hold(self, lease: Lease, limits: TenantLimits) -> AsyncIterator[None]:
        """Keep a place of a tenant's limits in all processes for as long as the context lasts.

        Args:
            lease: of the request, which this process has let in.
            limits: its tenant's.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED: there is none, counted over all processes.
        """
        if limits.requests_per_minute is limits.tokens_per_minute is limits.concurrency is None:
            yield
            return
        # Nothing waits longer for a store that is slow: `_take` and `_give_back` leave it alone then.
        taking = asyncio.wrap_future(self._caller.submit(self._take, lease, limits, time.monotonic() + CALL_S))
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait((taking,), timeout=CALL_S)
            if done and (refusal := taking.result()) is not None:
                raise refusal
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            with suppress(RuntimeError):  # it has been closed, and this request was cut off
                # Not waited for: the answer is there. It comes after `_take`, also where that was not waited for.
                self._caller.submit(self._give_back, lease, error, time.monotonic() + CALL_S)

    def close(self) -> None:
        """Report what has ended, and let go of the store."""
        self._over.set()
        self._caller.shutdown()
        self._accounts.close()

    def _take(self, lease: Lease, limits: TenantLimits, until: float) -> TurnoutError | None:
        """Count a request that begins, in the store only before `until`; returns its refusal."""
        tenant, needed = lease.call.tenant, lease.charged
        most = Limits(limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency)
        held = _Held(most, 0, 0)
        if time.monotonic() < until:
            with self._faults():
                now_ms, deadline = self._now_ms(), time.monotonic() + CALL_S
                refused = self._accounts.take(tenant, lease.priority, most, needed, lease.kept, now_ms, deadline)
                if refused is not None:
                    return _exceeded(refused, limits)
                held = _Held(most, 1, needed)
        use = self._uses.setdefault(tenant, _Use(most))
        use.running[lease.priority] += 1
        self._held[lease] = held
        return None

    def _give_back(self, lease: Lease, error: BaseException | None, until: float) -> None:
        """Count a request that has ended; the store learns of it now, or from the next beat where it is late."""
        held = self._held.pop(lease, None)
        if held is None:  # it had no place
            return
        tenant = lease.call.tenant
        self._uses[tenant].running[lease.priority] -= 1
        tokens, requests = lease.unused(error)
        self._count(tenant, held, 1 - requests, lease.charged - tokens)
        if time.monotonic() < until:
            self._report(tenant)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(RuntimeError):  # it has just been closed
                wait((self._caller.submit(self._report_all),))  # one at a time, however slow the store is

    def _report_all(self) -> None:
        """Say what runs here, and what it has used since it was last said."""
        for lease, held in self._held.items():
            self._count(lease.call.tenant, held, 1, lease.charged)
        for tenant in list(self._uses):
            self._report(tenant)

    def _count(self, tenant: str, held: _Held, requests: int, tokens: int) -> None:
        use = self._uses[tenant]
        use.limits = held.limits
        use.requests += requests - held.requests
        use.tokens += tokens - held.tokens
        held.requests, held.tokens = requests, tokens

    def _report(self, tenant: str) -> None:
        use = self._uses[tenant]
        used = use.requests, use.tokens
        # Not said again after a fault: it may have been heard, and a store that was away long would refuse for as long.
        use.requests = use.tokens = 0
        with self._faults():
            deadline = time.monotonic() + CALL_S
            self._accounts.report(tenant, use.running, use.limits, used, self._now_ms(), deadline)
            if not use.running.total():
                del self._uses[tenant]

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Continue where the store does not answer."""
        try:
            yield
        except StoreFault as fault:
            if self._reached:
                log.warning("limits of tenants hold in each ingress process by itself: the store is %s", fault.kind)
            self._reached = False
        else:
            self._reached = True

    def _now_ms(self) -> int:
        return int(1000 * self._now())


def _exceeded(refused: Refusal, limits: TenantLimits) -> TurnoutError:
    name, wait_s = refused.name, refused.wait_ms / 1000 or CONCURRENCY_RETRY_S
    allowed = f"{getattr(limits, name):g} allowed, {refused.left} left"
    message = f"tenant.{name}: {allowed}; try again in {max(wait_s, 0.1):.1f} s"
    return TurnoutError(Code.RESOURCE_EXHAUSTED, message, f"tenant.{name}", wait_s)


def open_shared_limits(config: TurnoutConfig) -> SharedLimits | None:
    """Open the limits that the configured ingress processes share; None: there is one process, or nothing to share in.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the store's key file or URL cannot be used.
    """
    if config.server.ingress_processes <= 1 or config.access is None:
        return None
    if not config.kvstore.has_address:
        log.warning("limits of tenants hold in each ingress process by itself: the embedded store did not start")
        return None
    return SharedLimits(connect_store(config.kvstore), open_keyring(config.kvstore), uuid4().hex)
