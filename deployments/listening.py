"""Whether this machine lets the server listen where it is to, asked before anything is started."""

from __future__ import annotations

import errno
import socket
from contextlib import closing

from ray._common.network_utils import is_ipv6

from turnout.addresses import host_port
from turnout.config import ServerConfig
from turnout.errors import TurnoutError, invalid

NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)


def check_can_listen(server: ServerConfig) -> None:
    """Refuse a host or a port that cannot be bound on this machine.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    host, port = server.http_host, server.http_port
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        _bind(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, host, port)  # the family that Serve chooses
    except (OSError, ValueError) as error:  # ValueError: what no name of a host can be
        if isinstance(error, OSError) and error.errno in OF_THE_PORT:
            raise _unbound_port("server.http_port", port, host_port(host, port), error) from None
        reason = getattr(error, "strerror", None) or error
        allowed = "give an address of this machine or a name that it has, an IPv6 address without brackets"
        raise invalid("server.http_host", f"{host!r} cannot be bound: {reason}; {allowed}") from None
    # gRPC listens on all addresses of both families, where the machine has both.
    for family, every in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            _bind(family, every, server.grpc_port)
        except OSError as error:
            if family == socket.AF_INET or error.errno not in NO_IPV6:
                where = host_port(every, server.grpc_port)
                raise _unbound_port("server.grpc_port", server.grpc_port, where, error) from None


def _bind(family: socket.AddressFamily, host: str, port: int) -> None:
    """Bind as Serve does, but without SO_REUSEPORT, with which it would share the port of another server."""
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _unbound_port(field: str, port: int, where: str, error: OSError) -> TurnoutError:
    if error.errno == errno.EADDRINUSE:
        return invalid(field, f"{port} is in use ({where}); choose another port, or end what listens there")
    return invalid(field, f"{port} cannot be bound ({where}): {error.strerror}; choose another port")
