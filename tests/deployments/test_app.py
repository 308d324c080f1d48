from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

import deployments.app
import deployments.cluster
from deployments.app import start, start_serve
from deployments.listening import check_can_listen
from tests.deployments.in_process import make_config
from turnout.config import RayConfig
from turnout.errors import Code, TurnoutError
from turnout.free_ports import free_port


def test_front_ends_do_not_import_torch() -> None:
    """In one process: each adds to what those before it imported, so that whose import it is stands in the error."""
    modules = ["turnout.client", "deployments.grpc_wire", "deployments.ingress", "deployments.app"]
    code = (
        "import sys, importlib\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def refused(**server: object) -> TurnoutError:
    """What `start` says of where it is to listen, before anything is started."""
    with pytest.raises(TurnoutError) as refusal:
        start(make_config(**{"grpc_port": free_port(), "http_port": free_port(), **server}))
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert "\n" not in refusal.value.message
    return refusal.value


@contextmanager
def listener(host: str) -> Iterator[int]:
    """The port of a server that listens on a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        yield taken.getsockname()[1]


NEEDS_IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
V6, ALL_V6 = (pytest.param(host, marks=NEEDS_IPV6) for host in ("::1", "::"))


@pytest.mark.parametrize("taken", ["127.0.0.1", "0.0.0.0", V6, ALL_V6])
def test_a_port_of_grpc_in_use_is_refused_by_name(taken: str) -> None:
    with listener(taken) as port:
        error = refused(grpc_port=port)
    assert error.field == "server.grpc_port"
    assert error.message.startswith(f"server.grpc_port: {port} is in use (")


@pytest.mark.parametrize(
    ("host", "taken", "shown"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "0.0.0.0", "localhost"),
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        pytest.param("::1", "::1", "[::1]", marks=NEEDS_IPV6),
        pytest.param("::1", "::", "[::1]", marks=NEEDS_IPV6),
        pytest.param("::", "::1", "[::]", marks=NEEDS_IPV6),
    ],
)
def test_a_port_of_http_in_use_is_refused_by_name(host: str, taken: str, shown: str) -> None:
    with listener(taken) as port:
        error = refused(http_host=host, http_port=port)
    assert error.field == "server.http_port"
    assert error.message.startswith(f"server.http_port: {port} is in use ({shown}:{port}); choose another port")


@pytest.mark.parametrize(
    "host",
    [
        "no.such.host.invalid",
        "192.0.2.1",
        "[::1]",
        "x" * 70,
        "a..b",
        "a b",
        pytest.param("2001:db8::1", marks=NEEDS_IPV6),
    ],
)
def test_a_host_that_cannot_be_bound_is_refused_by_name(host: str) -> None:
    error = refused(http_host=host)
    assert error.field == "server.http_host"
    assert error.message.startswith(f"server.http_host: {host!r} cannot be bound: ")


@pytest.mark.parametrize("field", ["grpc_port", "http_port"])
def test_a_port_that_only_others_may_bind_is_refused_by_name(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, address: tuple[str, int]) -> None:
        if address[1] == 80:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert f"server.{field}: 80 cannot be bound (" in refused(**{field: 80}).message


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_machine_without_ipv6_is_enough(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = list[str]()

    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(number, os.strerror(number))
        bound.append(address[0])

    monkeypatch.setattr(socket.socket, "bind", bind)
    check_can_listen(make_config(grpc_port=9000, http_port=8000).server)
    assert bound == ["127.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1"), pytest.param("::1", "http://[::1]", marks=NEEDS_IPV6),
     pytest.param("::", "http://[::1]", marks=NEEDS_IPV6), ("0.0.0.0", "http://127.0.0.1")],
)  # fmt: skip
def test_the_url_of_a_server_can_be_used_as_it_is(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments.app, "start_local_ray", lambda config: None)
    monkeypatch.setattr(deployments.app, "check_room", lambda *_: [])
    monkeypatch.setattr(deployments.app, "node_offers", list)
    monkeypatch.setattr(deployments.app, "start_store", lambda config: (config, None))
    monkeypatch.setattr(deployments.app, "run_app", lambda *_, **__: None)
    port = free_port()
    server = start(make_config(grpc_port=free_port(), http_port=port, http_host=host))
    assert server.http_url == f"{url}:{port}"


@pytest.mark.parametrize(
    ("here", "host", "grpc", "http"),
    [
        ("fd00::2", "::", "[fd00::2]:9000", "http://[fd00::2]:8000"),
        ("10.0.0.7", "0.0.0.0", "10.0.0.7:9000", "http://10.0.0.7:8000"),
        ("10.0.0.7", "::1", "10.0.0.7:9000", "http://[::1]:8000"),
    ],
)
def test_the_addresses_on_a_cluster_can_be_used_as_they_are(
    here: str, host: str, grpc: str, http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_check_listening", "check_nodes", "check_clocks", "node_offers", "growth", "run_app"):
        monkeypatch.setattr(deployments.cluster, name, lambda *_, **__: None)
    monkeypatch.setattr(deployments.cluster, "check_room", lambda *_: [])
    monkeypatch.setattr(deployments.cluster, "applications", dict)
    monkeypatch.setattr(deployments.cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="h:1"))
    monkeypatch.setattr(deployments.cluster.ray.util, "get_node_ip_address", lambda: here)
    server = deployments.cluster.deploy(make_config(grpc_port=9000, http_port=8000, http_host=host), "auto")
    assert (server.grpc_address, server.http_url) == (grpc, http)


SERVE = "ray::ProxyActor.ready() (pid=7, ip=10.0.0.9, actor_id=1f)\n  File 'proxy.py', line 1807\nRuntimeError: "
GRPC = (
    "Failed to bind to address [::]:9000; set GRPC_VERBOSITY=debug environment variable to see detailed error message."
)


@pytest.mark.parametrize("was_there", [True, False])
@pytest.mark.parametrize(
    ("host", "said", "line"),
    [
        ("10.0.0.8", "Failed to bind to address '10.0.0.8:8000'.", "server.http_host: 10.0.0.8:8000 cannot be bound"),
        ("fd00::2", "Failed to bind to address 'fd00::2:8000'.", "server.http_host: [fd00::2]:8000 cannot be bound"),
        ("0.0.0.0", "Failed to bind to address '0.0.0.0:8000'.", "server.http_port: 8000 cannot be bound"),
        ("::", "Failed to bind to address ':::8000'.", "server.http_port: 8000 cannot be bound"),
        ("::", GRPC, "server.grpc_port: 9000 cannot be bound"),
        ("::", "something else", ""),
    ],
)
def test_what_a_node_of_a_cluster_cannot_bind_is_named_and_not_tried_forever(
    host: str, said: str, line: str, was_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[bool]()

    def fail(**_: object) -> None:
        raise RayTaskError("ready", SERVE + said, RuntimeError(said)).as_instanceof_cause()

    monkeypatch.setattr(deployments.app.serve, "start", fail)
    monkeypatch.setattr(deployments.app.serve, "shutdown", lambda: ended.append(True))
    monkeypatch.setattr(deployments.app, "serve_runs", lambda: was_there)
    config = make_config(grpc_port=9000, http_port=8000, http_host=host)
    expected = f"{line} on the node 10.0.0.9;" if line else said
    with pytest.raises(TurnoutError if line else RayTaskError, match=re.escape(expected)):
        start_serve(config)
    assert ended == ([] if was_there else [True])


def test_a_folder_of_ray_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make_config(grpc_port=free_port(), http_port=free_port())
    folder = str(tmp_path / "file" / "ray")
    with pytest.raises(TurnoutError, match=rf"^ray\.temp_dir: cannot write {folder}: Not a directory; name a folder"):
        start(config.model_copy(update={"ray": RayConfig(temp_dir=folder)}))


@pytest.mark.parametrize("named", [True, False])
def test_a_full_disk_for_ray_is_refused_by_name(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("mkdtemp", "TemporaryFile"):
        monkeypatch.setattr(deployments.app.tempfile, name, refuse)
    config = make_config(grpc_port=free_port(), http_port=free_port())
    ray = RayConfig(temp_dir=str(tmp_path) if named else None)
    what = str(tmp_path) if named else "temporary files"
    with pytest.raises(TurnoutError, match=rf"^ray\.temp_dir: cannot write {what}: No space left on device; name"):
        start(config.model_copy(update={"ray": ray}))


def test_a_cluster_too_small_for_the_pools_is_refused() -> None:
    config = make_config(grpc_port=free_port(), http_port=free_port())
    pool = config.pools["demo"].model_copy(update={"replicas": 2})
    small = config.model_copy(update={"pools": {"demo": pool}, "ray": RayConfig(num_cpus=1)})
    with pytest.raises(TurnoutError) as refusal:
        start(small)
    assert refusal.value.field == "ray.num_cpus"
