"""Free ports, for starting servers."""

from __future__ import annotations

import errno
import random
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnout.config import TurnoutConfig

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # of a machine that has the family switched off
FIRST, LEAST = 20_000, 1_000  # above the ports of Ray's workers; enough to choose from
_given = set[int]()
_lock = threading.Lock()
_choice = random.SystemRandom()  # processes whose seeds are alike must not choose alike


def free_ports(count: int) -> list[int]:
    """Ports without a listener on this machine, all different, and never the same twice in a process.

    Unless fewer than a thousand do, they lie below those that the system hands out by itself to processes that
    connect or ask for any port: one of those may be taken by the time a server binds it. Another process that chooses
    in the same moment gets the same one once in ten thousand times.

    Raises:
        OSError: there are none.
    """
    return [free_port() for _ in range(count)]


def free_port(also: int = 0) -> int:
    """One of them; see `free_ports`.

    Args:
        also: so far above it lies another port that its server takes as well.

    Raises:
        OSError: there is none.
    """
    ports = _to_choose_from()
    start = _choice.randrange(len(ports))
    with _lock:
        for step in range(len(ports)):
            port = ports[(start + step) % len(ports)]
            both = {port, port + also}
            if port + also in ports and not both & _given and all(map(_is_free, both)):
                _given.update(both)
                return port
    raise OSError(f"no free port from {ports.start} to {ports.stop - 1}")


def _is_free(port: int) -> bool:
    """Whether it is free on every address of this machine."""
    for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
        with socket.socket(family) as probe:
            try:
                probe.bind(("", port))
            except OSError as error:
                if family == socket.AF_INET or error.errno not in NO_IPV6:
                    return False
    return True


def _to_choose_from() -> range:
    try:
        handed_out = int(HANDED_OUT.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        handed_out = 1 << 15
    return range(FIRST, handed_out if handed_out >= FIRST + LEAST else 1 << 16)


def on_free_ports(config: TurnoutConfig) -> TurnoutConfig:
    """Return the same configuration, served on two ports that are free now."""
    grpc_port, http_port = free_ports(2)
    ports = {"grpc_port": grpc_port, "http_port": http_port}
    return config.model_copy(update={"server": config.server.model_copy(update=ports)})
