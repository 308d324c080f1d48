"""Names by jedi: of the code so far and of the request's files, on a thread that a hanging call does not keep."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from decoding.identifiers import jedi as provider
from decoding.identifiers.jedi import Jedi, JediParams, run_apart

CODE = """class Box:
    def open_lid(self): ...
    size = 3

box = Box()
"""


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


async def test_a_call_that_was_cancelled_before_its_turn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_worker", None)
    release, ran = threading.Event(), list[str]()

    def hang() -> list[str]:
        release.wait()
        return ["late"]

    first = asyncio.ensure_future(run_apart(hang))
    second = asyncio.ensure_future(run_apart(lambda: ran.append("second") or []))
    await asyncio.sleep(0)
    second.cancel()
    third = asyncio.ensure_future(run_apart(lambda: ["third"]))
    await asyncio.sleep(0)
    release.set()
    assert (await first, await third) == (["late"], ["third"])
    assert ran == []


async def test_a_hanging_call_does_not_keep_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_worker", None)
    monkeypatch.setattr(provider, "HUNG_S", -1.0)
    begun, release = threading.Event(), threading.Event()

    def hang() -> list[str]:
        begun.set()
        release.wait()
        return []

    first = asyncio.ensure_future(run_apart(hang))
    await asyncio.to_thread(begun.wait)
    assert await run_apart(lambda: ["next"]) == ["next"]
    release.set()
    assert await first == []


async def test_a_failing_call_fails_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_worker", None)

    def fail() -> list[str]:
        raise KeyError("no module")

    with pytest.raises(KeyError, match="no module"):
        await run_apart(fail)
    assert await run_apart(lambda: ["on"]) == ["on"]
