"""The console's files and reports, without a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.console.assets import Assets
from deployments.http import build_http
from tests.deployments.in_process import make_service

POINT = {"label": "a", "quality": 0.5, "cost": 0.25}


def client(**console: Any) -> httpx.AsyncClient:
    service = make_service()
    service.console = service.console.model_copy(update=console)
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_http(service)), base_url="http://test")


@pytest.mark.parametrize("path", ["/", "/console"])
async def test_people_are_led_to_the_page(path: str) -> None:
    async with client() as http:
        led = await http.get(path)
        assert (led.status_code, led.headers["Location"]) == (307, "console/")
        page = await http.get(path, follow_redirects=True)
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert str(page.url) == "http://test/console/"


async def test_every_file_a_file_names_is_there() -> None:
    assets = Assets()
    async with client() as http:
        texts = {name: (await http.get(f"/console/{name}")).text for name in assets.names}
    named = {
        word.strip("\"'./;")
        for text in texts.values()
        for word in text.replace("=", " ").replace(">", " ").split()
        if word.rstrip(";\"'").endswith((".js", ".css", ".svg")) and word[0] in "\"'"
    }
    assert "main.js" in named
    assert named <= set(texts)
    assert set(texts) - named == {"index.html"}


async def test_no_file_asks_anybody_else_or_writes_markup() -> None:
    words = ("http:", "https:", "//cdn", "innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=")
    async with client() as http:
        for name in Assets().names:
            text = (await http.get(f"/console/{name}")).text.replace("http://www.w3.org/2000/svg", "")
            assert [word for word in words if word in text] == [], name


async def test_every_file_is_served_once_and_then_only_compared() -> None:
    async with client() as http:
        for name in Assets().names:
            path = f"/console/{name}"
            whole = await http.get(path)
            assert whole.status_code == 200
            assert "default-src 'none'" in whole.headers["Content-Security-Policy"]
            assert "unsafe" not in whole.headers["Content-Security-Policy"]
            again = await http.get(path, headers={"If-None-Match": f'"other", W/{whole.headers["ETag"]}'})
            assert (again.status_code, again.content) == (304, b"")
            several = [("If-None-Match", '"other"'), ("If-None-Match", whole.headers["ETag"])]
            assert (await http.get(path, headers=several)).status_code == 304
            assert (await http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fhttp.py", "__init__.py", "assets.py"])
async def test_nothing_else_is_served(name: str) -> None:
    async with client() as http:
        assert (await http.get(f"/console/{name}")).status_code == 404


async def test_the_page_can_be_turned_off() -> None:
    async with client(enabled=False) as http:
        assert [(await http.get(path)).status_code for path in ("/", "/console/", "/v1/experiments")] == [404] * 3
        assert (await http.get("/v1/models")).status_code == 200


async def test_reports_are_listed_and_read(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"title": "One", "points": [POINT], "more": 1}), encoding="utf-8")
    (tmp_path / "odd name.json").write_text("{}", encoding="utf-8")
    async with client(experiments=str(tmp_path)) as http:
        assert [each["name"] for each in (await http.get("/v1/experiments")).json()["data"]] == ["one"]
        report = (await http.get("/v1/experiments/one")).json()
        assert report["title"] == "One"
        assert report["points"][0] == {**POINT, "method": "", "dataset": "", "quality_low": None, "quality_high": None}
        missing = await http.get("/v1/experiments/..%2Fone")
        assert missing.status_code == 404


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Invalid JSON"),
        ('{"points": [{"label": "a", "quality": 1}]}', "points.0.cost: Field required"),
        ('{"points": [{"label": "a", "quality": NaN, "cost": 1}]}', "points.0.quality"),
    ],
)
async def test_a_broken_report_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    async with client(experiments=str(tmp_path)) as http:
        answer = await http.get("/v1/experiments/bad")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message.startswith("the report 'bad' cannot be shown: ")
    assert why in message
    assert str(tmp_path) not in message


async def test_what_cannot_be_looked_at_hides_no_other_report(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"points": [POINT]}), encoding="utf-8")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.json").mkdir()
    async with client(experiments=str(tmp_path)) as http:
        assert [each["name"] for each in (await http.get("/v1/experiments")).json()["data"]] == ["good"]
        for name in ("gone", "folder", "good%0A", "x" * 300):
            assert (await http.get(f"/v1/experiments/{name}")).status_code == 404, name
        assert (await http.get("/v1/experiments/loop")).status_code == 500


async def test_a_folder_that_is_not_there_yet_holds_no_reports(tmp_path: Path) -> None:
    async with client(experiments=str(tmp_path / "later")) as http:
        assert (await http.get("/v1/experiments")).json()["data"] == []
