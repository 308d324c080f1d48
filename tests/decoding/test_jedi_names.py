"""Names by jedi: of the code so far and of the request's files, in a process that reads nothing else."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from decoding.identifiers import _analysis
from decoding.identifiers import jedi as provider
from decoding.identifiers.jedi import Analyser, Jedi, JediParams

CODE = """class Box:
    def open_lid(self): ...
    size = 3

box = Box()
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take seconds for the first question; none here hangs that is not meant to."""
    monkeypatch.setattr(provider, "HUNG_S", 120.0)


async def names(code: str, **params: object) -> list[str]:
    made = Jedi(JediParams.model_validate(params))
    try:
        return await made.names(code)
    finally:
        await made.close()


async def test_members_of_an_object_are_found() -> None:
    pytest.importorskip("jedi", reason="an extra: pip install 'turnout[code]'")
    found = await names(CODE + "box.")
    assert {"open_lid", "size"} <= set(found)
    assert "append" not in found
    assert await names("An answer in words.") == []


async def test_members_are_found_in_the_requests_files_and_in_no_others(tmp_path: Path) -> None:
    pytest.importorskip("jedi", reason="an extra: pip install 'turnout[code]'")
    code = "from shop.boxes import Box\nBox()."
    found = await names(code, path="shop/main.py", files={"shop/__init__.py": "", "shop/boxes.py": CODE})
    assert {"open_lid", "size"} <= set(found)
    assert await names(code) == []


async def test_nothing_but_the_requests_files_and_the_standard_library_is_read() -> None:
    """Neither installed packages nor what else lies on this machine, of other callers too, by whatever way."""
    pytest.importorskip("jedi", reason="an extra: pip install 'turnout[code]'")
    other = Path(tempfile.mkdtemp(prefix="other"))  # where the folders of answers are
    (other / "secret.py").write_text(CODE)
    codes = [
        *("import numpy\nnumpy.", "import torch._C\ntorch._C.", "import turnout.config\nturnout.config."),
        *(f"from {dots}{other.name}.secret import box\nbox." for dots in ("..", "...", "")),
        *(f"from {dots}{other.name} import secret\nsecret." for dots in ("..", "...")),
        *(f"from ..{other.name}.", f"open('{other}/s.", f"open('{other}/.", "import os\nos.environ['PATH."),
    ]
    try:
        for code in codes:
            assert set(await names(code)) <= {"import"}, code
        assert "path" in await names("import os\nos.")
    finally:
        shutil.rmtree(other)


async def test_a_module_that_the_code_imports_is_not_loaded_here_and_the_environment_is_not_seen() -> None:
    pytest.importorskip("jedi", reason="an extra: pip install 'turnout[code]'")
    name = next(name for name in ("_xxsubinterpreters", "_xxtestfuzz", "audioop", "nis") if name not in sys.modules)
    await names(f"import {name}\n{name}.")
    assert name not in sys.modules
    process = provider._analyser._process
    assert process is not None
    assert environment(process.pid) == b""


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes() if sys.platform == "linux" else b""


def refused(code: str, tmp_path: Path) -> str:
    """What a program says that stands behind the wall, which lets it read `tmp_path / "own"`."""
    (tmp_path / "own").mkdir(exist_ok=True)
    (tmp_path / "own" / "a.py").write_text("x = 1")
    lines = [
        "import sys, os, subprocess, socket",
        f"sys.path.append({str(Path(_analysis.__file__).parent)!r})",
        "import _analysis",
        "wall = _analysis.Wall([])",
        f"wall.folder = {os.path.realpath(tmp_path / 'own')!r}",
        "sys.addaudithook(wall)",
        "try:",
        f"    {code}",
        "except (PermissionError, ImportError) as error: print(type(error).__name__)",
        "else: print('done')",
    ]
    done = subprocess.run([sys.executable, "-I", "-B", "-c", "\n".join(lines)], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("open('{own}/a.py')", "done"),
        ("os.listdir('{own}')", "done"),
        ("open(os.__file__)", "done"),
        ("import this_is_none, json", "ImportError"),
        ("import numpy", "ImportError"),
        ("open('{own}/a.py', 'w')", "PermissionError"),
        ("open('{own}/../b.py')", "PermissionError"),
        ("open('/etc/passwd')", "PermissionError"),
        ("os.listdir('/')", "PermissionError"),
        ("list(os.scandir('{own}/..'))", "PermissionError"),
        ("subprocess.run(['true'])", "PermissionError"),
        ("os.system('true')", "PermissionError"),
        ("socket.socket()", "PermissionError"),
        ("os.remove('{own}/a.py')", "PermissionError"),
    ],
)
def test_the_wall(code: str, said: str, tmp_path: Path) -> None:
    assert refused(code.format(own=tmp_path / "own"), tmp_path) == said


def analyser(tmp_path: Path, body: str) -> Analyser:
    program = tmp_path / "program.py"
    program.write_text(
        f"import json, os, sys\nfor line in sys.stdin:\n    code = json.loads(line)['code']\n    {body}\n"
    )
    return Analyser(str(program))


def test_a_question_that_hangs_or_ends_the_process_is_not_known_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = "print(json.dumps([code]), flush=True)"
    made = analyser(tmp_path, f"{answers} if code != 'end' else os._exit(1)")
    assert [made.ask({"code": code})[:1] for code in ("a", "end", "b")] == [["a"], [], ["b"]]
    made.close()
    made = analyser(tmp_path, f"{answers} if code != 'hang' else sys.stdin.read()")
    assert made.ask({"code": "a"}) == ["a"]
    first = made._process
    with monkeypatch.context() as patched:
        patched.setattr(provider, "HUNG_S", 0.0)
        assert made.ask({"code": "hang"}) == []
    assert first is not None
    assert first.poll() is not None
    assert made.ask({"code": "b"}) == ["b"]
    made.close()


def test_an_answer_without_an_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "MOST_ANSWERED", 1 << 10)
    made = analyser(tmp_path, "print(json.dumps([code * 2000]), flush=True)")
    assert made.ask({"code": "a"}) == []
    assert made._process is None


async def test_a_question_that_was_cancelled_before_its_turn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked = threading.Event(), list[str]()

    def ask(question: dict[str, str]) -> list[str]:
        asked.append(question["code"])
        release.wait()
        return [question["code"]]

    monkeypatch.setattr(provider._analyser, "ask", ask)
    first, second, third = (asyncio.ensure_future(names(code)) for code in ("first", "second", "third"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    release.set()
    assert (await first, await third) == (["first"], ["third"])
    assert asked == ["first", "third"]


async def test_code_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider._analyser, "ask", lambda question: pytest.fail("it was asked"))
    assert await names("x" * (provider.MOST_CHARS + 1)) == []


async def test_text_that_is_no_unicode_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider._analyser, "ask", lambda question: [question["path"]])
    assert await names("x.", files={"a.py": "\ud800"}) == ["answer.py"]
