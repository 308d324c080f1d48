"""Address of Redis: the URL of the configuration, and connections to its nodes."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.base import StoreFault
from kvstore.redis.resp import Connection, ErrorReply, command
from kvstore.redis.streams import PlainStream, TlsStream, remaining
from turnout.addresses import host_port
from turnout.errors import TurnoutError, invalid

Kind = Literal["single", "sentinel", "cluster"]
URL_FIELD = "kvstore.url"
DEFAULT_PORTS: dict[Kind, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
KINDS: dict[str, Kind] = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}
# Name of the embedded server's socket, by which its clients know what it is.
SOCKET = "turnout-embedded.sock"
# A node that takes no connection within this time is not there.
CONNECT_S = 1.0
# Said without repeating what may be a piece of a password.
HINT = " (in a user name or password write / as %2F, @ as %40, : as %3A)"
ALLOWED = (
    "redis://, rediss:// (TLS), unix://, redis+sentinel://host:port,host:port/service, redis+cluster://host:port,..."
)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """One server: host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: trusted authorities (None: those of the machine), our certificate and key."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials, TLS files and database.

    Attributes:
        user: ACL user; None: the default one.
        password: None: none is sent.
        tls: None: in the clear.
        database: number; a cluster has only 0.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    database: int = 0

    @property
    def who(self) -> str:
        """For messages."""
        return f"user {self.user or 'default'!r}"


@dataclass(frozen=True, slots=True)
class Address:
    """All that a URL says.

    Attributes:
        kind: one server, sentinels that know the master, or nodes of a cluster.
        endpoints: of the server, the sentinels or some of the cluster's nodes.
        access: to the servers, and to sentinels that ask for a password.
        service: name of the master that the sentinels watch.
    """

    kind: Kind
    endpoints: tuple[NodeAddress, ...]
    access: Access = Access()
    service: str = ""

    def __str__(self) -> str:
        listed = ",".join(str(endpoint) for endpoint in self.endpoints)
        return f"{listed}/{self.service}" if self.service else listed


def parse_url(url: str, *, password_file: str | None = None, tls: TlsFiles | None = None) -> Address:
    """Read `kvstore.url` and what belongs to it.

    Args:
        url: `redis://[user[:password]@]host[:port][/database]`, `rediss://` with TLS, `unix://[user:password@]/path`,
            `redis+sentinel://host:port,host:port/service` and `redis+cluster://host:port,host:port` (both also with
            `rediss+`).
        password_file: holds the password, if the URL does not.
        tls: PEM files for a URL with TLS.

    Raises:
        TurnoutError: names the setting and what is allowed. No message repeats a password.
    """
    # A list of hosts is no host to urlsplit's port check, so the network part is read by hand.
    try:
        split = urlsplit(url)
    except ValueError:
        raise invalid(URL_FIELD, f"is no URL{HINT}; allowed: off, embedded, {ALLOWED}") from None
    base, _, suffix = split.scheme.partition("+")
    if base not in {"redis", "rediss", "unix"} or suffix not in KINDS or (base == "unix" and suffix):
        raise invalid(URL_FIELD, f"the scheme {split.scheme!r} is not known; allowed: off, embedded, {ALLOWED}")
    kind = KINDS[suffix]
    userinfo, _, hosts = split.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    query = dict(parse_qsl(split.query))
    unknown = sorted(query.keys() - {"db"})
    if unknown:
        raise invalid(URL_FIELD, f"the option {unknown[0]!r} is not known; allowed after '?': db")
    access = Access(
        user=unquote(user) or None,
        password=unquote(password) if colon else _read_password(password_file),
        tls=(tls or TlsFiles()) if base == "rediss" else None,
        database=_database(kind, split, query),
    )
    if base == "unix":
        if hosts or not split.path:
            raise invalid(URL_FIELD, "a unix socket is unix:///path/of/the/socket")
        return Address(kind, (NodeAddress(path=unquote(split.path)),), access)
    endpoints = tuple(_endpoint(part, DEFAULT_PORTS[kind]) for part in hosts.split(","))
    if kind == "single" and len(endpoints) > 1:
        raise invalid(URL_FIELD, "names several servers; write redis+cluster:// or redis+sentinel://")
    service = unquote(split.path.strip("/")) if kind == "sentinel" else ""
    if kind == "sentinel" and not service:
        raise invalid(URL_FIELD, "needs the name of the service: redis+sentinel://host:port,host:port/service")
    return Address(kind, endpoints, access, service)


def is_embedded(address: Address) -> bool:
    """Tell whether an address is the socket of an embedded server."""
    return any(Path(endpoint.path).name == SOCKET for endpoint in address.endpoints)


