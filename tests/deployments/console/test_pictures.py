"""The pictures of the documentation, taken of the real page; `make console-shots` puts them where they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.deployments.console.driving import ask, choose, wait_done

pytestmark = pytest.mark.browser

MAX_BYTES = 150_000
EAD = {"threshold": "0.1", "window": "1", "min_stay": "2", "effect": "current"}
WIDE = {"viewport": {"width": 1200, "height": 740}}
TWO = {"viewport": {"width": 1140, "height": 640}}
PHONE = {"viewport": {"width": 360, "height": 780}}


def take(page: Page, path: Path) -> None:
    page.screenshot(path=path)
    size = path.stat().st_size
    assert 5_000 < size <= MAX_BYTES, f"{path.name} has {size} bytes"


@pytest.mark.parametrize("context", [WIDE], indirect=True)
def test_one_answer_in_light(page: Page, pictures: Path) -> None:
    page.emulate_media(color_scheme="light")
    choose(page, "A", "entropy_adaptive", **EAD)
    ask(page, seed="5", temperature="0", max_tokens="100")
    wait_done(page)
    page.locator(".answer .m1").nth(1).hover()
    expect(page.locator(".detail dl")).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    take(page, pictures / "console.png")


@pytest.mark.parametrize("context", [TWO], indirect=True)
def test_a_comparison_in_dark(page: Page, pictures: Path) -> None:
    page.emulate_media(color_scheme="dark")
    page.get_by_label("Compare two methods").check()
    choose(page, "A", "speculative", drafter="model_chain", length="fixed", verifier="match")
    choose(page, "B", "entropy_adaptive", **EAD)
    ask(page, seed="3", temperature="1", max_tokens="100")
    wait_done(page, "A", "B")
    page.locator(".answer").first.locator(".k-recovered").first.hover()
    page.evaluate("scrollTo(0, 0)")
    take(page, pictures / "console-compare.png")


@pytest.mark.parametrize("context", [PHONE], indirect=True)
def test_a_phone(page: Page, pictures: Path) -> None:
    choose(page, "A", "entropy_adaptive", **EAD)
    ask(page, seed="5", temperature="0", max_tokens="100")
    wait_done(page)
    page.locator(".pane").first.scroll_into_view_if_needed()
    page.evaluate("document.querySelector('.pane').scrollIntoView()")
    take(page, pictures / "console-phone.png")
