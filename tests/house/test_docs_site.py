"""What the documentation site is made of; `make docs` builds it, and fails on a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml

from cli.main import app
from deployments.openapi.document import document
from scripts import docs_catalogue, docs_http, docs_reference, docs_site
from turnout.config import TurnoutConfig, parse_config
from turnout.proto import generation_pb2
from turnout.registry import METHODS_PACKAGE, all_methods, names, slots

ROOT = Path(__file__).parents[2]
# Of the whole file the navigation is enough here, and no plugin is to start.
NAV = yaml.safe_load("nav:\n" + (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2])["nav"]
ALERTS = yaml.safe_load((ROOT / "ops" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))


def pages_in(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [page for each in below for page in pages_in(each)]


def test_the_navigation_names_every_page_once_and_no_other() -> None:
    own = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    made = set(docs_site.shown().values()) | set(docs_site.generated()) - set(docs_reference.python_pages())
    assert sorted(pages_in(NAV)) == sorted([*own, *made])


@pytest.mark.parametrize("slot", docs_catalogue.catalogue_slots(), ids=lambda slot: slot.title)
def test_the_catalogue_shows_every_part_with_its_parameters(slot: docs_catalogue.Slot) -> None:
    page = docs_catalogue.pages()[slot.page]
    assert re.findall(r"^## `(\w+)`", page, re.MULTILINE) == names(slot.package)
    for entry in docs_catalogue.entries(slot):
        section = page.partition(f"## `{entry.name}`")[2].partition("\n## ")[0]
        assert entry.summary in section
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(entry.params.model_fields)


def test_every_slot_that_a_request_chooses_from_has_a_page() -> None:
    shown = {slot.package for slot in docs_catalogue.catalogue_slots()}
    assert shown >= {METHODS_PACKAGE, *(f"decoding.{slot}" for slot in slots())}


def test_what_a_method_promises_and_what_a_parameter_allows_are_said() -> None:
    page = docs_catalogue.pages()["catalogue/methods.md"]
    for info in all_methods():
        section = page.partition(f"## `{info.name}`")[2].partition("\n## ")[0]
        assert ("- Lossless: no" in section) is not info.lossless
        assert all(f"#{number}]" in section for number in info.papers)
    assert "| `k` | integer | at least 1, at most 64 | `4` |" in page


def test_a_method_that_is_added_appears_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import decoding.verifiers

    source = (ROOT / "decoding" / "verifiers" / "match.py").read_text(encoding="utf-8")
    (tmp_path / "planted_here.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(decoding.verifiers, "__path__", [*decoding.verifiers.__path__, str(tmp_path)])
    slot = next(slot for slot in docs_catalogue.catalogue_slots() if slot.package == "decoding.verifiers")
    assert "## `planted_here`" in docs_catalogue.pages()[slot.page]


def test_commands_calls_and_messages_all_stand_in_the_reference() -> None:
    commands = docs_reference.commands()
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        for path in [name, *(f"{name} {below}" for below in getattr(command, "commands", ()))]:
            assert f"# `turnout {path}`\n" in commands
    contract = docs_reference.grpc()
    for message in generation_pb2.DESCRIPTOR.message_types_by_name.values():
        section = contract.partition(f"## `{message.name}`")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [field.name for field in message.fields]
    http = docs_http.pages()["reference/http.md"]
    for path, methods in document(batches=True)["paths"].items():
        assert all(f"## `{method.upper()} {path}`" in http for method in methods)


def test_python_reference_has_every_slot() -> None:
    bases = {path.parent.name for path in (ROOT / "decoding").glob("*/base.py")}
    assert {name.split(".")[1] for name in docs_reference.slot_bases() if name.startswith("decoding.")} == bases


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("index.md", "[a](docs/batch.md#priority)", "[a](batch.md#priority)"),
        ("index.md", "[a](ops/runbooks/alerts.md)", "[a](runbooks/alerts.md)"),
        ("console.md", "[start](../README.md#quick-start)", "[start](index.md#quick-start)"),
        ("runbooks/alerts.md", "[a](../../docs/routing.md)", "[a](../routing.md)"),
        ("runbooks/alerts.md", "[a](cluster.md)", "[a](cluster.md)"),
        ("index.md", "[f](ops/demo.yaml)", "`f`"),
        ("index.md", "[f](ops/none.yaml)", "[f](ops/none.yaml)"),
        ("index.md", "[web](https://example.com/docs/batch.md)", "[web](https://example.com/docs/batch.md)"),
        ("index.md", "```\n[a](docs/batch.md)\n```", "```\n[a](docs/batch.md)\n```"),
        ("index.md", "![p](docs/images/console.png)", "![p](images/console.png)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page: str, written: str, shown: str) -> None:
    known = {"index.md", "console.md", "batch.md", "routing.md", "runbooks/alerts.md", "runbooks/cluster.md"}
    assert docs_site.relinked(written, page, frozenset({*known, "images/console.png"})) == shown


def configurations() -> list[tuple[str, dict[str, object]]]:
    """(page, what it shows) of every example that is a configuration, or the beginning of one."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"^```yaml\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            values = yaml.safe_load(block)
            if isinstance(values, dict) and set(values) <= set(TurnoutConfig.model_fields):
                found.append((path.name, values))
    return found


@pytest.mark.parametrize(("page", "values"), configurations(), ids=lambda each: each if isinstance(each, str) else "")
def test_every_configuration_that_is_shown_is_accepted(page: str, values: dict[str, object]) -> None:
    models = {name: {"path": "demo:small"} for name in ("small", "large")}
    pool = {"small": "small", "large": "large"}
    assert parse_config({"models": models, "pools": {"chat": pool}, **values}).pools


def test_every_alert_leads_to_its_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "ops" / "runbooks" / "alerts.md").read_text("utf-8"), re.MULTILINE)
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == set(sections)
    page = docs_site.shown()["ops/runbooks/alerts.md"].replace(".md", ".html")
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"{{{{ $externalLabels.docs }}}}/{page}#{rule['alert'].lower()}"
    prometheus = yaml.safe_load((ROOT / "ops" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert prometheus["global"]["external_labels"]["docs"].startswith("http")


def test_the_built_site_is_no_part_of_the_repository() -> None:
    assert "/site/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
