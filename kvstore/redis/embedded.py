"""A Valkey (or Redis) server of our own for a local run: it starts and ends with the run, however that ends."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from kvstore.base import StoreFault
from kvstore.redis.executables import ServerVersion, find_server, read_version
from kvstore.redis.nodes import SOCKET, Access, Address, Connector, parse_url
from kvstore.redis.resp import ErrorReply, command
from kvstore.redis.rights import rules_without_eval
from kvstore.scripts import SCRIPTS
from turnout.errors import Code, TurnoutError

ADMIN, LOADER = "admin", "loader"
# A path of a unix socket must fit into 108 bytes with its end.
LONGEST_SOCKET = 100
STOP_S = 5.0

# The shell is the server's parent. When our end of the pipe closes, because we close it or because we are gone, the
# server is asked to end; when the server ends by itself, so does the shell. No signal reaches a process whose number
# was given to another, as the shell has not yet waited for it.
_SHELL = """
exec 3<&0
"$@" 3<&- </dev/null &
server=$!
{ read -r _ <&3; kill "$server"; } 2>/dev/null &
watcher=$!
exec 3<&-
wait "$server"
status=$?
kill "$watcher" 2>/dev/null
exit "$status"
"""


class EmbeddedServer:
    """A running server: a unix socket that only this user may use, no port unless asked for.

    It keeps nothing on disk, and evicts by expiry when `memory_bytes` are full. It ends when `stop` is called, and
    when this process ends in any way. Its clients may run the store's commands and scripts on the store's keys and
    nothing else; the scripts are loaded at start, by a user that is removed after that.

    Args:
        folder: for its configuration, log and socket; made if missing. The socket is elsewhere if the path is long.
        memory_bytes: limit of its memory.
        port: also listen there on 127.0.0.1, behind a random password; None: on the socket only.
        executable: the server to run; None: see `find_server`.
        startup_s: seconds until it must answer.
        admin: have a user with all rights, for tests and measurements.

    Attributes:
        url: where it is: its port, or its socket when it has none.
        socket_url: its socket.
        admin_url: its socket, for the user with all rights; None: there is no such user.
        log: its log file.
        version: of the server.

    Raises:
        TurnoutError: there is no usable server, or it does not answer; says where its log is.
    """

    def __init__(
        self,
        folder: Path,
        memory_bytes: int,
        *,
        port: int | None = None,
        executable: Path | None = None,
        startup_s: float = 5.0,
        admin: bool = False,
    ) -> None:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        executable = executable or find_server()
        self.version: ServerVersion | None = read_version(executable)
        self.log = folder / "server.log"
        self._own: Path | None = None
        socket_path = folder / SOCKET
        if len(bytes(socket_path)) > LONGEST_SOCKET:
            self._own = Path(tempfile.mkdtemp(prefix="turnout-"))
            socket_path = self._own / SOCKET
        self._socket = socket_path
        password = secrets.token_urlsafe(32) if port is not None else None
        secret = {name: secrets.token_urlsafe(32) for name in (LOADER, *([ADMIN] if admin else []))}
        config = folder / "server.conf"
        config.touch(mode=0o600)
        config.chmod(0o600)
        lines = [*self._settings(folder, memory_bytes, port), *_users(password, secret)]
        config.write_text("\n".join([*lines, ""]), encoding="utf-8")
        at = quote(str(socket_path))
        userinfo = f":{password}@" if password else ""
        self.socket_url = f"unix://{userinfo}{at}"
        self.admin_url = f"unix://{ADMIN}:{secret[ADMIN]}@{at}" if admin else None
        self.url = f"redis://{userinfo}127.0.0.1:{port}" if port is not None else self.socket_url
        self._address = parse_url(self.socket_url)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, "sh", str(executable), str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for us: we end the server when we no longer need it.
            start_new_session=True,
        )
        try:
            self._load_scripts(Access(LOADER, secret[LOADER]), startup_s)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> Address:
        """Where it is, over its socket."""
        return self._address

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and remove its socket; later calls do nothing."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            # It may be stopped by a signal and hear nothing: end shell and server.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.unlink(missing_ok=True)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _settings(self, folder: Path, memory_bytes: int, port: int | None) -> list[str]:
        lines = [
            f"port {port or 0}",
            "bind 127.0.0.1",
            f'unixsocket "{self._socket}"',
            "unixsocketperm 700",
            f'dir "{folder}"',
            f'logfile "{self.log}"',
            "databases 1",
            "daemonize no",
            'save ""',
            "appendonly no",
            f"maxmemory {memory_bytes}",
            # With the life of a value renewed at each read, this is an exact LRU that spares pinned keys.
            "maxmemory-policy volatile-ttl",
            "maxmemory-samples 10",
            "lazyfree-lazy-eviction yes",
            "lazyfree-lazy-expire yes",
            "lazyfree-lazy-server-del yes",
            # Unread replies count as memory, and would evict values.
            "client-output-buffer-limit normal 64mb 32mb 10",
        ]
        if self.version is not None and self.version.numbers >= (7, 0):
            lines.append("maxmemory-clients 64mb")
        return lines

    def _load_scripts(self, loader: Access, startup_s: float) -> None:
        """Wait for its first answer, give it the store's scripts, and remove the user who may do that."""
        connector = Connector(loader)
        commands = [command("SCRIPT", "LOAD", text) for text in SCRIPTS] + [command("ACL", "DELUSER", LOADER)]
        deadline = time.monotonic() + startup_s
        while time.monotonic() < deadline and self.running:
            try:
                connection = connector(self._address.endpoints[0], deadline)
            except StoreFault:
                time.sleep(0.003)
                continue
            try:
                connection.send(commands, len(commands), deadline)
                replies = connection.replies(len(commands), deadline)
                refused = [each.text for each in replies if isinstance(each, ErrorReply)]
            except StoreFault as fault:
                refused = [str(fault)]
            finally:
                connection.close()
            if not refused:
                return
            raise self._failed(f"did not take the store's scripts: {refused[0]}")
        raise self._failed(f"did not answer within {startup_s:g} s" if self.running else "did not start")

    def _failed(self, what: str) -> TurnoutError:
        name = self.version or "store"
        return TurnoutError(Code.UNAVAILABLE, f"the embedded {name} {what}; see {self.log}{_last_line(self.log)}")


def _users(password: str | None, secret: Mapping[str, str]) -> list[str]:
    """Write the users of the configuration: the default one, the loader of scripts, the administrator.

    Args:
        password: of the default user; None: the socket's permissions are enough.
        secret: passwords of the others.
    """
    lines = [
        f"user default on {_hashed(password) if password else 'nopass'} {rules_without_eval()}",
        f"user {LOADER} on {_hashed(secret[LOADER])} resetchannels -@all +script|load +acl|deluser",
    ]
    if ADMIN in secret:
        lines.append(f"user {ADMIN} on {_hashed(secret[ADMIN])} ~* &* +@all")
    return lines


def _hashed(password: str) -> str:
    return "#" + hashlib.sha256(password.encode()).hexdigest()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" (its last line: {lines[-1]})" if lines else ""
