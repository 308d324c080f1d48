"""Who calls: the tenant behind a key or a signed token, the same for gRPC and HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

from fastapi import Depends, Request

from deployments.access.keys import KeyRecord, is_key, parse_key
from deployments.access.reloading_file import POLL_S, ReloadingFile
from deployments.access.signed import SignedTokens, refused
from deployments.access.tenants_file import Tenant, Tenants, read_tenants, unrecorded
from turnout.access_config import UNLIMITED, AccessConfig, TenantLimits
from turnout.calls import GenerateCall, Priority, ScoreCall
from turnout.embed_calls import EmbedCall, TaskCall
from turnout.errors import Code, TurnoutError, invalid
from turnout.types import SharingPolicy

EVERYBODY = "default"
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")
PRIORITY_HEADER = "x-turnout-priority"
KEY_HEADER = "x-api-key"
C = TypeVar("C", GenerateCall, ScoreCall, EmbedCall, TaskCall)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    Attributes:
        tenant: its name.
        limits: what it may do.
        key_id: of its key or its token's; "" without.
        priority: of its calls.
        entry: the id of its entry in the tenants file; "" without.
    """

    tenant: str = EVERYBODY
    limits: TenantLimits = UNLIMITED
    key_id: str = ""
    priority: Priority = "interactive"
    entry: str = ""

    @property
    def owner(self) -> str:
        """Names the tenant for what is kept for it: another one that has its name later is not meant."""
        return owner_of(self.tenant, self.entry)

    def attributed(self, call: C) -> C:
        """The same call as the caller's."""
        return replace(call, tenant=self.tenant, key_id=self.key_id, priority=self.priority)


@dataclass(frozen=True, slots=True)
class _Directory:
    """A tenants file, by what is looked for in it."""

    tenants: Mapping[str, Tenant]
    keys: Mapping[str, tuple[str, KeyRecord]]

    @classmethod
    def of(cls, found: Tenants) -> _Directory:
        keys = {record.id: (name, record) for name, tenant in found.tenants.items() for record in tenant.keys}
        return cls(found.tenants, keys)