def _read_password(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        password = Path(path).expanduser().read_text(encoding="utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid("kvstore.password_file", f"{path} cannot be read: {error}") from error
    if not password:
        raise invalid("kvstore.password_file", f"{path} is empty")
    return password


def _database(kind: Kind, split: SplitResult, query: dict[str, str]) -> int:
    text = query.get("db", "")
    if kind == "single" and split.scheme != "unix":
        text = text or split.path.strip("/")
    if text and not text.isdigit():
        raise invalid(URL_FIELD, f"the database is not a number{HINT}")
    if kind == "cluster" and (split.path.strip("/") or int(text or 0)):
        raise invalid(URL_FIELD, "a cluster has no databases and no service: end after the last port")
    return int(text or 0)


def _endpoint(part: str, default_port: int) -> NodeAddress:
    host, colon, port = part.rpartition(":") if not part.endswith("]") else (part, "", "")
    if not colon:
        host, port = host or port, str(default_port)
    if ":" in host and not host.startswith("["):
        host = ""
    host = unquote(host).removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise invalid(URL_FIELD, f"every server is host:port, an IPv6 host in brackets{HINT}")
    return NodeAddress(host, int(port))


class Connector:
    """Factory of connections to the nodes of an address.

    redis-py would load the certificates anew for each TLS connection, which takes 50 ms or more of a request's time,
    and its timeout counts for each receive of the replies to AUTH and SELECT.

    Args:
        access: credentials.

    Raises:
        TurnoutError: a file of `access.tls` is missing or holds something else; the setting is named.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self._context = None if access.tls is None else _tls_context(access.tls)

    def __call__(self, endpoint: NodeAddress, deadline: float) -> Connection:
        """Connect and log in.

        Raises:
            StoreFault: unreachable or late; refused when TLS, the user or the password is not accepted.
        """
        connected = self._connect(endpoint, min(deadline, time.monotonic() + CONNECT_S))
        stream = TlsStream(connected) if isinstance(connected, ssl.SSLSocket) else PlainStream(connected)
        connection = Connection(stream)
        try:
            self._greet(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def client(self, endpoint: NodeAddress, timeout_s: float) -> Any:
        """Make a client of redis-py for work off the request path: checks, administration, measurements.

        Its timeout counts for each receive, so it bounds nothing in total.
        """
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "username": self.access.user,
            "password": self.access.password,
            "db": self.access.database,
        }
        if endpoint.path:
            return redis.Redis(unix_socket_path=endpoint.path, **options)
        return redis.Redis(host=endpoint.host, port=endpoint.port, **options, **self.tls_options())

    def tls_options(self) -> dict[str, Any]:
        """Return the TLS settings by redis-py's names."""
        if self.access.tls is None:
            return {}
        files = self.access.tls
        return {
            "ssl": True,
            "ssl_ca_certs": files.ca,
            "ssl_certfile": files.cert,
            "ssl_keyfile": files.key,
            "ssl_check_hostname": True,
        }

    def _connect(self, endpoint: NodeAddress, deadline: float) -> socket.socket:
        try:
            if endpoint.path:
                connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                return _or_close(connected, lambda: _connect_unix(connected, endpoint.path, deadline))
            connected = socket.create_connection((endpoint.host, endpoint.port), remaining(deadline))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connected if self._context is None else self._encrypt(connected, endpoint, deadline)
        except TimeoutError:
            raise StoreFault("unreachable", f"{endpoint} took no connection in time") from None
        except OSError as error:
            raise StoreFault("unreachable", f"{endpoint} cannot be reached: {error.strerror or error}") from error

    def _encrypt(self, connected: socket.socket, endpoint: NodeAddress, deadline: float) -> socket.socket:
        context = self._context
        assert context is not None
        connected.settimeout(remaining(deadline))
        try:
            return _or_close(connected, lambda: context.wrap_socket(connected, server_hostname=endpoint.host))
        except ssl.SSLCertVerificationError as error:
            reason = f"{endpoint} is not trusted: {error.verify_message}; see kvstore.tls_ca_file"
            raise StoreFault("refused", reason) from error
        except TimeoutError:
            hint = "is it a server without TLS (redis://)?"
            raise StoreFault("unreachable", f"{endpoint} did not agree on TLS in time; {hint}") from None
        except ssl.SSLEOFError:
            raise StoreFault("unreachable", f"{endpoint} closed the connection while TLS was agreed on") from None
        except ssl.SSLError as error:
            hint = "; is it a server without TLS (redis://)?" if error.reason == "WRONG_VERSION_NUMBER" else ""
            raise StoreFault("refused", f"TLS with {endpoint} failed: {error.reason or error}{hint}") from error

    def _greet(self, connection: Connection, deadline: float) -> None:
        access = self.access
        words: list[tuple[bytes | int | str, ...]] = []
        if access.password is not None:
            words.append(("AUTH", access.user, access.password) if access.user else ("AUTH", access.password))
        if access.database:
            words.append(("SELECT", access.database))
        if not words:
            return
        connection.send([command(*each) for each in words], len(words), deadline)
        for reply in connection.replies(len(words), deadline):
            if isinstance(reply, ErrorReply):
                raise StoreFault("refused", f"the server refused {access.who}: {reply.text}")


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except OSError as error:
        raise _unusable("kvstore.tls_ca_file", files.ca, error) from error
    if files.cert is not None:
        try:
            context.load_cert_chain(files.cert, files.key)
        except OSError as error:
            raise _unusable("kvstore.tls_cert_file", files.cert, error) from error
    return context


def _unusable(setting: str, path: str | None, error: OSError) -> TurnoutError:
    return invalid(setting, f"{path} is not usable: {error.strerror or error}")


def _connect_unix(connected: socket.socket, path: str, deadline: float) -> socket.socket:
    connected.settimeout(remaining(deadline))
    connected.connect(path)
    return connected


def _or_close(connected: socket.socket, step: Callable[[], socket.socket]) -> socket.socket:
    try:
        return step()
    except BaseException:
        connected.close()
        raise
