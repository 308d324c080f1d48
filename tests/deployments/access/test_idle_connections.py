"""Connections that say nothing, or half of a request: nobody else notices."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from deployments.app import RunningServer
from deployments.pool_options import ingress_options
from experiments.process_memory import own_bytes
from tests.deployments.access.kit import House, Served, house, served
from tests.deployments.conftest import served_config
from turnout.client import Client

# In a process of their own: each end of a connection is an open file.
CLIENTS = """
import resource, socket, sys
port, count, every = map(int, sys.argv[1:4])
half = bytes.fromhex(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = []
for number in range(count):
    opened.append(socket.create_connection(("127.0.0.1", port)))
    if number % every == 0:
        opened[-1].sendall(half)
sys.stdout.write("open\\n")
sys.stdout.flush()
sys.stdin.read()
"""

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
# How a connection of HTTP/2 begins: empty settings, and then the first half of a frame of headers.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000") + bytes.fromhex("00002001")


@pytest.fixture
def at(tmp_path: Path) -> Iterator[tuple[House, Served]]:
    with house(tmp_path, {"acme": {}}) as made, served(made.service) as server:
        yield made, server


@contextmanager
def files(needed: int) -> Iterator[None]:
    """So many open files are allowed; the machine must let a process have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= needed, f"ulimit -Hn is {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def idle(port: int, count: int, half: bytes = HEAD, every: int = 2) -> Iterator[None]:
    """So many connections are there for as long as the context lasts; every second one has sent half of a request."""
    command = [sys.executable, "-c", CLIENTS, str(port), str(count), str(every), half.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        assert clients.stdout.readline() == "open\n"
        yield
        clients.communicate()


def listener(port: int) -> tuple[int, int]:
    """The process that listens on a port, and how many files it has open."""
    tables = [Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        held = list(_files(folder))
        if sockets & set(held):
            return int(folder.parts[2]), len(held)
    raise AssertionError(f"nobody listens on {port}")


def _files(folder: Path) -> Iterator[str]:
    """What its descriptors are; some close meanwhile."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                yield str(path.readlink())


def assert_answered(url: str, key: str) -> None:
    """A request over a connection of its own gets its answer."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "demo", "prompt": "hi", "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "abc"


def assert_answered_over_grpc(address: str) -> None:
    """The same over gRPC."""
    with Client(address) as client:
        assert client.generate("hi", model="demo", max_tokens=3).text == "abc"


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_idle_connections_hold_up_nobody(at: tuple[House, Served], count: int) -> None:
    url, key = at[1].url, at[0].keys["acme"]
    with files(count + 200):
        assert_answered(url, key)
        before = own_bytes(os.getpid())
        with idle(at[1].http_port, count):
            assert_answered(url, key)
            assert (own_bytes(os.getpid()) - before) / count < 50_000 + 30e6 / count
        assert_answered(url, key)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_idle_connections_to_what_is_served_hold_up_nobody(server: RunningServer, count: int) -> None:
    """The same of the proxy that Serve has in front of the ingress."""
    url = server.http_url
    port = int(url.rpartition(":")[2])
    assert_answered(url, "nobody")
    pid, held = listener(port)
    before = own_bytes(pid)
    with idle(port, count):
        assert_answered(url, "nobody")
        assert listener(port)[1] >= held + 0.9 * count  # some that were open before may be closed now
        assert (own_bytes(pid) - before) / count < 50_000 + 30e6 / count
    assert_answered(url, "nobody")


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_idle_connections_to_the_grpc_port_hold_up_nobody(server: RunningServer, count: int) -> None:
    address, port = server.grpc_address, int(server.grpc_address.rpartition(":")[2])
    assert_answered_over_grpc(address)
    pid, held = listener(port)
    before = own_bytes(pid)
    with idle(port, count, PREFACE):
        assert_answered_over_grpc(address)
        assert listener(port)[1] >= held + 0.9 * count  # some that were open before may be closed now
        assert (own_bytes(pid) - before) / count < 100_000 + 30e6 / count
    assert_answered_over_grpc(address)


def test_bodies_that_do_not_come_hold_up_nobody(server: RunningServer) -> None:
    """More of them than the ingress takes requests at once; they are of the same tenant as the one that is answered."""
    url, places = server.http_url, ingress_options(served_config())["max_ongoing_requests"]
    count = places + 200
    with files(count + 200), idle(int(url.rpartition(":")[2]), count, HEAD + b"Content-Length: 4000\r\n\r\n{", every=1):
        assert_answered(url, "nobody")
