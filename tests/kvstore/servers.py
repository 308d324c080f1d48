"""Real servers for tests: alone, in a cluster, watched by a sentinel, behind TLS."""

from __future__ import annotations

import datetime
import ipaddress
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.redis import embedded
from kvstore.redis.nodes import Access, Connector, NodeAddress
from kvstore.redis.rights import rules
from turnout import free_ports

STARTS_S = 15.0


def until(condition: Callable[[], bool], within_s: float = STARTS_S) -> None:
    """Poll until something holds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def free_port() -> int:
    """A port that is free now, and so is the cluster's own port 10000 above it."""
    return free_ports.free_port(also=10_000)


class RedisProcess:
    """A server on a port and on a unix socket, without persistence.

    Args:
        folder: its own; short enough for a socket's path.
        settings: further lines of its configuration.
        sentinel: run as a sentinel.
        restricted: give its users the rights that the documentation asks for, and no more; `client` has all.
    """

    def __init__(self, folder: Path, *settings: str, sentinel: bool = False, restricted: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.endpoint = NodeAddress("127.0.0.1", free_port())
        self.socket = folder / "s"
        self._sentinel = sentinel
        self._admin = {"user": "admin", "password": "hidden"} if restricted else {}
        users = (f"user default on nopass {rules()}", "user admin on >hidden ~* &* +@all") if restricted else ()
        self._settings = (*settings, *users)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Over TCP."""
        return f"redis://{self.endpoint}"

    @property
    def unix_url(self) -> str:
        """Over the unix socket."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Start it, empty, on the same port, and wait for its first answer."""
        lines = [f"port {self.endpoint.port}", "bind 127.0.0.1", f"dir {self.folder}", f"logfile {self.folder}/log"]
        if not self._sentinel:
            lines += [f"unixsocket {self.socket}", 'save ""', "appendonly no"]
        config = self.folder / "conf"
        config.write_text("\n".join([*lines, *self._settings, ""]))
        command = [str(embedded.find_server()), str(config), *(["--sentinel"] if self._sentinel else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        until(self._answers)

    def client(self, **access: Any) -> Any:
        """A client of redis-py."""
        return Connector(Access(**access or self._admin)).client(self.endpoint, 5.0)

    def pause(self) -> None:
        """Stop it with SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            with socket.create_connection((self.endpoint.host, self.endpoint.port), 1) as connected:
                connected.sendall(b"PING\r\n")
                return bool(connected.recv(64))
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path, *settings: str, **how: bool) -> Iterator[RedisProcess]:
    """A server for as long as the block lasts."""
    process = RedisProcess(folder, *settings, **how)
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def redis_cluster(folder: Path, count: int = 3) -> Iterator[list[RedisProcess]]:
    """A cluster of masters without replicas that share the slots evenly."""
    settings = ("cluster-enabled yes", "cluster-node-timeout 5000", "cluster-require-full-coverage no")
    with ExitStack() as stack:
        nodes = [stack.enter_context(redis_server(folder / str(i), *settings)) for i in range(count)]
        clients = [stack.enter_context(closing(node.client())) for node in nodes]
        bounds = [16384 * i // count for i in range(count + 1)]
        for i, client in enumerate(clients):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
            client.execute_command("CLUSTER ADDSLOTS", *range(bounds[i], bounds[i + 1]))
            client.execute_command("CLUSTER MEET", nodes[0].endpoint.host, nodes[0].endpoint.port)

        def agreed() -> bool:
            infos = [client.execute_command("CLUSTER INFO") for client in clients]
            return all(info["cluster_state"] == "ok" and info["cluster_slots_assigned"] == "16384" for info in infos)

        until(agreed)
        yield nodes


def cluster_url(nodes: list[RedisProcess]) -> str:
    """For `parse_url`."""
    return "redis+cluster://" + ",".join(str(node.endpoint) for node in nodes)


@dataclass(frozen=True, slots=True)
class Watched:
    """A master, its replica, and the sentinel that watches them as `turnout`."""

    master: RedisProcess
    replica: RedisProcess
    sentinel: RedisProcess

    @property
    def url(self) -> str:
        """For `parse_url`."""
        return f"redis+sentinel://{self.sentinel.endpoint}/turnout"


@contextmanager
def redis_watched(folder: Path) -> Iterator[Watched]:
    """A master with a replica, and a sentinel that has found both."""
    with ExitStack() as stack:
        master = stack.enter_context(redis_server(folder / "m", "repl-diskless-sync yes", "repl-diskless-sync-delay 0"))
        where = f"{master.endpoint.host} {master.endpoint.port}"
        replica = stack.enter_context(redis_server(folder / "r", f"replicaof {where}"))
        sentinel = stack.enter_context(
            redis_server(
                folder / "s",
                f"sentinel monitor turnout {where} 1",
                "sentinel down-after-milliseconds turnout 400",
                "sentinel failover-timeout turnout 2000",
                sentinel=True,
            )
        )
        with closing(replica.client()) as client:
            until(lambda: client.info("replication").get("master_link_status") == "up")
        with closing(sentinel.client()) as client:
            until(lambda: int(client.sentinel_masters()["turnout"]["num-slaves"]) == 1)
        yield Watched(master, replica, sentinel)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: an authority, a server's certificate for 127.0.0.1, and a client's."""

    ca: str
    server_cert: str
    server_key: str
    client_cert: str
    client_key: str


def make_certificates(folder: Path) -> Certificates:
    """Fresh ones."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _sign("authority", ca_key.public_key(), "authority", ca_key, authority=True)
    paths = {"ca": _pem(folder / "ca.pem", ca)}
    for name in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(name, key.public_key(), "authority", ca_key, authority=False)
        paths[f"{name}_cert"] = _pem(folder / f"{name}.pem", certificate)
        path = folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        paths[f"{name}_key"] = str(path)
    return Certificates(**paths)


def _sign(subject: str, public: Any, issuer: str, key: Any, *, authority: bool) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    )
    signed: x509.Certificate = builder.sign(key, hashes.SHA256())
    return signed


def _pem(path: Path, certificate: x509.Certificate) -> str:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return str(path)


class TlsFront:
    """Speaks TLS on 127.0.0.1 for a server that cannot (those in packages are built without it).

    Args:
        target: the server.
        files: whose certificate it shows; clients must show one of the same authority.
    """

    def __init__(self, target: NodeAddress, files: Certificates) -> None:
        self._target = target
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
        self._context.load_cert_chain(files.server_cert, files.server_key)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = NodeAddress("127.0.0.1", self._listener.getsockname()[1])
        self._closed = False
        threading.Thread(target=self._accept, name="tls-front", daemon=True).start()

    @property
    def url(self) -> str:
        """For `parse_url`."""
        return f"rediss://{self.endpoint}"

    def close(self) -> None:
        """Take no more connections; open ones end with their client."""
        self._closed = True

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                if select.select([self._listener], [], [], 0.05)[0]:
                    client, _ = self._listener.accept()
                    threading.Thread(target=self._serve, args=(client,), name="tls-front", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # One thread for both ways: a TLS connection is not for two threads at once.
        with (
            suppress(OSError),
            client,
            self._context.wrap_socket(client, server_side=True) as encrypted,
            socket.create_connection((self._target.host, self._target.port)) as server,
        ):
            while True:
                ready = [encrypted] if encrypted.pending() else []
                ready = ready or select.select([encrypted, server], [], [])[0]
                for source in ready:
                    block = source.recv(1 << 18)
                    if not block:
                        return
                    (server if source is encrypted else encrypted).sendall(block)
