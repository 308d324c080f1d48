"""Untrusted programs: what they may do, and what becomes of those that try more."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.code_execution import Execution
from decoding.model import ModelPool
from decoding.uncertainty.functional_clusters import FunctionalClusters
from pool import sandbox, sandboxed
from pool.code_execution import SandboxedPython
from pool.sandbox import Ended, Limits, run_python, walls_here
from turnout.errors import TurnoutError
from turnout.pool_config import SandboxConfig

QUICK = Limits(timeout_s=60.0, cpu_s=2, memory_bytes=256 << 20, file_bytes=4096, processes=2)
LATE = Limits(timeout_s=1.0, processes=4)
# Leaves its group, and our signals with it.
LEAVES = """import ctypes, os, time
if os.getpid() != os.getsid(0):
    os.setsid()
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
"""

AllEnded = Callable[[], Awaitable[None]]


@pytest.fixture
def all_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AllEnded:
    """Waits until nothing is left of the programs of one test, which run in a sandbox of a name of their own."""
    own = tmp_path / "sandboxed.py"
    shutil.copy(sandboxed.__file__, own)
    monkeypatch.setattr(sandboxed, "__file__", str(own))
    tmp_path.chmod(0o777)

    async def wait() -> None:
        async with asyncio.timeout(60):  # what was killed may take a moment until it is gone
            while _running(own):
                await asyncio.sleep(0.02)

    return wait


def _running(sandbox: Path) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(sandbox).encode() in _read(path)]


def _found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_a_program_that_ends_passes_and_one_that_raises_says_what() -> None:
    assert (await run_python("x = 1 + 1\nassert x == 2", QUICK)).outcome == "passed"
    ended = await run_python("raise ValueError('seven')", QUICK)
    assert (ended.outcome, ended.reason) == ("failed", "ValueError: seven")
    assert (await run_python("def broken(", QUICK)).reason.startswith("SyntaxError")
    assert (await run_python("assert GIVEN == {'a': [1]}", QUICK, {"a": [1]})).outcome == "passed"


async def test_what_a_program_finds_out_comes_back() -> None:
    ended = await run_python("RESULT = [GIVEN, {'b': None}]", QUICK, 1.5)
    assert (ended.outcome, ended.result) == ("passed", [1.5, {"b": None}])
    assert (await run_python("RESULT = 1\nraise ValueError", QUICK)).result is None
    said = "its result takes 40002 bytes, at most 32768 are read"
    assert (await run_python("RESULT = 'a' * 40_000", QUICK)).reason == said
    assert (await run_python("RESULT = {1}", QUICK)).reason.startswith("TypeError")


async def test_a_pools_programs_start_no_others() -> None:
    executor = SandboxedPython(SandboxConfig(walls=(), max_running=1))
    ended = await asyncio.gather(
        executor.run("RESULT = GIVEN", 2, "a"), executor.run("import os; os.fork()", None, "a")
    )
    assert ended[0] == Execution(True, "", 2)
    assert (ended[1].finished, ended[1].reason.partition(":")[0]) == (False, "BlockingIOError")


async def test_no_program_runs_without_a_wall_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel gave the walls before: it may have run out of namespaces."""
    executor = SandboxedPython(SandboxConfig(walls=("network", "processes")))
    planted = _planted(tmp_path, "walls, own = separate()", "walls, own = [], False")
    monkeypatch.setattr(sandboxed, "__file__", str(planted))
    said = r"the sandbox cannot run here: .* no wall against network, processes, which sandbox\.walls asks for"
    with pytest.raises(TurnoutError, match=said):
        await executor.run("RESULT = 1", None, "a")


def _planted(tmp_path: Path, what: str, instead: str) -> Path:
    inside = inspect.getsource(sandboxed)
    assert inside.count(what) == 1
    planted = tmp_path / "inside.py"
    planted.write_text(inside.replace(what, instead), encoding="utf-8")
    return planted


async def test_a_tenants_programs_do_not_wait_for_all_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    async def runs(program: str, limits: Limits, given: object, walls: tuple[str, ...]) -> Ended:
        ran.append(given)
        await asyncio.sleep(0)
        return Ended("passed", "")

    monkeypatch.setattr("pool.code_execution.run_python", runs)
    executor = SandboxedPython(SandboxConfig(walls=(), max_running=1))
    work = [executor.run("", place, "a") for place in range(20)] + [executor.run("", tenant, tenant) for tenant in "bc"]
    await asyncio.gather(*work)
    assert ran == [0, "b", "c", *range(1, 20)]


