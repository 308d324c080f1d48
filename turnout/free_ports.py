"""Ports that nobody listens on, for whoever starts a server of their own."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LEAST = 20_000, 1_000  # above the ports of Ray's workers; enough to choose from
TRIES = 100_000
_given = set[int]()
_choice = random.SystemRandom()  # processes whose seeds are alike must not choose alike


def free_ports(count: int) -> list[int]:
    """Ports that nobody on this machine listens on, all different, and never the same twice in a process.

    They lie below those that the system hands out by itself to whoever connects or asks for any port: one of these
    may be somebody's by the time that a server is started with it.

    Raises:
        OSError: there are none.
    """
    return [free_port() for _ in range(count)]


def free_port() -> int:
    """One of them; see `free_ports`.

    Raises:
        OSError: there is none.
    """
    ports = _to_choose_from()
    for _ in range(TRIES):
        port = _choice.choice(ports)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise OSError(f"no free port from {ports.start} to {ports.stop - 1}")


def is_free(port: int) -> bool:
    """Whether nobody listens on it, on any address."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _to_choose_from() -> range:
    try:
        handed_out = int(HANDED_OUT.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        handed_out = 1 << 15
    return range(FIRST, handed_out if handed_out >= FIRST + LEAST else 1 << 16)
