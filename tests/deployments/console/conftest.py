"""A real browser in front of a real server; where the machine has no Chromium, these tests say so and are left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.deployments.console.site import Site, demo_config

CHROMIUM = shutil.which("chromium")
# Of whatever is waited for: a busy machine may take its time.
PATIENCE_MS = 15_000
expect.set_options(timeout=PATIENCE_MS)

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
REPORT = {
    "title": "Demo arithmetic",
    "points": [
        {"label": "small alone", "method": "plain", "dataset": "arithmetic", "quality": 0.61, "cost": 0.13,
         "quality_low": 0.57, "quality_high": 0.65},
        {"label": "entropy 0.1", "method": "entropy_adaptive", "dataset": "arithmetic", "quality": 0.91, "cost": 0.36,
         "quality_low": 0.88, "quality_high": 0.93},
        {"label": "random 0.26", "method": "random_switch", "dataset": "arithmetic", "quality": 0.68, "cost": 0.36,
         "quality_low": 0.64, "quality_high": 0.72},
        {"label": "large alone", "method": "plain", "dataset": "arithmetic", "quality": 0.93, "cost": 1.0,
         "quality_low": 0.91, "quality_high": 0.95},
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("reports")
    (folder / "demo.json").write_text(json.dumps(REPORT), encoding="utf-8")
    running = Site(demo_config(console={"experiments": str(folder)}))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no `chromium` on the PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def hosts(site: Site) -> set[str]:
    """Who may be asked; a test that opens another server's page adds it."""
    return {urlsplit(site.url).netloc}


class Watched:
    """What a page must not do: complain, fail, or ask anybody but its server."""

    def __init__(self, context: BrowserContext, allowed: tuple[str, ...]) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self._allowed = allowed
        context.on("console", self._said)
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))
        context.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        # The browser itself reports a refusal that the page shows to its reader.
        if message.type in ("error", "warning") and not any(text in message.text for text in self._allowed):
            self.complaints.append(message.text)

    def _asked(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)


@pytest.fixture
def context(request: pytest.FixtureRequest, browser: Browser, hosts: set[str]) -> Iterator[BrowserContext]:
    options = {"viewport": {"width": 1280, "height": 900}, **getattr(request, "param", {})}
    opened = browser.new_context(**options)
    opened.set_default_timeout(PATIENCE_MS)
    watched = Watched(opened, allowed=("status of 400", "status of 401", "status of 403", "status of 404", "ERR_"))
    yield opened
    opened.close()
    assert watched.complaints == []
    assert watched.hosts <= hosts


@pytest.fixture
def page(context: BrowserContext, site: Site) -> Page:
    """The console, ready to be asked."""
    opened = context.new_page()
    opened.goto(f"{site.url}/")
    opened.get_by_role("button", name="Run").wait_for()
    return opened


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return tmp_path
