"""OpenAI's own clients, unmodified, for Python and for Node: each case of the list with each of them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients import node_client, python_client
from tests.clients.all_cases import CASES
from tests.clients.cases import Case, Result
from tests.clients.site import Site

pytestmark = pytest.mark.clients


@pytest.fixture(scope="session")
def by_python(site: Site) -> dict[str, Result]:
    site.report.setdefault("clients", {})["Python"] = f"openai {version('openai')}"
    return python_client.run_cases(site, CASES)


@pytest.fixture(scope="session")
def by_node(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    reason = node_client.missing()
    if reason is not None:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("node")
    site.report.setdefault("clients", {})["Node"] = node_client.install(folder)
    return node_client.run_cases(site, CASES, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_python(site: Site, by_python: dict[str, Result], case: Case) -> None:
    case.check_result(by_python[case.name], by_python)
    site.report.setdefault("cases", {}).setdefault(case.name, set()).add("Python")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node(site: Site, by_node: dict[str, Result], case: Case) -> None:
    case.check_result(by_node[case.name], by_node)
    site.report.setdefault("cases", {}).setdefault(case.name, set()).add("Node")


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
