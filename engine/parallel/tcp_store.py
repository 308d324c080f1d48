"""Where processes of torch.distributed meet: stores that listen on one address of this machine, not on all it has."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that holds a port from now on; connecting clients wait until it is taken over.

    Args:
        address: of this machine, as the others reach it.
        port: 0: any that is free.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def host_store(listener: socket.socket, timeout_s: float) -> TCPStore:
    """A store for others to meet in; it lasts as long as the object.

    Args:
        listener: from `listen`; taken over.
        timeout_s: longest time one of its operations waits.
    """
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
