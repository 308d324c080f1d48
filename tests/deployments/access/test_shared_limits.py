"""Limits that two ingress processes keep together: two of their objects over one store's server."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.access import shared_limits
from deployments.access.admission import Admission
from deployments.access.callers import Callers
from deployments.access.lease import Lease
from deployments.access.shared_limits import SharedLimits, open_shared_limits
from kvstore.fakes import FaultyStore, MemoryByteStore, PassOn, Plan
from kvstore.keys import Keyring
from kvstore.opening import connect_store
from kvstore.redis.embedded import EmbeddedServer
from kvstore.scripts import ALL_FIELDS
from tests.deployments.access.kit import house_config, write_house
from tests.deployments.access.test_admission import call, usage
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("redis"), 32 << 20) as running:
        yield running


class HeldStore(PassOn):
    """A store whose scripts wait until it is let go."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.free = threading.Event()
        self.calls = 0

    def script(self, *args: Any) -> Any:
        self.calls += 1
        assert self.free.wait(30)
        return super().script(*args)


class Process:
    """What one ingress process keeps of limits; its clocks stand still."""

    def __init__(self, config: TurnoutConfig, store: Any, name: str, keyring: Keyring) -> None:
        self.now = 1_800_000_000.0
        self.callers = Callers(config.access)
        self.admission = Admission(config, self.callers, clock=lambda: self.now)
        self.shared = SharedLimits(store, keyring, name, now=lambda: self.now)

    @asynccontextmanager
    async def answering(self, tenant: str = "a", **changes: Any) -> AsyncIterator[Lease]:
        with self.admission.admit(call(tenant, **changes), "demo") as lease:
            async with self.shared.hold(lease, self.callers.limits(tenant)):
                yield lease

    async def refused(self, tenant: str = "a", **changes: Any) -> TurnoutError:
        with pytest.raises(TurnoutError) as refusal:
            async with self.answering(tenant, **changes):
                pass
        assert refusal.value.code is Code.RESOURCE_EXHAUSTED
        return refusal.value

    def told(self) -> None:
        """Wait until the store knows what has ended."""
        self.shared._caller.submit(lambda: None).result()

    def beat(self) -> None:
        self.shared._caller.submit(self.shared._report_all).result()

    def behind(self, kind: type[Any]) -> Any:
        """Have the store lie behind one of another kind from now on."""
        accounts = self.shared._accounts
        accounts._store = kind(accounts._store)
        return accounts._store

    def account(self, tenant: str = "a") -> dict[str, str]:
        accounts = self.shared._accounts
        fields = accounts._store.script(ALL_FIELDS, [accounts._key(tenant)], [], time.monotonic() + 5)
        words = [each.decode() for each in fields]
        return dict(zip(words[::2], words[1::2], strict=True))

    def close(self) -> None:
        self.shared.close()
        self.admission.close()
        self.callers.close()


