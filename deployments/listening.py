"""Where the server is to listen: asked of this machine before anything is started, and of Serve where it failed."""

from __future__ import annotations

import errno
import re
import socket
from contextlib import closing

from ray.exceptions import RayTaskError

from deployments.serve_internals import is_ipv6
from turnout.addresses import LOOPBACKS, host_port
from turnout.config import ServerConfig
from turnout.errors import TurnoutError, invalid
from turnout.free_ports import NO_IPV6

OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)
EVERYWHERE = (*LOOPBACKS, *LOOPBACKS.values(), "localhost")  # hosts that every machine has
SERVE_FAILED = re.compile(r"Failed to bind to address '?(?P<place>[^';]+)")  # in Serve's words and in gRPC's
NODE = re.compile(r"\bip=(?P<ip>[^,)]+)")


def check_can_listen(server: ServerConfig) -> None:
    """Refuse a host or a port that cannot be bound on this machine.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    host, port = server.http_host, server.http_port
    try:
        socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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


def unbound_by_serve(server: ServerConfig, error: RayTaskError) -> TurnoutError | None:
    """What an error of Serve's proxy says of a field, with the node that it ran on; None: it is about something else.

    Serve leaves the system's reason out.
    """
    found = SERVE_FAILED.search(str(error))
    if found is None:
        return None
    node = NODE.search(str(error))
    where = f" on the node {node['ip']}" if node is not None else ""
    if found["place"] != f"{server.http_host}:{server.http_port}":
        return invalid("server.grpc_port", f"{server.grpc_port} cannot be bound{where}; choose one that is free there")
    if server.http_host in EVERYWHERE:
        return invalid("server.http_port", f"{server.http_port} cannot be bound{where}; choose one that is free there")
    place = host_port(server.http_host, server.http_port)
    allowed = "give a host that every node has, as 0.0.0.0, and a port that is free there"
    return invalid("server.http_host", f"{place} cannot be bound{where}; {allowed}")