class Callers:
    """Tells who calls, as the configuration's section and the tenants file have it just now.

    Args:
        config: the section; None: everybody is one tenant, without limits.
        poll_s: how often files are looked at, in seconds.

    Raises:
        TurnoutError: a file is broken.
    """

    def __init__(self, config: AccessConfig | None = None, poll_s: float = POLL_S) -> None:
        self.config = config
        self._last: _Directory | None = None
        self._changed: deque[str] = deque()
        self._file: ReloadingFile[_Directory] | None = None
        self._signed: SignedTokens | None = None
        if config is not None and config.jwt is not None:
            self._signed = SignedTokens(config.jwt, poll_s)
        if config is not None and config.tenants_file is not None:
            self._file = ReloadingFile(Path(config.tenants_file).expanduser(), self._read, poll_s)

    async def settle(self, authorization: str | None) -> None:
        """Wait until what these credentials need is at hand: the keys of an identity provider, if they have changed."""
        if self._signed is not None and authorization:
            credential = authorization.strip().partition(" ")[2].strip()
            if credential and not is_key(credential):
                await self._signed.settle(credential)

    def of(self, authorization: str | None, priority: str | None = None) -> Caller:
        """The caller with these credentials.

        Args:
            authorization: as HTTP's header of this name; None: none are given.
            priority: which its request asks for; None or "": it does not say.

        Raises:
            TurnoutError: UNAUTHENTICATED; PERMISSION_DENIED, for the priority; INVALID_ARGUMENT.
        """
        if self.config is None:
            tenant, key_id, limits = EVERYBODY, "", UNLIMITED
        else:
            tenant, key_id = self._known(authorization, self.config)
            limits = self._limits(tenant)
        return Caller(tenant, limits, key_id, _allowed(priority, limits), self._entry(tenant))

    def key_of(self, authorization: str | None) -> str:
        """The id of the key that these credentials name, for the log: also of one that is ended, or not opened by them.

        Returns:
            "" where there is no such key.
        """
        parsed = parse_key((authorization or "").strip().partition(" ")[2].strip())
        return parsed[0] if self._file is not None and parsed is not None and parsed[0] in self._file.value.keys else ""

    def limits(self, tenant: str) -> TenantLimits:
        """What a tenant may do now; one that is gone may do nothing new.

        Raises:
            TurnoutError: UNAUTHENTICATED; PERMISSION_DENIED: it has a budget, and nothing records what is spent.
        """
        return UNLIMITED if self.config is None else self._limits(tenant)

    def sharing(self, tenant: str) -> SharingPolicy | None:
        """With whom a tenant shares cached prefixes, as its entry in the tenants file says now; None: it does not."""
        found = self._file.value.tenants.get(tenant) if self._file is not None else None
        return found.limits.sharing if found is not None else None

    def owner(self, tenant: str) -> str:
        """As `Caller.owner`, of the tenant that has a name now."""
        return owner_of(tenant, self._entry(tenant))

    def knows(self, tenant: str) -> bool:
        """Whether the configuration or the tenants file names a tenant."""
        if self.config is None:
            return tenant == EVERYBODY
        return tenant == self.config.anonymous or (self._file is not None and tenant in self._file.value.tenants)

    def changed(self) -> set[str]:
        """Names of tenants that the file has lost or gained since this was last asked; another one may have the name.

        A tenant none of whose keys is left is another one.
        """
        found = set()
        while self._changed:
            found.add(self._changed.popleft())
        return found

    def all_limits(self) -> dict[str, TenantLimits]:
        """The tenants of the file; without a file, none are known."""
        if self._file is None:
            return {}
        return {name: tenant.limits for name, tenant in self._file.value.tenants.items()}

    @property
    def faults(self) -> list[str]:
        """Why files, or tenants in them, are not used as they are now."""
        watched = (self._file, self._signed)
        found = [each.fault for each in watched if each is not None and each.fault is not None]
        if self._file is not None and not self._recorded:
            faults = (unrecorded(*each) for each in self._file.value.tenants.items())
            found += [fault.message for fault in faults if fault is not None]
        return found

    @property
    def _recorded(self) -> bool:
        return self.config is not None and self.config.usage is not None

    def close(self) -> None:
        """Look at files no more."""
        for each in (self._file, self._signed):
            if each is not None:
                each.close()

    def _read(self, path: Path) -> _Directory:
        """The file as it is now; runs in the thread that looks at it."""
        found = _Directory.of(read_tenants(path))
        if self._last is not None:
            self._changed += sorted(_others(self._last.tenants, found.tenants))
        self._last = found
        return found

    def _known(self, authorization: str | None, config: AccessConfig) -> tuple[str, str]:
        """Tenant and key."""
        if not authorization:
            if config.anonymous is None:
                raise refused("is needed: Bearer and an API key" + (" or a token" if config.jwt else ""))
            return config.anonymous, ""
        scheme, _, credential = authorization.strip().partition(" ")
        credential = credential.strip()
        if scheme.lower() != "bearer" or not credential:
            raise refused("must be Bearer and an API key" + (" or a token" if config.jwt else ""))
        if self._signed is not None and not is_key(credential):
            return self._signed.tenant_of(credential)
        return self._holder(credential)

    def _holder(self, credential: str) -> tuple[str, str]:
        parsed = parse_key(credential)
        if self._file is None or parsed is None:
            raise refused("the API key is not known")
        key_id, secret = parsed
        tenant, record = self._file.value.keys.get(key_id, ("", None))
        if record is None or not record.opened_by(secret):
            raise refused("the API key is not known")
        ended = record.ended(datetime.now(UTC))
        if ended is not None:
            raise refused(f"the API key {key_id} has {'expired' if ended == 'expired' else 'been revoked'}")
        return tenant, key_id

    def _entry(self, name: str) -> str:
        found = self._file.value.tenants.get(name) if self._file is not None else None
        return found.id if found is not None else ""

    def _limits(self, name: str) -> TenantLimits:
        if self._file is None:
            return TenantLimits()
        tenant = self._file.value.tenants.get(name)
        if tenant is None or tenant.disabled:
            raise refused(f"tenant {name!r} is {'disabled' if tenant else 'not known'}")
        fault = None if self._recorded else unrecorded(name, tenant)
        if fault is not None:
            raise TurnoutError(Code.PERMISSION_DENIED, fault.message, fault.field)
        return tenant.limits


