"""The edge that ends TLS: HAProxy as it comes with Ray, with our file, in front of a server of ours."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fastapi import Request
from ray.serve._private.haproxy import get_haproxy_binary

from deployments.grpc_server import GrpcServicer
from deployments.grpc_wire import add_to_server
from deployments.http import build_http
from tests.deployments.in_process import make_service
from turnout.client import AsyncClient, Client
from turnout.free_ports import free_port
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub

CONSOLE = Path(__file__).parents[2] / "deployments" / "console" / "static"
FILE = Path(__file__).parents[2] / "ops" / "edge" / "haproxy.cfg"


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost: with its key, for the edge; alone, for clients."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    both, alone = folder / "edge.pem", folder / "certificate.pem"
    both.write_bytes(pem + secret)
    alone.write_bytes(pem)
    return both, alone


class Servicer(GrpcServicer):
    """As Serve offers it: what it does not have is looked for only when it is called."""

    List = None


async def _headers_of(request: Request) -> dict[str, str]:
    return dict(request.headers)


class Server:
    """Our gRPC and HTTP endpoints over a fake pool, in a thread; as Serve's proxy it answers /-/healthz."""

    def __init__(self) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self.ready.wait(30)

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        service = make_service()
        servicer = Servicer()
        servicer.service = service
        rpc = grpc.aio.server()
        add_to_server(servicer, rpc)
        rpc.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        await rpc.start()
        app = build_http(service)
        app.add_api_route("/-/healthz", lambda: "success")
        app.add_api_route("/headers", _headers_of)
        http = uvicorn.Server(uvicorn.Config(app, port=self.http_port, log_level="error"))
        serving = asyncio.ensure_future(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        self.ready.set()
        await self._stop.wait()
        http.should_exit = True
        await serving
        await rpc.stop(0)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.loop.close()


def adapted(server: Server, port: int, certificate: Path) -> str:
    """Our file with this machine's addresses in it: one node that is there, and one that is not."""
    text = FILE.read_text(encoding="utf-8").replace("/etc/turnout/edge.pem", str(certificate))
    text, bound = re.subn(r"bind :443 ", f"bind 127.0.0.1:{port} ", text)
    text, nodes = re.subn(r"10\.0\.0\.11:9000", f"127.0.0.1:{server.grpc_port}", text)
    text, others = re.subn(r"10\.0\.0\.11:8000", f"127.0.0.1:{server.http_port}", text)
    text = text.replace("10.0.0.12:9000", f"127.0.0.1:{free_port()}").replace(
        "10.0.0.12:8000", f"127.0.0.1:{free_port()}"
    )
    text, limits = re.subn(r"timeout http-request 30s", "timeout http-request 2s", text)
    assert (bound, nodes, others, limits) == (1, 1, 1, 1)
    return text


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Port of a running edge, and the certificate to trust."""
    folder = tmp_path_factory.mktemp("edge")
    certificate, trusted = write_certificate(folder)
    server, port = Server(), free_port()
    (folder / "haproxy.cfg").write_text(adapted(server, port, certificate), encoding="utf-8")
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                context = ssl.create_default_context(cafile=str(trusted))
                if httpx.get(f"https://localhost:{port}/healthz", verify=context).status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None
            assert time.monotonic() < deadline, "the edge does not answer"
            time.sleep(0.1)
        yield port, trusted
    finally:
        process.kill()
        process.wait()
        server.stop()


def test_haproxy_accepts_the_file_and_refuses_a_misspelt_one(tmp_path: Path) -> None:
    certificate, _ = write_certificate(tmp_path)
    text = FILE.read_text(encoding="utf-8").replace("/etc/turnout/edge.pem", str(certificate))
    for fault, accepted in [("", True), ("    timeout clint 5s\n", False)]:
        (tmp_path / "haproxy.cfg").write_text(text + fault, encoding="utf-8")
        command = [get_haproxy_binary(), "-c", "-f", str(tmp_path / "haproxy.cfg")]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (checked.returncode == 0) == accepted, checked.stderr


def test_grpc_through_the_edge(edge: tuple[int, Path]) -> None:
    port, trusted = edge
    credentials = grpc.ssl_channel_credentials(trusted.read_bytes())
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        stub = GenerationStub(channel)
        assert [each.name for each in stub.ListModels(pb.ListModelsRequest()).models][:1] == ["demo"]
        request = pb.GenerateRequest(prompt="slow", sampling=pb.Sampling(max_tokens=4))
        parts = list(stub.StreamGenerate(request))
        assert len(parts) > 1
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(pb.GenerateRequest(model="nobody", prompt="x"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_clients_ask_for_health_through_the_edge(edge: tuple[int, Path]) -> None:
    port, trusted = edge
    credentials = grpc.ssl_channel_credentials(trusted.read_bytes())

    async def ask() -> tuple[bool, str]:
        async with AsyncClient(f"localhost:{port}", credentials) as client:
            return await client.healthy(10), (await client.models(10))[0].name

    with Client(f"localhost:{port}", credentials) as client:
        assert (client.healthy(10), client.models(10)[0].name) == asyncio.run(ask()) == (True, "demo")


def test_http_through_the_edge(edge: tuple[int, Path]) -> None:
    port, trusted = edge
    context = ssl.create_default_context(cafile=str(trusted))
    with httpx.Client(base_url=f"https://localhost:{port}", verify=context) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        body = {"model": "demo", "prompt": "one two", "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "path",
    ["/status", "/metrics", "/-/healthz", "/-/routes", "/%73tatus", "/%6detrics", "/%2d/healthz", "/-%2froutes"],
)
def test_what_the_cluster_says_of_itself_stays_inside(edge: tuple[int, Path], path: str) -> None:
    port, trusted = edge
    context = ssl.create_default_context(cafile=str(trusted))
    assert httpx.get(f"https://localhost:{port}{path}", verify=context).status_code == 403


def test_what_the_console_asks_for_comes_through_the_edge(edge: tuple[int, Path]) -> None:
    port, trusted = edge
    context = ssl.create_default_context(cafile=str(trusted))
    texts = [file.read_text(encoding="utf-8") for file in CONSOLE.glob("*.js")]
    asked = [path for text in texts for path in re.findall(r'(?<!\.)\bget\("([^"]+)"', text)]
    assert "v1/status" in asked
    for path in asked:
        answer = httpx.get(f"https://localhost:{port}/{path}", verify=context)
        assert answer.status_code in (200, 404), (path, answer.text)


def test_clients_cannot_tell_serve_how_long_to_wait(edge: tuple[int, Path]) -> None:
    port, trusted = edge
    context = ssl.create_default_context(cafile=str(trusted))
    sent = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1", "x-other": "kept"}
    got = httpx.get(f"https://localhost:{port}/headers", verify=context, headers=sent).json()
    assert {name for name in got if name.startswith("x-")} == {"x-other"}


def test_a_body_that_does_not_come_is_given_up_by_the_edge(edge: tuple[int, Path]) -> None:
    port, trusted = edge
    context = ssl.create_default_context(cafile=str(trusted))
    with context.wrap_socket(socket.create_connection(("localhost", port)), server_hostname="localhost") as held:
        held.settimeout(20)
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n{")
        answer = held.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 408 "), answer


def test_without_tls_nobody_gets_in(edge: tuple[int, Path]) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://localhost:{edge[0]}/v1/models")
    with grpc.insecure_channel(f"localhost:{edge[0]}") as channel, pytest.raises(grpc.RpcError) as refused:
        GenerationStub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