async def test_hostile_programs_are_clusters_of_their_own(all_ended: AllEnded) -> None:
    """None hangs, floods or reads what it should not, and two that are right are still found to agree."""
    bodies = [
        "return x + x", "return 2 * x", "while True: pass", "import os\n    while True: os.fork()",
        "return open('/etc/passwd').read()", "return 'x' * 10**6 * (x + 1)", "return bytearray(10**9)",
        "import os; os._exit(0)", "import sys; sys.exit(x)",
    ]  # fmt: skip
    config = SandboxConfig(walls=(), cpu_s=1, timeout_s=60.0, memory_bytes=256 << 20)
    part = FunctionalClusters(FunctionalClusters.Params(estimator="share", generated=3))
    nothing: object = None
    models = ModelPool({}, {}, nothing, code_executor=SandboxedPython(config))  # type: ignore[arg-type]
    part.check(models)
    texts = [f"def f(x: int):\n    {body}\n" for body in bodies]
    group = AnswerSet([Candidate(text, text, "") for text in texts])
    assert await part.measure(group, None) == pytest.approx(1 - 2 / len(bodies))
    assert group.measures == {"programs": float(len(bodies)), "program_clusters": float(len(bodies) - 1)}
    await all_ended()


async def test_a_program_has_the_standard_library_and_its_own_rules_of_the_language() -> None:
    needs = "import collections.abc, dataclasses, decimal, email.mime.text, random, sqlite3, statistics, unittest"
    assert (await run_python(needs, QUICK)).reason == ""
    typed = "def f(x: int) -> int: return x\nassert f.__annotations__['x'] is int"
    assert (await run_python(typed, QUICK)).reason == ""


async def test_a_sandbox_that_cannot_be_built_blames_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root may not become anybody else."""
    start = "    if os.geteuid() == 0:\n"
    planted = _planted(tmp_path, start, f"    raise PermissionError(1, 'not permitted')\n{start}")
    monkeypatch.setattr(sandboxed, "__file__", str(planted))
    with pytest.raises(TurnoutError, match=r"the sandbox cannot run here: .* not permitted"):
        await run_python("x = 1", QUICK)


@pytest.mark.parametrize(
    "leaving",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        'print(\'{"done": "", "error": null, "walls": []}\', flush=True); import os; os._exit(0)',
    ],
)
async def test_leaving_before_the_tests_is_no_pass(leaving: str) -> None:
    assert (await run_python(f"{leaving}\nassert False", QUICK)).outcome in ("failed", "killed")


@pytest.mark.parametrize("before", ["import os, time\nos.fork()\nos.fork()\n", LEAVES])
async def test_a_program_that_hangs_is_ended_with_all_it_started(all_ended: AllEnded, before: str) -> None:
    ended = await run_python(f"{before}time.sleep(1000)", LATE)
    assert ended.outcome == "timeout"
    await all_ended()


async def test_a_program_ends_with_the_server_that_started_it(tmp_path: Path, all_ended: AllEnded) -> None:
    task = {
        "program": "open('begun', 'w').close()\nimport time\ntime.sleep(1000)",
        "limits": asdict(Limits()),
        "done": "",
        "walls": [],
    }
    serve = """import subprocess, sys, time
