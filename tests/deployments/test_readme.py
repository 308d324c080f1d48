"""What the README says to type, typed: its first requests against a served pool, its file read as a configuration."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deployments.access.kit import Served, served
from tests.deployments.in_process import make_service
from turnout.config import parse_config, read_yaml

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(make_service()) as running:
        yield running


def block(language: str, holding: str) -> str:
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    [found] = [text for text in blocks if holding in text]
    return found


def test_the_first_requests(server: Served) -> None:
    answers = []
    for command in block("console", "curl").split("$ ")[1:]:
        words = shlex.split(command)
        [url] = [word for word in words if word.startswith("http://")]
        url = url.replace("http://localhost:8000", server.url)
        if "-d" in words:
            body = json.loads(words[words.index("-d") + 1])
            answers.append(httpx.post(url, json=body, timeout=30))
        else:
            answers.append(httpx.get(url, timeout=30))
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert answers[0].json()["usage"]["turnout"]["params"] == {"threshold": 0.1}


def test_the_first_request_from_python(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "import Client").replace("localhost:9000", server.address), {})
    *written, cost = capsys.readouterr().out.splitlines()
    assert written[:2] == ["small 'a'", "large 'b'"]
    assert len(written) == 100
    assert cost.startswith("CostReport(")


def test_the_file_of_an_own_pair(tmp_path: Path) -> None:
    path = tmp_path / "turnout.yaml"
    path.write_text(block("yaml", "pools:"), encoding="utf-8")
    config = parse_config(read_yaml(path))
    assert config.pools["chat"].default.name == "speculative"
    assert config.models["small"].path == "/models/small"
