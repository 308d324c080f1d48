from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.access.keys import make_key
from deployments.access.reloading_file import ReloadingFile
from deployments.access.tenants_file import Tenant, Tenants, locked, read_tenants, write_tenants
from turnout.access_config import Budget, TenantLimits
from turnout.errors import Code, TurnoutError


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until a condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it never came"
        time.sleep(0.01)
    return time.monotonic() - began


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    _, record = make_key(label="first")
    limits = TenantLimits(requests_per_minute=5, pools=("a*",), budget=Budget(amount=10))
    tenants = Tenants(tenants={"acme": Tenant(limits=limits, keys=(record,), note="ü"), "empty": Tenant()})
    write_tenants(tmp_path / "t.yaml", tenants)
    assert read_tenants(tmp_path / "t.yaml") == tenants
    assert (tmp_path / "t.yaml").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_replaced_is_never_half(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    sizes = (1, 50)
    versions = [Tenants(tenants={f"t{i}": Tenant() for i in range(size)}) for size in sizes]
    write_tenants(path, versions[0])
    over = threading.Event()

    def change() -> None:
        for turn in range(30):
            write_tenants(path, versions[turn % 2])
        over.set()

    writer = threading.Thread(target=change)
    writer.start()
    seen = set()
    while not over.is_set():
        seen.add(len(read_tenants(path).tenants))
    writer.join()
    assert seen <= set(sizes)
    assert [each.name for each in tmp_path.iterdir()] == ["t.yaml"]


def test_changes_wait_for_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Twelve in a row, each of which waits for the disk.
    monkeypatch.setattr("deployments.access.tenants_file.LOCK_TIMEOUT_S", 120.0)
    path = tmp_path / "t.yaml"
    write_tenants(path, Tenants())

    def add(name: str) -> None:
        with locked(path):
            write_tenants(path, read_tenants(path).holding(name, Tenant()))

    threads = [threading.Thread(target=add, args=(f"t{i}",)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_tenants(path).tenants) == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants: {acme: {limits: {requests_per_minute: -1}}}", "requests_per_minute"),
        ("tenants: {acme: {limits: {speed: 1}}}", "speed: unknown"),
        ("tenants: {acme: {limits: {sharing: {policy: group}}}}", " tenants.acme.limits.sharing.group: must be named"),
        ("tenants: {acme: {limits: {max_priority: batch}}}", " tenants.acme.limits.priority: must be batch"),
        (f"tenants: {{acme: {{limits: {{sharing: {{policy: group, group: {'g' * 129}}}}}}}}}", "sharing.group"),
        ("tenants: {'a b': {}}", "tenants"),
        ("tenants: {acme: {keys: [{id: x, hash: SECRET, salt: s, created: 2026-01-01}]}}", "keys.0"),
        ("tenants: {acme: {}, acme: {}}", "given twice"),
        ("[", "not valid YAML"),
        ("version: 2", "version"),
    ],
)
def test_a_broken_file_is_refused_by_name_without_showing_what_is_in_it(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(TurnoutError) as refusal:
        read_tenants(tmp_path / "t.yaml")
    assert says in refusal.value.message
    assert "SECRET" not in refusal.value.message


def test_a_key_of_two_tenants_is_refused(tmp_path: Path) -> None:
    _, record = make_key()
    with pytest.raises(TurnoutError, match="twice"):
        Tenants(tenants={"a": Tenant(keys=(record,)), "b": Tenant(keys=(record,))})


def test_a_change_holds_within_two_seconds_and_a_broken_file_keeps_the_last_good_one(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    write_tenants(path, Tenants(tenants={"a": Tenant()}))
    watched = ReloadingFile(path, read_tenants)
    try:
        times = []
        for name in ("x", "y", "b"):
            write_tenants(path, Tenants(tenants={"a": Tenant(), name: Tenant()}))
            times.append(until(lambda name=name: name in watched.value.tenants, 10))
        assert min(times) < 2
        path.write_text("tenants: [", encoding="utf-8")
        until(lambda: watched.fault is not None, 10)
        assert "not valid YAML" in str(watched.fault)
        assert sorted(watched.value.tenants) == ["a", "b"]
        path.unlink()
        until(lambda: "cannot read" in str(watched.fault), 10)
        write_tenants(path, Tenants())
        until(lambda: watched.value.tenants == {}, 10)
        assert watched.fault is None
    finally:
        watched.close()


def test_a_read_that_failed_once_is_tried_again_though_the_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("old", encoding="utf-8")
    failing = threading.Event()

    def read(at: Path) -> str:
        if failing.is_set():
            raise OSError(24, "Too many open files")
        return at.read_text(encoding="utf-8")

    watched = ReloadingFile(path, read, poll_s=0.01)
    try:
        failing.set()
        path.write_text("new, and of another size", encoding="utf-8")
        until(lambda: watched.fault is not None, 30)
        assert watched.value == "old"
        failing.clear()
        until(lambda: watched.value.startswith("new"), 30)
        until(lambda: watched.fault is None, 30)
    finally:
        watched.close()


def test_a_file_keeps_its_owner_and_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "t.yaml", tmp_path / "link.yaml"
    write_tenants(path, Tenants())
    link.symlink_to(path)
    given: list[tuple[int, int]] = []
    owner = (path.stat().st_uid + 1, path.stat().st_gid)
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        return os.stat_result((*found[:4], *owner, *found[6:])) if self == path else found

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "chown", lambda _, uid, gid: given.append((uid, gid)))
    with locked(link):
        write_tenants(link, Tenants(tenants={"a": Tenant()}))
    assert given == [owner, owner]  # the lock and the file
    assert link.is_symlink()
    assert list(read_tenants(path).tenants) == ["a"]

    def no(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", no)
    with pytest.raises(TurnoutError) as refusal:
        write_tenants(path, Tenants())
    assert refusal.value.code is Code.UNAVAILABLE
    assert list(read_tenants(path).tenants) == ["a"]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_a_file_that_is_broken_from_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError) as refusal:
        ReloadingFile(tmp_path / "none.yaml", read_tenants)
    assert refusal.value.code is Code.INVALID_ARGUMENT


def test_a_thousand_tenants_are_read_in_time(tmp_path: Path) -> None:
    keys = [make_key()[1] for _ in range(1000)]
    write_tenants(tmp_path / "t.yaml", Tenants(tenants={f"t{i}": Tenant(keys=(key,)) for i, key in enumerate(keys)}))
    began = time.thread_time()
    assert len(read_tenants(tmp_path / "t.yaml").tenants) == 1000
    assert time.thread_time() - began < 1.5
