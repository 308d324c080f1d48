"""Ports for servers of one's own: free, different, and not among those that the system gives to whoever connects."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turnout import free_ports as ports


def test_they_are_different_however_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_given", set[int]())
    monkeypatch.setattr(ports, "_to_choose_from", lambda: range(20_000, 20_400))
    with ThreadPoolExecutor(4) as threads:
        found = [port for some in threads.map(ports.free_ports, [20] * 8) for port in some]
    found += [ports.free_port() for _ in range(40)]
    assert len(set(found)) == 200


def test_what_somebody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1", "0.0.0.0", *(("::1", "::") if socket.has_dualstack_ipv6() else ())):
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as taken:
            port = taken.getsockname()[1]
            assert not ports._is_free(port)
            monkeypatch.setattr(ports, "_to_choose_from", lambda port=port: range(port, port + 1))
            with pytest.raises(OSError, match=f"no free port from {port} to {port}"):
                ports.free_port()


def test_a_second_port_of_a_server_is_free_too_and_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_given", set[int]())
    monkeypatch.setattr(ports, "_to_choose_from", lambda: range(20_000, 20_020))
    found = [ports.free_port(also=5) for _ in range(3)]
    theirs = {*found, *(port + 5 for port in found)}
    assert len(theirs) == 6
    assert theirs <= set(range(20_000, 20_020))
    with pytest.raises(OSError, match="no free port"):
        ports.free_ports(15)


@pytest.mark.parametrize(("handed_out", "end"), [("32768\t60999\n", 32_768), ("22000 65535", 22_000)])
def test_none_is_of_those_that_the_system_hands_out(
    handed_out: str, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(handed_out)
    monkeypatch.setattr(ports, "HANDED_OUT", tmp_path / "range")
    assert all(20_000 <= port < end for port in ports.free_ports(20))


@pytest.mark.parametrize(("handed_out", "end"), [("1024 65535", 1 << 16), ("", 1 << 15), (None, 1 << 15)])
def test_where_too_few_lie_below_those_any_will_do_and_where_nothing_is_said_the_usual_ones(
    handed_out: str | None, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if handed_out is not None:
        (tmp_path / "range").write_text(handed_out)
    monkeypatch.setattr(ports, "HANDED_OUT", tmp_path / "range")
    assert ports._to_choose_from() == range(20_000, end)