command = [sys.executable, "-I", "-S", "-B", sys.argv[1]]
started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
started.stdin.write(sys.argv[2].encode())
started.stdin.close()
time.sleep(1000)
"""
    given = (sandboxed.__file__, json.dumps(task | {"given": None}))
    server = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", serve, *given, cwd=tmp_path)
    try:
        async with asyncio.timeout(60):
            while not _found(tmp_path, "begun"):
                assert server.returncode is None
                await asyncio.sleep(0.02)
    finally:
        server.kill()
        await server.wait()
    await all_ended()


@pytest.mark.parametrize(
    ("written", "outcome", "reason"),
    [
        ("b'[' * 60_000 + b'\\n'", "failed", "left before its last line"),
        ("b'x' * 10**6", "killed", "wrote more than 65536 bytes past its standard output"),
    ],
)
async def test_what_a_program_writes_to_us_is_not_believed_and_has_an_end(
    written: str, outcome: str, reason: str
) -> None:
    writes = (
        "import os, stat\nfor place in range(3, 64):\n    try:\n        if stat.S_ISFIFO(os.fstat(place).st_mode):\n"
    )
    ended = await run_python(
        f"{writes}            os.write(place, {written})\n    except OSError: pass\nos._exit(0)", QUICK
    )
    assert (ended.outcome, ended.reason) == (outcome, reason)


async def test_what_holds_the_pipe_of_an_ended_program_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ENDING_S", 0.05)
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 600 & echo there", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(60):
            await sandbox._gone(process)
        assert process.stdout is not None
        assert not process.stdout.at_eof()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_a_long_error_is_told_in_short() -> None:
    ended = await run_python("raise ValueError('x' * 10**6)", QUICK)
    assert (ended.outcome, ended.reason) == ("failed", f"ValueError: {'x' * 188}")


async def test_folders_of_any_depth_are_counted_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "import os\nfor _ in range({}):\n    os.mkdir({!r})\n    os.chdir({!r})\n"
    assert (await run_python(deep.format(1100, "a", "a"), Limits())).outcome == "passed"
    long = "a" * 200
    beyond_a_path = deep.format(25, long, long)
    hidden = await run_python(f"{beyond_a_path}import time\ntime.sleep(60)", Limits(timeout_s=60.0))
    assert (hidden.outcome, "files take more than" in hidden.reason) == ("killed", True)
    closed = "import os\nos.makedirs('a/b')\nos.chmod('a', 0)"
    assert (await run_python(closed, Limits())).outcome == "passed"
    assert _found(tmp_path, "*") == []


async def test_no_memory_outlasts_a_program() -> None:
    if "processes" not in (await run_python("", QUICK)).walls:
        pytest.skip("this kernel has no namespaces for us")
    key = 0x7453D0C
    taken = f"import ctypes\nRESULT = ctypes.CDLL(None).shmget({key}, 1 << 20, 0o1600)"
    assert (await run_python(taken, QUICK)).outcome == "passed"
    assert str(key).encode() not in _read(Path("/proc/sysvipc/shm")).split()


async def test_processor_time_and_memory_have_ends() -> None:
    assert (await run_python("while True: pass", Limits(timeout_s=120.0, cpu_s=1))).outcome == "killed"
    ended = await run_python("x = bytearray(400 << 20)", QUICK)
    assert ended.reason.startswith("MemoryError")


async def test_processes_and_files_have_ends() -> None:
    bomb = "import os\nfor _ in range(50):\n    if os.fork() == 0:\n        import time; time.sleep(60)"
    assert (await run_python(bomb, QUICK)).reason.startswith("BlockingIOError")
    ended = await run_python("open('big', 'wb').write(bytes(1 << 20))", QUICK)
    assert ended.outcome in ("failed", "killed")
    assert (
        await run_python("open('small', 'w').write('a'); assert open('small').read() == 'a'", QUICK)
    ).outcome == "passed"


async def test_what_all_files_take_together_has_an_end() -> None:
    limits = Limits(timeout_s=60.0, folder_bytes=20 << 20)
    one = "open(str(n), 'wb').write(bytes(2**20 - 1))"
    many = f"import time\nfor n in range(200): {one}\ntime.sleep(60)"
    assert (await run_python(many, limits)).reason == f"its files take more than {20 << 20} bytes together"
    empty = "n = 0\nwhile True:\n    open(str(n), 'wb').close()\n    n += 1"
    assert "files take more than" in (await run_python(empty, Limits(timeout_s=60.0, folder_bytes=1 << 20))).reason
    few = f"import time\nfor n in range(4): {one}\ntime.sleep(0.5)"
    assert (await run_python(few, limits)).outcome == "passed"


async def test_what_all_processes_take_together_has_an_end(all_ended: AllEnded) -> None:
    limits = Limits(timeout_s=60.0, memory_bytes=200 << 20, processes=4)
    forks = "for _ in range(3):\n    if os.fork() == 0:\n        break\n"
    wide = f"import os, time\n{forks}x = bytearray(90 << 20)\ntime.sleep(60)"
    ended = await run_python(wide, limits)
    assert (ended.outcome, "of memory together" in ended.reason) == ("killed", True)
    await all_ended()


async def test_nothing_of_ours_is_told_or_touched(tmp_path: Path) -> None:
    asked = "import os\nassert not [k for k in os.environ if k not in ('LC_CTYPE', 'PWD')], dict(os.environ)"
    assert (await run_python(asked, QUICK)).reason == ""
    outside = tmp_path / "outside"
    outside.write_text("ours", encoding="utf-8")
    ended = await run_python(f"open({str(outside)!r}, 'w').write('theirs')", QUICK)
    if "writes" in ended.walls or os.geteuid() == 0:  # what the kernel has no wall for is said so
        assert outside.read_text(encoding="utf-8") == "ours"
    assert ended.walls or ended.outcome in ("passed", "failed")


async def test_what_lies_about_is_not_read_and_what_is_not_walled_is_said(tmp_path: Path) -> None:
    """A file all may read, the users of this machine, and what the shell of a process holds."""
    outside = tmp_path / "outside"
    outside.write_text("a key", encoding="utf-8")
    places = [str(outside), "/etc/passwd", "/proc/1/cmdline", str(Path(__file__))]
    ended = [await run_python(f"print(open({place!r}).read()); raise ValueError('read it')", QUICK) for place in places]
    listed = await run_python("import os; os.listdir('/etc'); raise ValueError('read it')", QUICK)
    walled = "reads" in ended[0].walls
    read = [each.reason == "ValueError: read it" for each in (ended[1], ended[2], listed)]
    assert read == [not walled] * 3
    assert not walled or all(each.reason.startswith("PermissionError") for each in (*ended, listed))
    said = await walls_here()
    assert ("reading files" in said.partition("not walled")[2]) is not walled
    assert said.endswith("Unix sockets by path")


async def test_the_network_is_out_of_reach_where_there_is_a_wall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = await run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", QUICK)
    walled = {"network", "tcp"} & set(ended.walls)
    assert ended.outcome == ("failed" if walled else "passed")
