"""The other pages, and what holds for all of them: names, contrast, narrow screens, no word to anybody else."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.deployments.console.driving import ask, choose, wait_done
from tests.deployments.console.site import Site

pytestmark = pytest.mark.browser

PAGES = ("generate", "pools", "cache", "methods", "tenant", "experiments")
NARROW = {"viewport": {"width": 360, "height": 740}}
# Every visible text with the colour behind it: [contrast, size in px, text], worst first.
CONTRASTS = """() => {
  const light = ([r, g, b]) => {
    const f = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = rgb(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest(".unseen, .skip, noscript, :disabled, option")) continue;
    const style = getComputedStyle(element);
    const fill = element instanceof SVGElement;
    const [a, b] = [light(rgb(fill ? style.fill : style.color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, parseFloat(style.fontSize), element.textContent.slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea, canvas, meter, [role]")]
  .filter((each) => each.checkVisibility())
  .filter((each) => !(each.labels?.length || each.getAttribute("aria-label") || each.getAttribute("aria-labelledby")
    || each.textContent.trim() || ["alert", "status"].includes(each.getAttribute("role"))))
  .map((each) => each.outerHTML)"""


def visit(page: Page, name: str) -> None:
    link = page.locator(f"#nav a[data-page={name}]")
    link.click()
    expect(link).to_have_attribute("aria-current", "page")
    expect(page.locator("main h1")).to_be_attached()


def test_pools_and_cache_show_what_the_server_holds(page: Page, site: Site) -> None:
    visit(page, "pools")
    expect(page.get_by_role("heading", name="demo 1 replica")).to_be_visible()
    rows = page.get_by_role("table", name="demo, replica 1").get_by_role("row")
    expect(rows).to_have_count(3)
    members = httpx.get(f"{site.url}/status").json()["pools"]["demo"][0]["members"]
    for member in members:
        expect(rows.filter(has_text=member["model"])).to_contain_text(str(member["total_blocks"]))
    visit(page, "cache")
    expect(page.get_by_text("Own blocks:")).to_be_visible()


def test_pools_are_asked_again_while_they_are_looked_at(context: BrowserContext, site: Site) -> None:
    page = context.new_page()
    page.clock.install()
    page.clock.pause_at(time.time() + 3600)  # an installed clock goes on by itself too
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    page.goto(f"{site.url}/console/#/pools")
    drawn = page.get_by_text("As of")
    expect(drawn).to_be_visible()
    for times in (2, 3):
        before = drawn.inner_text()
        with page.expect_response("**/v1/status"):
            page.clock.run_for(2000)
        assert asked.count("/v1/status") == times
        expect(drawn).not_to_have_text(before)  # the next question is planned when the answer has been drawn
    visit(page, "methods")
    page.clock.run_for(60_000)
    assert asked.count("/v1/status") == 3


def test_pools_stand_still_under_the_keyboard(context: BrowserContext, site: Site) -> None:
    page = context.new_page()
    page.clock.install()
    page.goto(f"{site.url}/console/#/pools")
    table = page.get_by_role("region", name="demo, replica 1")
    table.focus()
    with page.expect_response("**/v1/status"):
        page.clock.run_for(2000)
    expect(page.get_by_text("it stands still while you are in it")).to_be_visible()
    expect(table).to_be_focused()


def test_the_catalogue_has_every_method_with_its_parameters(page: Page, site: Site) -> None:
    visit(page, "methods")
    methods = httpx.get(f"{site.url}/v1/methods").json()["data"]
    assert page.locator("main details h2").all_inner_texts() == [method["name"] for method in methods]
    for method in methods:
        card = page.locator("main details", has=page.get_by_role("heading", name=method["name"], exact=True))
        card.locator("summary").click()
        expect(card.locator("tbody tr")).to_have_count(len(method["params"].get("properties", {})))
    page.get_by_role("link", name="Try pearl").click()
    expect(page.get_by_role("group", name="Method A").get_by_label("Method", exact=True)).to_have_value("pearl")


def test_a_tenant_sees_what_the_server_says_of_it(page: Page) -> None:
    said = {
        "tenant": "acme",
        "limits": {"requests_per_minute": 60, "pools": ["demo*"], "budget": None, "sharing": None},
        "left": {"requests_per_minute": 59.5},
        "usage": {"requests": 3, "completion_tokens": 1200},
    }
    zeta = {"limits": {"sharing": {"policy": "group", "group": "team"}}}
    page.route("**/v1/tenant", lambda route: route.fulfill(json=said))
    page.route("**/v1/tenants", lambda route: route.fulfill(json={"data": [said, {**said, "tenant": "zeta", **zeta}]}))
    visit(page, "tenant")
    expect(page.get_by_role("table", name="acme: usage")).to_contain_text("1,200")
    expect(page.get_by_role("table", name="acme: limits")).to_contain_text("no limit")
    expect(page.get_by_role("row", name="sharing as configured")).to_be_visible()
    expect(page.get_by_role("table", name="zeta: limits")).to_contain_text("policy: group, group: team")
    expect(page.get_by_role("heading", name="zeta", exact=True)).to_be_visible()


def test_the_tenant_page_stands_without_tenants(page: Page) -> None:
    visit(page, "tenant")
    expect(page.get_by_role("heading", name="Tenant", exact=True)).to_be_visible()
    expect(page.locator("main .alert")).to_have_count(0)


def test_an_experiment_is_plotted_with_the_arms_nobody_beats(page: Page) -> None:
    visit(page, "experiments")
    page.get_by_label("Report").select_option("demo")
    expect(page.get_by_role("heading", name="Demo arithmetic")).to_be_visible()
    expect(page.get_by_role("img", name="Quality against cost on arithmetic: 4 arms, 3 unbeaten")).to_be_visible()
    rows = page.get_by_role("table", name="Arms on arithmetic").get_by_role("row")
    expect(rows.filter(has_text="random 0.26")).to_contain_text("no")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_and_all_controls_have_names(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.get_by_label("Compare two methods").check()
    choose(page, "A", "speculative", verifier="match")
    choose(page, "B", "entropy_adaptive", threshold="0.1")
    ask(page, max_tokens="40", temperature="1", seed="3")
    wait_done(page, "A", "B")
    page.locator(".answer .token").first.click()
    for name in PAGES:
        if name != "generate":
            visit(page, name)
            expect(page.get_by_text("Loading…")).to_have_count(0)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 10
        assert [each for each in contrasts if each[0] < (3.0 if each[1] >= 24 else 4.5)] == [], name
        assert page.evaluate(NAMELESS) == [], name
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 22, 28)") == (scheme == "dark")


def test_the_theme_can_be_turned_and_stays(page: Page) -> None:
    body = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for _ in range(3):
        seen.append((page.evaluate(body), page.locator("#tools button").last.inner_text()))
        page.locator("#tools button").last.click()
    assert [name for _, name in seen] == ["Theme: auto", "Theme: light", "Theme: dark"]
    assert len({colour for colour, _ in seen}) == 2
    page.locator("#tools button").last.click()
    page.reload()
    expect(page.locator("#tools button").last).to_have_text("Theme: light")


@pytest.mark.parametrize("context", [NARROW], indirect=True)
def test_nothing_is_wider_than_a_phone(page: Page, context: BrowserContext) -> None:
    page.get_by_label("Compare two methods").check()
    choose(page, "A", "entropy_adaptive", threshold="0.1")
    choose(page, "B", "speculative", drafter="input_copy")
    ask(page, max_tokens="40", seed="3")
    wait_done(page, "A", "B")
    for name in PAGES:
        if name != "generate":
            visit(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
