from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnout import registry
from turnout.errors import Code, TurnoutError
from turnout.registry import (
    METHODS_PACKAGE,
    MethodParams,
    added_modules,
    all_methods,
    explain,
    get_method,
    load,
    method,
    names,
)

SLOT = "slot_of_tests"
GOOD = '''
from turnout.registry import MethodParams, method

class Params(MethodParams):
    depth: int = 1

@method(params=Params, papers=(7,), lossless=True, needs=frozenset({"large"}))
async def NAME(request, models, params):
    """Does nothing, well.

    More about it.
    """
    yield None
'''


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package of methods: `good`, `twice` and `empty`, beside what is no method."""
    package = tmp_path / SLOT
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "base.py").write_text("raise RuntimeError('base is no method')", encoding="utf-8")
    (package / "_private.py").write_text("raise RuntimeError('private')", encoding="utf-8")
    (package / "good.py").write_text(GOOD.replace("NAME", "good"), encoding="utf-8")
    (package / "twice.py").write_text(GOOD.replace("NAME", "one") + GOOD.replace("NAME", "two"), encoding="utf-8")
    (package / "empty.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "METHODS_PACKAGE", SLOT)
    get_method.cache_clear()
    yield package
    get_method.cache_clear()
    for name in [name for name in sys.modules if name.startswith(SLOT)]:
        del sys.modules[name]


@pytest.mark.usefixtures("slot")
def test_methods_are_the_modules_of_the_package() -> None:
    assert names(SLOT) == ["empty", "good", "twice"]


@pytest.mark.usefixtures("slot")
def test_a_module_is_imported_only_when_asked_for() -> None:
    names(SLOT)
    assert f"{SLOT}.good" not in sys.modules
    load(SLOT, "good", "method")
    assert f"{SLOT}.good" in sys.modules
    assert f"{SLOT}.empty" not in sys.modules


@pytest.mark.usefixtures("slot")
def test_a_method_is_named_after_its_file_and_described_by_its_docstring() -> None:
    info = get_method("good")
    assert (info.name, info.summary, info.papers, info.lossless) == ("good", "Does nothing, well.", (7,), True)
    assert info.parse({"depth": 3}).model_dump() == {"depth": 3}


@pytest.mark.usefixtures("slot")
def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TurnoutError, match=r"^method: 'god' is not known; available: empty, good, twice$") as caught:
        get_method("god")
    assert caught.value.code is Code.NOT_FOUND


@pytest.mark.usefixtures("slot")
@pytest.mark.parametrize(("name", "found"), [("empty", 0), ("twice", 2)])
def test_a_module_must_define_exactly_one_method(name: str, found: int) -> None:
    with pytest.raises(TypeError, match=rf"{SLOT}.{name} must define exactly one @method, found {found}"):
        get_method(name)


@pytest.mark.usefixtures("slot")
def test_bad_parameters_are_refused_by_name() -> None:
    with pytest.raises(TurnoutError, match=r"^method.params.deph: unknown; allowed here: depth$"):
        get_method("good").parse({"deph": 1})
    with pytest.raises(TurnoutError, match=r"^params.depth: .*integer.* \(got 'x'\)$"):
        get_method("good").parse({"depth": "x"}, "params")


@pytest.mark.parametrize("name", names(METHODS_PACKAGE))
def test_every_shipped_method_describes_itself_and_its_parameters(name: str) -> None:
    info = get_method(name)
    assert info.name == name
    assert info.summary.endswith(".")
    assert info.needs <= {"small", "large"}
    schema = info.params.model_json_schema()
    assert [field for field, about in schema["properties"].items() if "description" not in about] == []
    assert info in all_methods()


def test_parameters_are_immutable() -> None:
    @method(params=MethodParams, lossless=True, needs=frozenset())
    async def run(request: object, models: object, params: MethodParams) -> AsyncIterator[object]:
        """Nothing."""
        yield None

    with pytest.raises(ValidationError, match="frozen"):
        run.parse({}).depth = 1  # type: ignore[attr-defined]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Leaf(Strict):
    x: int = 0


class Tree(Strict):
    leaf: Leaf = Leaf()
    maybe: Leaf | None = None
    noted: Annotated[Leaf | None, Field(description="d")] = None
    by_name: dict[str, Leaf] = {}
    listed: list[Leaf] = []
    fixed: tuple[Leaf, ...] = ()
    deep: dict[str, list[Leaf | None]] = {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"y": 1}, "root.y: unknown; allowed here: by_name, deep, fixed, leaf, listed, maybe, noted"),
        ({"leaf": {"y": 1}}, "root.leaf.y: unknown; allowed here: x"),
        ({"maybe": {"y": 1}}, "root.maybe.y: unknown; allowed here: x"),
        ({"noted": {"y": 1}}, "root.noted.y: unknown; allowed here: x"),
        ({"by_name": {"a": {"y": 1}}}, "root.by_name.a.y: unknown; allowed here: x"),
        ({"listed": [{}, {"y": 1}]}, "root.listed.1.y: unknown; allowed here: x"),
        ({"fixed": [{"y": 1}]}, "root.fixed.0.y: unknown; allowed here: x"),
        ({"deep": {"a": [{"y": 1}]}}, "root.deep.a.0.y: unknown; allowed here: x"),
    ],
)
def test_an_unknown_field_is_answered_with_the_fields_of_its_own_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Tree.model_validate(values)
    assert explain(caught.value, "root", Tree).message == message


def test_a_long_value_is_not_echoed() -> None:
    with pytest.raises(ValidationError) as caught:
        Leaf.model_validate({"x": "7x" * 200})
    assert "got" not in explain(caught.value, "", Leaf).message


def test_a_file_that_comes_later_is_found(slot: Path) -> None:
    assert "late" not in names(SLOT)
    (slot / "late.py").write_text("", encoding="utf-8")
    os.utime(slot, ns=(1, 1))  # clocks of file systems are coarse
    assert "late" in names(SLOT)


def adds(path: Path, name: str, lines: str) -> None:
    """Install a package that adds modules to slots, as pip would: its code and its metadata on the search path."""
    (path / f"{name}.dist-info").mkdir()
    (path / f"{name}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1\n", encoding="utf-8")
    (path / f"{name}.dist-info" / "entry_points.txt").write_text(lines, encoding="utf-8")


@pytest.fixture
def plugins(slot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the search path, for packages that add to the slot of tests."""
    folder = tmp_path / "installed"
    (folder / "plugin_of_tests").mkdir(parents=True)
    (folder / "plugin_of_tests" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "plugin_of_tests" / "added.py").write_text(GOOD.replace("NAME", "added"), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    added_modules.cache_clear()
    yield folder
    added_modules.cache_clear()
    for name in [name for name in sys.modules if name.startswith("plugin_of_tests")]:
        del sys.modules[name]


def test_an_installed_package_adds_a_method_by_an_entry_point(plugins: Path) -> None:
    adds(plugins, "plugin", f"[turnout.{SLOT}]\nadded = plugin_of_tests.added\n")
    assert names(SLOT) == ["added", "empty", "good", "twice"]
    assert (get_method("added").name, get_method("added").papers) == ("added", (7,))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("other = plugin_of_tests.added", "must name a module whose last part is the name"),
        ("good = elsewhere.good", f"'good' is both {SLOT}.good and elsewhere.good"),
    ],
)
def test_an_entry_point_that_does_not_fit_is_refused(plugins: Path, lines: str, said: str) -> None:
    adds(plugins, "plugin", f"[turnout.{SLOT}]\n{lines}\n")
    with pytest.raises(TurnoutError, match=said) as refusal:
        load(SLOT, "good", "method")
    assert refusal.value.code is Code.INVALID_ARGUMENT


def test_two_packages_cannot_add_one_name(plugins: Path) -> None:
    adds(plugins, "one", f"[turnout.{SLOT}]\nadded = plugin_of_tests.added\n")
    adds(plugins, "two", f"[turnout.{SLOT}]\nadded = elsewhere.added\n")
    with pytest.raises(TurnoutError, match="defined by two installed packages"):
        names(SLOT)
