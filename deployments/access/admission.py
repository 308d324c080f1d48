"""Whether a tenant's request is let in: limits and budgets. One event loop, one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from deployments.access.buckets import Bucket
from deployments.access.callers import Caller, Callers
from deployments.access.lease import Account, Lease, kept_of
from deployments.access.recording import UsageLedger
from deployments.access.spending import period_end
from turnout.access_config import Budget, TenantLimits
from turnout.calls import GenerateCall, Priority, ScoreCall
from turnout.config import PoolConfig, TurnoutConfig
from turnout.embed_calls import AnyCall, EmbedCall, TaskCall
from turnout.errors import Code, TurnoutError, invalid
from turnout.part_choice import PartChoice
from turnout.registry import ALONE

BUSY_RETRY_S = 1.0


class Admission:
    """Lets requests in and counts what they use; without a section `access`, everything, and nothing.

    Limits hold in each ingress process by itself; where several are configured, `SharedLimits` keeps them in all.

    Args:
        config: the whole configuration.
        callers: knows the tenants' limits.
        clock: seconds.
        now: the time.

    Raises:
        TurnoutError: usage cannot be recorded.
    """

    def __init__(
        self,
        config: TurnoutConfig,
        callers: Callers,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config
        self._callers = callers
        self._clock = clock
        self._now = now
        self._accounts: dict[str, Account] = {}
        self._ledger = UsageLedger(config.access.usage if config.access is not None else None, now)

    @property
    def counts(self) -> bool:
        """Whether anything is limited or recorded at all."""
        return self._config.access is not None

    def admit(self, call: AnyCall, pool: str) -> Lease:
        """Let a request in; the lease is a context that lasts as long as the request.

        Raises:
            TurnoutError: PERMISSION_DENIED: pool or method; RESOURCE_EXHAUSTED: a limit, with the time to try again;
                UNAUTHENTICATED: the tenant is gone; UNAVAILABLE: usage cannot be recorded.
        """
        if not self.counts or not call.billed:
            return Lease(None, call, None, 0, 0.0)
        limits = self._callers.limits(call.tenant)
        check_permission(call, pool, self._config.pools[pool], limits)
        priority, now = call.priority, self._clock()
        account = self._check_room(call.tenant, limits, priority)
        estimate = estimated_tokens(call)
        self._check_rate("tokens_per_minute", limits.tokens_per_minute, account.tokens, estimate, kept_of(priority))
        self._ledger.promise()
        account.running[priority] += 1
        account.held[call.model] += estimate
        if limits.requests_per_minute is not None:
            account.requests.add(1, limits.requests_per_minute, now)
        if limits.tokens_per_minute is not None:
            account.tokens.add(estimate, limits.tokens_per_minute, now)
        return Lease(self, call, account, estimate, now)

    def precheck(self, caller: Caller) -> None:
        """Refuse a request that could not be let in now, whatever it asks for: before it costs the time to read it.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED, as `admit`.
        """
        if self.counts:
            account, limits = self._check_room(caller.tenant, caller.limits, caller.priority), caller.limits
            kept = kept_of(caller.priority)
            self._check_rate("tokens_per_minute", limits.tokens_per_minute, account.tokens, 1, kept)

    def count(self, caller: Caller) -> None:
        """Count a request that passed `precheck` and asks no pool for anything against the rate of requests."""
        if self.counts and (limit := caller.limits.requests_per_minute) is not None:
            self._accounts.setdefault(caller.tenant, Account()).requests.add(1, limit, self._clock())

    @contextmanager
    def reading(self, caller: Caller) -> Iterator[None]:
        """Count a request whose body is read in the context as one in progress."""
        if not self.counts:
            yield
            return
        account = self._accounts.setdefault(caller.tenant, Account())
        account.reading[caller.priority] += 1
        try:
            yield
        finally:
            account.reading[caller.priority] -= 1

    def check(self, calls: Sequence[GenerateCall]) -> None:
        """Refuse calls of one request that could not all be let in now, before any of them has begun.

        Raises:
            TurnoutError: INVALID_ARGUMENT: there are never that many; RESOURCE_EXHAUSTED, UNAUTHENTICATED: as `admit`.
        """
        if not self.counts or len(calls) == 1:
            return
        tenant, priority = calls[0].tenant, calls[0].priority
        limits, account = self._callers.limits(tenant), self._accounts.setdefault(tenant, Account())
        tokens = sum(map(estimated_tokens, calls))
        for name, limit, needed in (
            ("concurrency", limits.concurrency, len(calls)),
            ("requests_per_minute", limits.requests_per_minute, len(calls)),
            ("tokens_per_minute", limits.tokens_per_minute, tokens),
        ):
            if limit is not None and needed > limit:
                raise invalid("prompt", f"needs {needed} of tenant.{name} at once, which allows {limit:g}: send fewer")
        running, kept = account.running[priority], kept_of(priority)
        if limits.concurrency is not None and running + len(calls) > limits.concurrency:
            left = f"{limits.concurrency - running} left, {len(calls)} needed"
            raise _exceeded("concurrency", f"{limits.concurrency}", left, BUSY_RETRY_S)
        self._check_rate("requests_per_minute", limits.requests_per_minute, account.requests, len(calls), kept)
        self._check_rate("tokens_per_minute", limits.tokens_per_minute, account.tokens, tokens, kept)

    def charge(self, tenant: str, account: Account, tokens: float, requests: float = 0) -> None:
        """Count what a running request takes of its tenant's rates; a negative number gives back."""
        try:
            limits = self._callers.limits(tenant)
        except TurnoutError:  # it has been removed meanwhile
            return
        if limits.tokens_per_minute is not None and tokens:
            account.tokens.add(tokens, limits.tokens_per_minute, self._clock())
        if limits.requests_per_minute is not None and requests:
            account.requests.add(requests, limits.requests_per_minute, self._clock())

    def elapsed_s(self, lease: Lease) -> float:
        """Seconds since a request was let in."""
        return self._clock() - lease.began

    def ended(self, lease: Lease, outcome: str) -> None:
        """A request is over: what it used is recorded."""
        assert lease.account is not None
        lease.account.running[lease.priority] -= 1
        lease.account.held[lease.call.model] -= lease.charged
        self._ledger.ended(lease, outcome)

    def held(self) -> dict[str, int]:
        """What there is of requests just now: bodies being read, requests running, records not written."""
        accounts = self._accounts.values()
        return {
            "reading": sum(each.reading.total() for each in accounts),
            "running": sum(each.running.total() for each in accounts),
            "recording": self._ledger.num_waiting,
        }

    def left(self, tenant: str, limits: TenantLimits) -> dict[str, float]:
        """What is left of each of a tenant's limits just now."""
        account, now = self._accounts.get(tenant, Account()), self._clock()
        found: dict[str, float] = {}
        if limits.concurrency is not None:
            found["concurrency"] = limits.concurrency - account.running["interactive"]
        for name in ("requests", "tokens"):
            limit = getattr(limits, f"{name}_per_minute")
            if limit is not None:
                found[f"{name}_per_minute"] = limit - getattr(account, name).used(limit, now)
        if limits.budget is not None:
            found["budget"] = limits.budget.amount - sum(self._spent(tenant, limits.budget, account))
        return found

    def used(self, tenant: str) -> dict[str, float]:
        """What a tenant has used this month: tokens, FLOPs and seconds."""
        return self._ledger.used(tenant)

    def flush(self) -> bool:
        """Wait until the records of what has ended are written; whether they were."""
        return self._ledger.flush()

    def close(self) -> None:
        """Write the records that wait."""
        self._ledger.close()

    def _check_room(self, tenant: str, limits: TenantLimits, priority: Priority) -> Account:
        """Whether one more request fits, as far as that does not depend on what it asks for."""
        account = self._accounts.setdefault(tenant, Account())
        if limits.budget is not None:
            self._check_budget(tenant, limits.budget, account)
        busy = account.running[priority] + account.reading[priority]
        if limits.concurrency is not None and busy >= limits.concurrency:
            raise _exceeded("concurrency", f"{limits.concurrency}", "0 left", BUSY_RETRY_S)
        self._check_rate("requests_per_minute", limits.requests_per_minute, account.requests, 1, kept_of(priority))
        return account

    def _check_budget(self, tenant: str, budget: Budget, account: Account) -> None:
        spent, held = self._spent(tenant, budget, account)
        if spent + held < budget.amount:
            return
        now = self._now()
        end = period_end(budget.per, now)
        shown = f"{spent:g} spent" + (f", {held:g} of requests in progress" if held else "")
        shown += f"; it begins anew at {end:%Y-%m-%dT%H:%MZ}"
        # Those in progress may turn out to use less than was estimated, or be refused.
        wait_s = BUSY_RETRY_S if spent < budget.amount else max((end - now) / timedelta(seconds=1), 1.0)
        raise _exceeded("budget", f"{budget.amount:g} {budget.unit} a {budget.per}", shown, wait_s)

    def _spent(self, tenant: str, budget: Budget, account: Account) -> tuple[float, float]:
        """What a tenant has spent of a budget, and what its requests in progress use of it, as far as that is known."""
        return self._ledger.spent(tenant, budget), self._ledger.expected(account.held, budget.unit)

    def _check_rate(self, name: str, limit: float | None, bucket: Bucket, needed: float, kept: float) -> None:
        if limit is None:
            return
        now = self._clock()
        wait_s = bucket.wait_s(needed + kept * limit, limit, now)
        if wait_s > 0:
            left = max(limit - bucket.used(limit, now), 0.0)
            raise _exceeded(name, f"{limit:g}", f"{int(left)} left, {needed:g} needed", wait_s)