@pytest.fixture
def make(server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(shared_limits, "BEAT_S", 3600.0)
    made: list[Process] = []

    def pair(store: Any = None, **limits: Any) -> list[Process]:
        write_house(tmp_path, {"a": limits, "b": limits})
        config, keyring = house_config(tmp_path), Keyring(time.time_ns().to_bytes(32, "big"))
        settings = config.kvstore.model_copy(update={"url": server.url})
        made.extend(Process(config, store or connect_store(settings), name, keyring) for name in ("x", "y"))
        return made

    yield pair
    for each in made:
        each.close()


async def test_requests_at_once_are_counted_over_processes(make: Any) -> None:
    x, y = make(concurrency=2)
    async with AsyncExitStack() as stack:
        for process in (x, y):
            await stack.enter_async_context(process.answering())
        for process in (x, y):
            error = await process.refused()
            assert (error.field, error.retry_after_s) == ("tenant.concurrency", 1.0)
        async with x.answering("b"), y.answering("b"):
            pass
    x.told()
    y.told()
    async with x.answering(), x.answering():
        pass


async def test_a_rate_of_requests_is_counted_over_processes(make: Any) -> None:
    x, y = make(requests_per_minute=4)
    for process in (x, y, x, y):
        async with process.answering():
            pass
    error = await x.refused()
    assert error.field == "tenant.requests_per_minute"
    assert "4 allowed, 0 left" in error.message
    assert error.retry_after_s == pytest.approx(15.0)  # one of four a minute
    x.now = y.now = x.now + 15.0
    async with y.answering():
        pass
    await x.refused()


async def test_tokens_are_counted_as_they_turn_out(make: Any) -> None:
    x, y = make(tokens_per_minute=100)
    async with x.answering() as lease:  # 40 characters are about 10 tokens
        lease.served((usage(10, 60),))
    x.told()
    async with y.answering() as lease:
        lease.served((usage(10, 15),))
    y.told()
    error = await x.refused()
    assert error.field == "tenant.tokens_per_minute"
    assert "5 left" in error.message


async def test_what_came_to_nothing_is_given_back(make: Any) -> None:
    x, y = make(requests_per_minute=1, tokens_per_minute=100)
    with pytest.raises(TurnoutError):
        async with x.answering():
            raise TurnoutError(Code.UNAVAILABLE, "no replica")
    x.told()
    async with y.answering():
        pass
    await x.refused()


async def test_what_ran_in_a_process_that_ended_does_not_count(make: Any) -> None:
    x, y = make(concurrency=1)
    async with x.answering():  # it is killed here, as far as y can see
        await y.refused()
        y.now += shared_limits.SILENCE_S - 1
        await y.refused()
        y.now += 2
        async with y.answering():
            pass
        y.told()
        x.now = y.now
        x.beat()  # it was alive, and says so
        await y.refused()


async def test_nothing_is_kept_of_processes_that_ended(make: Any) -> None:
    x, y = make(concurrency=2)
    async with x.answering(), x.answering(priority="batch"):
        y.now += shared_limits.SILENCE_S + 1
        async with y.answering():
            y.told()
            assert {name.rpartition(":")[2] for name in y.account()} == {"y"}


async def test_a_clock_that_is_behind_does_not_let_a_rate_drain_twice(make: Any) -> None:
    x, y = make(requests_per_minute=4)
    x.now += 30
    for process in (x, x, y, x):
        async with process.answering():
            process.told()
    for process in (x, y):
        await process.refused()
    x.now, y.now = x.now + 15, y.now + 15
    async with x.answering():
        pass
    await y.refused()


async def test_a_clock_that_was_wrong_does_not_hold_a_tenant_up(make: Any) -> None:
    x, y = make(requests_per_minute=1)
    x.now += 86400
    async with x.answering():
        x.told()
    async with y.answering():
        pass
    await y.refused()


async def test_a_store_that_hangs_holds_up_no_request(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = make(requests_per_minute=10, tokens_per_minute=1000)
    monkeypatch.setattr(shared_limits, "CALL_S", 0.02)
    held = x.behind(HeldStore)
    for _ in range(3):
        async with x.answering() as lease:
            lease.served((usage(10, 90),))
    assert held.calls == 1  # nothing else waited for it
    monkeypatch.setattr(shared_limits, "CALL_S", 5.0)
    held.free.set()
    x.told()
    x.beat()
    assert held.calls <= 4
    assert float(y.account()["requests"]) == pytest.approx(3)
    assert float(y.account()["tokens"]) == pytest.approx(300)


async def test_a_place_that_could_not_be_given_back_is_with_the_next_beat(make: Any) -> None:
    x, y = make(concurrency=1)
    faulty = x.behind(FaultyStore)
    async with x.answering():
        x.told()
        faulty.plan = Plan(faults=("late", None))
    x.told()
    await y.refused()
    x.beat()
    async with y.answering():
        pass
    assert not x.shared._uses


async def test_what_ends_after_the_close_ends(make: Any) -> None:
    [x, _] = make(concurrency=1)
    async with x.answering() as lease:
        x.shared.close()
        lease.served((usage(10, 15),))
    assert lease.usage == usage(10, 15)
    assert x.admission.held()["running"] == 0


async def test_without_its_store_each_process_keeps_limits_by_itself(make: Any) -> None:
    x, y = make(store=MemoryByteStore(), requests_per_minute=1)  # every script is refused
    for process in (x, y):
        async with process.answering():
            pass
        await process.refused()


async def test_tenants_without_such_limits_cost_no_call(make: Any) -> None:
    store = MemoryByteStore()
    [x, _] = make(store=store)
    async with x.answering():
        assert not x.shared._held


def test_one_process_shares_nothing(tmp_path: Path) -> None:
    write_house(tmp_path, {"a": {}})
    assert open_shared_limits(house_config(tmp_path)) is None
    assert open_shared_limits(house_config(tmp_path, ingress_processes=1)) is None
    assert open_shared_limits(house_config(tmp_path, ingress_processes=2)) is None  # no embedded store was started
