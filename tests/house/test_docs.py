from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.main import app
from decoding.methods.speculative import SpeculativeParams
from decoding.model import Model
from engine.architectures import titles
from scripts import write_tables
from scripts.write_config_docs import PAGE, render
from turnout.part_choice import PartChoice
from turnout.registry import METHODS_PACKAGE, get_method, slots

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    path
    for pattern in ("*", "*.py", "*.yaml", "*.md", "*.toml", "*.sh", "*.proto")
    for path in (ROOT.glob(pattern) if pattern == "*" else ROOT.rglob(pattern))
    if path.is_file() and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_configuration_page_is_what_the_schema_says() -> None:
    assert read(PAGE) == render(), "run: .venv/bin/python -m scripts.write_config_docs"


@pytest.mark.parametrize("page", write_tables.pages(), ids=lambda page: page.name)
def test_the_tables_of_methods_parts_and_papers_are_what_the_code_says(page: Path) -> None:
    assert read(page) == write_tables.render(page), "run: .venv/bin/python -m scripts.write_tables"


def test_every_slot_and_every_paper_has_its_table() -> None:
    tables = re.findall(r"<!-- table: ([\w.]+) -->", "".join(map(read, write_tables.pages())))
    fields = [f"fields.{kind}" for kind in ("taken", "ignored", "refused")]
    assert sorted(tables) == sorted([*fields, "papers", METHODS_PACKAGE, *(f"decoding.{slot}" for slot in slots())])
    rows = re.findall(r"^\| #(\d+) \|", read(ROOT / "docs" / "papers.md"), re.MULTILINE)
    assert len(rows) >= 50
    assert [*map(int, rows)] == sorted(map(int, rows))


def test_every_architecture_is_named() -> None:
    pages = {path.name: " ".join(read(path).split()) for path in DOCUMENTS}
    for page in ("limits.md", "own-pair.md"):
        assert f"Architectures: {titles()}. " in pages[page]
    assert f"layers ({titles(fused=True)})" in pages["cuda.md"]
    assert f"| {titles(fused=True)}: the whole stack in one call" in pages["engine.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(path: Path) -> None:
    text = read(path)
    links = [path.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
    named = [
        ROOT / name
        for name in re.findall(r"`((?:cli|decoding|deployments|docs|engine|ops|pool|turnout)/[\w./-]*)`", text)
    ]
    assert [str(each) for each in links + named if not each.exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    text = read(path)
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", "\n".join(re.findall(r"`+[^`]*`+", text)))) <= targets
    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert set(re.findall(r"(?:`|bin/)turnout ([a-z]+)", text)) <= commands


def test_pools_that_the_pages_recommend_speculate_only_where_it_pays() -> None:
    """A draft of fixed length loses to plain decoding on some machines; `smartspec` measures."""
    texts = [block for path in DOCUMENTS for block in re.findall(r"```yaml\n(.*?)```", read(path), re.DOTALL)]
    pools = [block.get("pools") for block in map(yaml.safe_load, texts) if isinstance(block, dict)]
    defaults = [pool.get("default") or {} for each in pools if isinstance(each, dict) for pool in each.values()]
    found = [default for default in defaults if default.get("name") == "speculative"]
    assert len(found) >= 2
    for default in found:
        params = get_method("speculative").parse(default.get("params", {}))
        assert isinstance(params, SpeculativeParams)
        assert params.chosen().length == PartChoice(name="smartspec")


def test_the_page_on_methods_has_every_call_of_a_model_with_its_parameters() -> None:
    [table] = re.findall(r"\| call \| meaning \|\n.*?\n\n", read(ROOT / "docs" / "adding_a_method.md"), re.DOTALL)
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    calls = [call for cell in cells for call in re.findall(r"`(\w+)\((.*?)\)`", cell)]
    model = {name: call for name, call in vars(Model).items() if inspect.isfunction(call) and not name.startswith("_")}
    assert dict(calls) == {name: ", ".join([*inspect.signature(call).parameters][1:]) for name, call in model.items()}


def test_the_examples_and_their_tests_work(tmp_path: Path) -> None:
    """Puts the files where the page says they go, in a copy of nothing but the search paths of their packages."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", read(ROOT / "docs" / "adding_a_method.md"), re.DOTALL)
    assert [Path(place).name for place, _ in blocks] == [
        "every_nth.py", "test_every_nth.py", "last_seen.py", "test_last_seen.py"
    ]  # fmt: skip
    packages = [".".join(Path(place).parent.parts) for place, _ in blocks]
    for (place, source), package in zip(blocks, packages, strict=True):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / Path(place).name).write_text(source, encoding="utf-8")
    paths = [f"import {p}; {p}.__path__.append({str(tmp_path / p)!r})" for p in packages if p.startswith("decoding.")]
    (tmp_path / "conftest.py").write_text("\n".join(paths), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "5 passed" in result.stdout


def test_nothing_in_the_tree_belongs_to_one_machine() -> None:
    foreign = re.compile("/" + r"(?:work|home|root|Users)/\w|(?:find|extra-index|index)-url[= ]\S*/" + "/")
    assert [str(path) for path in SOURCES if foreign.search(path.read_text(encoding="utf-8", errors="ignore"))] == []