def _exceeded(name: str, limit: str, left: str, wait_s: float) -> TurnoutError:
    """The message ends in the time, too: of a stream that is refused, Ray Serve passes on nothing else."""
    field_name = f"tenant.{name}"
    message = f"{field_name}: {limit} allowed, {left}; try again in {max(wait_s, 0.1):.1f} s"
    return TurnoutError(Code.RESOURCE_EXHAUSTED, message, field_name, wait_s)


CHARS_PER_TOKEN = 4  # until it is known
TURN_TOKENS = 4  # what a template adds to a message, about


def estimated_tokens(call: AnyCall) -> int:
    """About how many tokens a call has the models read."""
    if isinstance(call, ScoreCall):
        return sum(map(_estimated, (call.prompt, *call.prompts, *call.completions)))
    if isinstance(call, EmbedCall):
        return sum(map(_estimated, call.input))
    if isinstance(call, TaskCall):
        return sum(map(_estimated, _texts(call.params)))
    apart = sum(map(_estimated, (call.context, *(call.contrast.texts if call.contrast is not None else ()))))
    if call.messages is not None:
        return apart + sum(_estimated(turn.content) + TURN_TOKENS for turn in call.messages)
    return apart + _estimated(call.prompt or "")


def _texts(value: Any) -> Iterator[str]:
    """All texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _estimated(text: str | tuple[int, ...]) -> int:
    return len(text) if isinstance(text, tuple) else -(-len(text) // CHARS_PER_TOKEN)


def check_permission(call: AnyCall, pool: str, settings: PoolConfig, limits: TenantLimits) -> None:
    """Refuse what a tenant may not ask for.

    Raises:
        TurnoutError: PERMISSION_DENIED.
    """
    if not limits.allows_pool(pool):
        message = f"model: tenant {call.tenant!r} may not ask pool {pool!r}; allowed: {', '.join(limits.pools)}"
        raise TurnoutError(Code.PERMISSION_DENIED, message, "model")
    if isinstance(call, GenerateCall):
        for method in _methods_of(call, pool, settings):
            if not limits.allows_method(method):
                allowed = ", ".join(limits.methods)
                message = f"method: tenant {call.tenant!r} may not use {method!r}; allowed: {allowed}"
                raise TurnoutError(Code.PERMISSION_DENIED, message, "method")


def _methods_of(call: GenerateCall, pool: str, settings: PoolConfig) -> list[str]:
    """The methods a call asks for: by name, by default, and those that its method is to run."""
    if call.method is not None:
        name = call.method
    elif call.model not in ("", pool):
        name = ALONE
    else:
        name = "auto" if settings.routing is not None else settings.default.name
    return [name, *_methods_within(call.params)]


def _methods_within(params: Any) -> list[str]:
    """Methods that run inside one another, as parameters name them."""
    inner = params.get("inner") if isinstance(params, dict) else None
    try:
        # Read as the method reads it: the short forms name methods, too.
        choice = PartChoice.model_validate(inner)
    except ValidationError:
        return []  # there is none, or one that the pool refuses
    return [choice.name, *_methods_within(choice.params)]
