"""The embedded server: what it is set to, and that it never outlives its owner."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.redis.embedded import LONGEST_SOCKET, EmbeddedServer, find_server, read_version
from kvstore.redis.nodes import Opener, parse_url
from kvstore.redis.redis_store import RedisStore
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
        return store.write(os.urandom(8), [b"x"], 1000, time.monotonic() + 2)
    except Exception:
        return False
    finally:
        store.close()


def test_it_starts_on_a_socket_of_its_own_and_nowhere_else(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, 32 << 20) as server:
        assert server.url.startswith("unix:///")
        assert answers(server.url)
        client = Opener(server.address.access).client(server.address.endpoints[0], 5)
        config = client.config_get("*")
        client.close()
        socket_path = Path(server.address.endpoints[0].path)
        assert socket_path.stat().st_mode & 0o077 == 0
        assert (tmp_path / "redis.conf").stat().st_mode & 0o077 == 0
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
    client = Opener(server.address.access).client(server.address.endpoints[0], 5)
    pid = client.info("server")["process_id"]
    client.close()
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), 30)
    assert not server.running


def test_the_owner_sees_that_it_crashed(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, 16 << 20) as server:
        client = Opener(server.address.access).client(server.address.endpoints[0], 5)
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
        client.close()
        until(lambda: not server.running, 30)
        assert not answers(server.url)


def test_a_server_that_does_not_start_says_where_its_log_is(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match=r"did not start; see .*redis\.log"):
        EmbeddedServer(tmp_path, 16 << 20, executable=Path("/bin/false"))


def test_an_old_server_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0 malloc=libc'\n")
    old.chmod(0o700)
    assert read_version(old) == (5, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_server() != old
    old.write_text("#!/bin/sh\necho 'Redis server v=7.2.1 sha=0 malloc=jemalloc'\n")
    assert find_server() == old