def owner_of(tenant: str, entry: str) -> str:
    """See `Caller.owner`; no tenant of a file has `#` in its name."""
    return f"{tenant}#{entry}" if entry else tenant


def _others(before: Mapping[str, Tenant], now: Mapping[str, Tenant]) -> set[str]:
    """Names that do not stand for the tenant they stood for."""
    found = before.keys() ^ now.keys()
    for name in before.keys() & now.keys():
        ids, left = ({record.id for record in tenant.keys} for tenant in (before[name], now[name]))
        if before[name].id != now[name].id or (ids and not ids & left):
            found.add(name)
    return found


def _allowed(asked: str | None, limits: TenantLimits) -> Priority:
    if not asked:
        return limits.priority
    for known in PRIORITIES:
        if asked == known:
            if known == "interactive" and limits.max_priority == "batch":
                message = f"{PRIORITY_HEADER}: this tenant's requests are of priority batch"
                raise TurnoutError(Code.PERMISSION_DENIED, message, PRIORITY_HEADER)
            return known
    raise invalid(PRIORITY_HEADER, f"must be one of {', '.join(PRIORITIES)} (got {asked[:40]!r})")


def credentials(headers: Mapping[str, str]) -> str | None:
    """Return a request's credentials in the form of Authorization; Anthropic's clients send a key in KEY_HEADER."""
    key = headers.get(KEY_HEADER)
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


async def caller_of(request: Request) -> Caller:
    """FastAPI dependency: who sends a request. The application has its `Callers` in `app.state.callers`.

    Raises:
        TurnoutError: see `Callers.of`.
    """
    callers: Callers = request.app.state.callers
    authorization = credentials(request.headers)
    await callers.settle(authorization)
    caller = callers.of(authorization, request.headers.get(PRIORITY_HEADER))
    request.state.tenant = caller.tenant
    return caller


async def operator_of(request: Request) -> Caller:
    """FastAPI dependency, for what is about other tenants: as `caller_of`, but operators only.

    Raises:
        TurnoutError: PERMISSION_DENIED, and see `Callers.of`.
    """
    caller = await caller_of(request)
    if not caller.limits.operator:
        raise TurnoutError(Code.PERMISSION_DENIED, f"tenant {caller.tenant!r} is no operator")
    return caller


CallerOf = Annotated[Caller, Depends(caller_of)]
OperatorOf = Annotated[Caller, Depends(operator_of)]


log = logging.getLogger("ray.serve")


class Forgetful(Protocol):
    """A pool, as far as it is asked to forget; `deployments.backend.Backend` is one."""

    async def forget(self, tenant: str) -> None:
        """See `deployments.backend.Backend.forget`."""
        ...


class RemovedTenants:
    """Removal of learned state: every pool forgets tenants that left the tenants file, and those that joined it.

    Both, for an answer that was under way when its tenant left may have gone on to learn.

    Args:
        callers: say who has left or come.
        pools: by name.
    """

    def __init__(self, callers: Callers, pools: Mapping[str, Forgetful]) -> None:
        self._callers = callers
        self._pools = pools
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def settled(self, tenant: str) -> None:
        """A request of a tenant is to be let in: nothing is known any more of another one that had its name."""
        for name in self._callers.changed():
            self._tasks[name] = asyncio.create_task(self._forget(name, self._tasks.get(name)))
        task = self._tasks.get(tenant)
        if task is not None:
            await asyncio.shield(task)

    async def _forget(self, tenant: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        asked = await asyncio.gather(*(pool.forget(tenant) for pool in self._pools.values()), return_exceptions=True)
        for name, answer in zip(self._pools, asked, strict=True):
            if isinstance(answer, Exception):
                log.warning("pool %s may still know what it learned of the former tenant %s: %s", name, tenant, answer)
        if self._tasks.get(tenant) is asyncio.current_task():
            del self._tasks[tenant]
