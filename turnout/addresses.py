"""Addresses as text: where an IPv6 host stands in brackets, and what stands for all addresses of a machine."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import IPv6Address

from turnout.errors import invalid

LOOPBACKS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # by what stands for all addresses


def host_port(host: str, port: int | str) -> str:
    """`host:port`, with an IPv6 host in brackets, as RFC 3986 has it and gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int | str) -> str:
    """The URL of a server, without a path."""
    return f"http://{host_port(host, port)}"


def reachable(host: str, here: str | None = None) -> str:
    """The host by which a server is reached that listens on `host`.

    Args:
        host: an address, a name, or what stands for all addresses.
        here: an address of the server's machine for others; None: who asks is on that machine.
    """
    return (here or LOOPBACKS[host]) if host in LOOPBACKS else host


def check_target(address: str, field: str = "address") -> None:
    """Refuse an address of a gRPC server that it would look up as a name.

    Raises:
        TurnoutError: INVALID_ARGUMENT: an IPv6 host without brackets: its end cannot be known.
    """
    for host in (address, address.rpartition(":")[0]):
        with suppress(ValueError):
            IPv6Address(host)
            raise invalid(field, f"an IPv6 host stands in brackets, as in [::1]:9000 (got {address!r})")
