"""Addresses as text: an IPv6 host stands in brackets wherever a port or a path follows."""

from __future__ import annotations

from urllib.parse import urlsplit

import grpc
import pytest

from turnout.addresses import check_target, host_port, http_url, reachable
from turnout.client import AsyncClient, Client
from turnout.errors import TurnoutError

HOSTS = ["127.0.0.1", "localhost", "::1", "fd00::2:1", "fe80::1%eth0"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_url_has_the_host_and_the_port_that_it_was_made_of(host: str) -> None:
    parts = urlsplit(f"{http_url(host, 8000)}/v1")
    assert (parts.hostname, parts.port, parts.path) == (host.lower(), 8000, "/v1")
    assert parts.netloc == host_port(host, 8000)


@pytest.mark.parametrize(
    ("host", "here", "reached"),
    [
        ("0.0.0.0", None, "127.0.0.1"),
        ("", None, "127.0.0.1"),
        ("::", None, "::1"),
        ("::", "fd00::2", "fd00::2"),
        ("0.0.0.0", "10.0.0.7", "10.0.0.7"),
        ("::1", "fd00::2", "::1"),
        ("10.0.0.8", "10.0.0.7", "10.0.0.8"),
    ],
)
def test_what_stands_for_all_addresses_is_reached_by_one(host: str, here: str | None, reached: str) -> None:
    assert reachable(host, here) == reached


@pytest.mark.parametrize(
    "address", ["::1:9000", "::1", "fd00::2:9000", "2001:db8:0:0:0:0:0:1:9000", "::ffff:127.0.0.1:9000"]
)
async def test_a_client_asks_for_brackets(address: str) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(
            TurnoutError, match=r"^address: an IPv6 host stands in brackets, as in \[::1\]:9000"
        ) as refusal:
            make(address)
        assert refusal.value.field == "address"


@pytest.mark.parametrize(
    "address", [*(host_port(host, 9) for host in HOSTS), "[::1]", "unix:/x", "dns:///h:1", "h", ""]
)
def test_whatever_else_grpc_resolves_is_taken(address: str) -> None:
    check_target(address)
    grpc.insecure_channel(address).close()
