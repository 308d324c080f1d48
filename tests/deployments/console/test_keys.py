"""The page before a server with tenants: a key is asked for once, where one is needed, and nothing typed is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Request, expect

from tests.deployments.access.kit import House, Served, house, served
from tests.deployments.console.driving import ask, choose, pane, wait_done

pytestmark = pytest.mark.browser

TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"requests_per_minute": 60},
    "narrow": {"pools": ["demo"], "methods": ["entropy_adaptive"]},
}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, hosts: set[str]) -> Iterator[tuple[House, Served]]:
    with house(tmp_path_factory.mktemp("house"), TENANTS) as made, served(made.service) as server:
        hosts.add(urlsplit(server.url).netloc)
        yield made, server


def enter(page: Page, key: str) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_have_count(1)
    expect(dialog.get_by_label("Key", exact=True)).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type(key)
    page.keyboard.press("Enter")


def test_a_key_is_asked_for_until_one_is_right(context: BrowserContext, locked: tuple[House, Served]) -> None:
    made, server = locked
    sent: list[str | None] = []
    page = context.new_page()

    def note(request: Request) -> None:
        if request.url.endswith("/v1/tenant"):
            sent.append(request.headers.get("authorization"))

    page.on("request", note)
    page.goto(f"{server.url}/console/#/tenant")
    enter(page, "tk_wrong")
    expect(page.get_by_role("alert")).to_contain_text("key")
    enter(page, made.keys["acme"])
    expect(page.get_by_role("heading", name="acme")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("table", name="acme: limits")).to_contain_text("60")
    assert sent == [None, "Bearer tk_wrong", f"Bearer {made.keys['acme']}"]
    assert page.evaluate("Object.values(localStorage).join()").count(made.keys["acme"]) == 0


def test_one_dialog_for_two_refusals_and_the_question_stays(
    context: BrowserContext, locked: tuple[House, Served]
) -> None:
    made, server = locked
    page = context.new_page()
    page.goto(f"{server.url}/console/")
    enter(page, made.keys["acme"])
    page.get_by_label("Compare two methods").check()
    page.evaluate("sessionStorage.setItem('turnout-api-key', 'tk_revoked')")
    ask(page, "what I typed", max_tokens="3")
    expect(pane(page).get_by_role("alert")).to_be_attached()
    expect(pane(page, "B").get_by_role("alert")).to_be_attached()
    enter(page, made.keys["acme"])
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_label("Prompt")).to_have_value("what I typed")
    page.get_by_role("button", name="Run").click()
    wait_done(page, "A", "B")


def test_what_a_tenant_may_not_do_is_no_question_of_a_key(
    context: BrowserContext, locked: tuple[House, Served]
) -> None:
    made, server = locked
    page = context.new_page()
    page.goto(f"{server.url}/console/")
    enter(page, made.keys["narrow"])
    page.get_by_label("Model", exact=True).wait_for()
    choose(page, "A", "plain")
    ask(page, max_tokens="3")
    group = page.get_by_role("group", name="Method A")
    expect(group.get_by_label("Method", exact=True)).to_be_focused()
    expect(pane(page).locator(".state")).to_have_text("Refused.")
    expect(page.get_by_role("dialog")).to_have_count(0)
