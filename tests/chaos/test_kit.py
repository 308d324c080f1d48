"""The chaos kit on processes and a namespace of its own; tests/chaos/test_short.py uses it on a cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ops.chaos import kit

SLEEPER = "import time; time.sleep(600)"


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def node() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process that carries the tag of a node and the title of a proxy, and has a child without either."""
    tag = f"/nowhere/{os.getpid()}:node-1"
    child = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {SLEEPER!r}], env={{}})"
    process = subprocess.Popen(
        ["ray::ProxyActor", "-c", child], executable=sys.executable, env={kit.TAG: tag}, start_new_session=True
    )
    try:
        # Before it becomes what it is to be, the child is a copy of its parent, title and all.
        until(lambda: [each.part for each in kit.processes(tag)] in (["proxy", None], [None, "proxy"]), "both run")
        yield tag, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the child too, which nobody finds once its parent is gone
        process.wait()


def test_a_part_is_found_by_its_title_among_the_processes_of_its_node(
    node: tuple[str, subprocess.Popen[bytes]],
) -> None:
    tag, process = node
    assert kit.find("proxy", tag) == [process.pid]
    assert kit.find("proxy", tag.partition(":")[0]) == [process.pid]
    with pytest.raises(kit.Missing, match="no controller"):
        kit.find("controller", tag)
    with pytest.raises(kit.Missing, match="no proxy"):
        kit.find("proxy", f"{tag}0")


def test_kill_ends_it(node: tuple[str, subprocess.Popen[bytes]]) -> None:
    tag, process = node
    kit.send(kit.find("proxy", tag), signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL


def test_pause_stops_it_and_lets_it_go_on(
    node: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, process = node
    seen, asked = threading.Event(), list[float]()

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        seen.wait(60)

    monkeypatch.setattr(kit, "time", SimpleNamespace(sleep=sleep))
    pausing = threading.Thread(target=kit.pause, args=(kit.find("proxy", tag), 0.5))
    pausing.start()
    until(lambda: state(process.pid) == "T", "it is stopped")
    seen.set()
    pausing.join()
    until(lambda: state(process.pid) != "T", "it goes on")
    assert asked == [0.5]


def test_a_lost_node_has_no_process_left_and_others_live(node: tuple[str, subprocess.Popen[bytes]]) -> None:
    tag, process = node
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as other:
        assert kit.lose(tag) == 2
        assert process.wait(20) == -signal.SIGKILL
        assert kit.processes(tag) == []
        assert other.poll() is None
        other.kill()


def test_who_has_which_model_is_read_from_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [{"place": "10.0.0.7 pid 4711"}, {"place": "10.0.0.8 pid 4712"}]
    monkeypatch.setattr(kit, "status", lambda http: {"a": [{"members": members}], "b": [{"members": []}]})
    assert kit.members("") == {"draft": {4711}, "target": {4712}}


def test_by_hand_it_says_what_it_did(node: tuple[str, subprocess.Popen[bytes]]) -> None:
    tag, process = node
    script = Path(kit.__file__ or "")

    def by_hand(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)

    assert by_hand("list", "--node", tag).stdout == f"{process.pid} proxy\n"
    missing = by_hand("kill", "controller", "--node", tag)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no controller among 2 processes here" in missing.stderr
    assert by_hand("kill", "proxy", "--node", tag).stdout == f"kill proxy: [{process.pid}]\n"
    assert process.wait(20) == -signal.SIGKILL


@pytest.fixture
def net() -> Iterator[kit.Namespace]:
    """A namespace with a cable; this machine may not allow it."""
    net = kit.Namespace(f"tc{os.getpid() % 100000}", f"10.77.{os.getpid() % 250}")
    try:
        net.make()
    except kit.Missing as refused:
        pytest.skip(str(refused))
    yield net
    net.remove()


def test_a_node_is_cut_off_by_its_cable_and_comes_back(net: kit.Namespace) -> None:
    """An echo server inside: what is sent while the cable is out comes when it is in again."""
    echo = (
        "import socket; s = socket.create_server(('', 7777)); c = s.accept()[0]\n"
        "while data := c.recv(100): c.sendall(data)"
    )
    with subprocess.Popen(net.run(sys.executable, "-c", echo)) as server:
        connection: socket.socket | None = None
        try:
            connection = _patient(net.inside)
            assert _echoed(connection, b"a", 5.0)
            net.cut()
            assert not _echoed(connection, b"b", 1.0)
            net.mend()
            connection.settimeout(30.0)
            assert connection.recv(1) == b"b"
        finally:
            if connection is not None:
                connection.close()
            server.kill()


def _patient(address: str) -> socket.socket:
    found: list[socket.socket] = []

    def connect() -> bool:
        try:
            found.append(socket.create_connection((address, 7777), timeout=1.0))
        except OSError:
            return False
        return True

    until(connect, "the server listens")
    return found[0]


def _echoed(connection: socket.socket, data: bytes, timeout_s: float) -> bool:
    connection.settimeout(timeout_s)
    connection.sendall(data)
    try:
        return connection.recv(len(data)) == data
    except TimeoutError:
        return False


def test_a_tool_that_does_not_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ip").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(kit, "IP_S", 0.2)
    with pytest.raises(kit.Missing, match=r"did not end in 0\.2 s"):
        kit.Namespace("tn-none", "10.255.255").cut()
