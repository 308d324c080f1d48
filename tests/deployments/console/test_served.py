"""The page from a server on Ray Serve, through its proxy."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Browser, expect

from deployments.app import RunningServer
from tests.deployments.conftest import poll
from tests.deployments.console.driving import ask, choose, pane

pytestmark = pytest.mark.browser


def test_it_streams_and_stops_through_serve(browser: Browser, server: RunningServer) -> None:
    def held() -> tuple[int, int]:
        # Over HTTP: Serve's own handles refuse a thread that Playwright runs an event loop in.
        [replica] = httpx.get(f"{server.http_url}/status", timeout=30).json()["pools"]["demo"]
        return replica["requests"], replica["used_blocks"]

    page = browser.new_page()
    page.goto(server.http_url)
    # The first question makes a replica import every method and part.
    page.get_by_label("Model", exact=True).wait_for(timeout=120_000)
    page.get_by_label("Model", exact=True).select_option("demo")
    choose(page, "A", "plain")
    ask(page, "slow", max_tokens="500")
    expect(pane(page).locator(".state")).to_contain_text(re.compile(r"Writing: ([2-9]|\d{2,}) tokens"), timeout=30_000)
    poll(lambda: held()[0] == 1, "the request runs")
    page.get_by_role("button", name="Stop").click()
    expect(pane(page).locator(".state")).to_contain_text("Stopped")
    poll(lambda: held() == (0, 0), "the pool is idle")
    page.close()
