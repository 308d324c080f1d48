from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_tests import check, check_file


@pytest.mark.parametrize(
    "source",
    [
        "def test_a():\n    assert f() == 1\n",
        "async def test_a():\n    assert await f()\n",
        "def test_a():\n    with pytest.raises(ValueError):\n        f()\n",
        "def test_a():\n    assert_close(f(), 1)\n",
        "def same(x):\n    assert x\n\ndef test_a():\n    same(f())\n",
        "class TestA:\n    def test_a(self):\n        assert f()\n",
        "async def test_a():\n    await asyncio.sleep(0)\n    assert f()\n",
        "def test_a():\n    subprocess.run(['x'], check=True)\n",
        "def test_a():\n    while not f():\n        time.sleep(0.1)\n    assert g()\n",
    ],
)
def test_an_honest_test_passes(source: str) -> None:
    assert list(check_file(source, "test_x.py")) == []


@pytest.mark.parametrize(
    ("source", "name", "fault"),
    [
        ("", "test_x.py", ": collects no test"),
        ("def helper():\n    assert 1\n", "test_x.py", ": collects no test"),
        ("class Case:\n    def test_a(self):\n        assert f()\n", "test_x.py", ": collects no test"),
        ("def test_a():\n    f()\n", "test_x.py", ":1: test_a has nothing that could fail"),
        (
            "def test_a():\n    subprocess.run(['x'], check=False)\n",
            "test_x.py",
            ":1: test_a has nothing that could fail",
        ),
        ("def test_a():\n    assert True\n", "test_x.py", ":1: test_a has nothing that could fail"),
        ("def test_a():\n    assert 'text'\n", "test_x.py", ":1: test_a has nothing that could fail"),
        ("def test_a():\n    time.sleep(1)\n    assert f()\n", "test_x.py", ":2: sleeps outside a polling loop"),
        ("def test_a():\n    assert f()\n", "x_test.py", ":1: test_a is never collected"),
    ],
)
def test_a_test_that_proves_nothing_is_found(source: str, name: str, fault: str) -> None:
    (found,) = check_file(source, name)
    assert found.startswith(fault)


def test_a_package_below_tests_is_found(tmp_path: Path) -> None:
    (tmp_path / "decoding").mkdir()
    (tmp_path / "decoding" / "__init__.py").write_text("", encoding="utf-8")
    (fault,) = check(tmp_path)
    assert "would be shadowed" in fault
