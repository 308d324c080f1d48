"""Ports for servers of one's own: free, different, and not among those that the system gives to whoever connects."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from turnout import free_ports as ports


def test_they_are_different_however_they_are_asked_for() -> None:
    found = [*ports.free_ports(50), *ports.free_ports(50), *(ports.free_port() for _ in range(50))]
    assert len(set(found)) == 150


def test_what_somebody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, 0)) as taken:
            port = taken.getsockname()[1]
            assert not ports.is_free(port)
            monkeypatch.setattr(ports, "_to_choose_from", lambda port=port: range(port, port + 1))
            with pytest.raises(OSError, match=f"no free port from {port} to {port}"):
                ports.free_port()


@pytest.mark.parametrize(
    ("handed_out", "expected"),
    [("32768\t60999\n", range(20_000, 32_768)), ("1024 65535", range(20_000, 1 << 16)), ("", range(20_000, 1 << 15))],
)
def test_none_is_of_those_that_the_system_hands_out(
    handed_out: str, expected: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(handed_out)
    monkeypatch.setattr(ports, "HANDED_OUT", tmp_path / "range")
    assert ports._to_choose_from() == expected
    assert set(ports.free_ports(20)) <= set(expected)


def test_where_the_system_does_not_say_what_it_hands_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "HANDED_OUT", tmp_path / "nothing")
    assert ports._to_choose_from() == range(20_000, 1 << 15)
