"""The edge with client certificates: the words that `ops/edge/haproxy.cfg` names for it, in a running HAProxy."""

from __future__ import annotations

import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from ray.serve._private.haproxy import get_haproxy_binary

from tests.launch.test_edge import Server, adapted, write_certificate
from turnout.client import Client
from turnout.errors import Code, TurnoutError
from turnout.free_ports import free_port


def mutual(text: str, clients: Path) -> str:
    """The file with its own remark about client certificates followed."""
    [words] = re.findall(r"add `(ca-file \S+ verify required)`", text)
    words = words.replace("/etc/turnout/clients.pem", str(clients))
    text, bound = re.subn(r"(    bind 127\.0\.0\.1.*)", rf"\1 {words}", text)
    assert bound == 1
    return text


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path, Path]]:
    """Port of a running edge, the certificate to trust, and a client's certificate with its key."""
    folder, theirs = tmp_path_factory.mktemp("edge"), tmp_path_factory.mktemp("client")
    certificate, trusted = write_certificate(folder)
    client, signer = write_certificate(theirs)
    server, port = Server(), free_port()
    (folder / "haproxy.cfg").write_text(mutual(adapted(server, port, certificate), signer), encoding="utf-8")
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        deadline = time.monotonic() + 20
        while not answers(port, context(trusted, client)):
            assert process.poll() is None
            assert time.monotonic() < deadline, "the edge does not answer"
            time.sleep(0.1)
        yield port, trusted, client
    finally:
        process.kill()
        process.wait()
        server.stop()


def context(trusted: Path, client: Path | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(trusted))
    if client is not None:
        made.load_cert_chain(client)
    return made


def answers(port: int, tls: ssl.SSLContext) -> bool:
    try:
        return httpx.get(f"https://localhost:{port}/healthz", verify=tls).status_code == 200
    except httpx.TransportError:
        return False


def test_http_needs_a_certificate_of_the_right_signer(edge: tuple[int, Path, Path], tmp_path: Path) -> None:
    port, trusted, client = edge
    assert answers(port, context(trusted, client))
    assert not answers(port, context(trusted, None))
    stranger, _ = write_certificate(tmp_path)
    assert not answers(port, context(trusted, stranger))


def test_grpc_needs_one_too(edge: tuple[int, Path, Path]) -> None:
    port, trusted, client = edge
    pem = client.read_bytes()
    end = b"-----END CERTIFICATE-----\n"
    certificate, key = pem[: pem.index(end) + len(end)], pem[pem.index(end) + len(end) :]
    known = grpc.ssl_channel_credentials(trusted.read_bytes(), key, certificate)
    with Client(f"localhost:{port}", known) as mine:
        assert mine.models(10)[0].name == "demo"
    with (
        Client(f"localhost:{port}", grpc.ssl_channel_credentials(trusted.read_bytes())) as theirs,
        pytest.raises(TurnoutError) as refused,
    ):
        theirs.models(10)
    assert refused.value.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
