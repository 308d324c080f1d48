"""What a person does on the page, and what is then to be seen."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

PROBLEM = "What is 69*9-32*6+44?"
HARD = "What is 87*96-78*9+65*4-33?"  # the demo models answer it differently


def choose(page: Page, side: str, method: str, **params: str) -> None:
    group = page.get_by_role("group", name=f"Method {side}")
    group.get_by_label("Method", exact=True).select_option(method)
    if params:
        if group.locator("details").get_attribute("open") is None:
            group.locator("summary").click()
        for name, value in params.items():
            field = group.get_by_label(name, exact=True)
            if field.evaluate("element => element.tagName") == "SELECT":
                field.select_option(label=value)
            else:
                field.fill(value)


def ask(page: Page, prompt: str = PROBLEM, **sampling: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    if (
        sampling
        and page.locator("details", has=page.locator("summary", has_text="Sampling")).get_attribute("open") is None
    ):
        page.locator("summary", has_text="Sampling").click()
    for name, value in sampling.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_role("button", name="Run").click()


def pane(page: Page, side: str = "A") -> Locator:
    return page.get_by_role("region", name=f"Answer {side}", exact=True)


def wait_done(page: Page, *sides: str) -> None:
    for side in sides or ("A",):
        expect(pane(page, side).locator(".state")).to_contain_text("Done")


def tokens(page: Page, side: str = "A") -> list[dict[str, str]]:
    """Text and classes of every token shown, its marks left out."""
    found: list[dict[str, str]] = (
        pane(page, side)
        .locator(".answer .token")
        .evaluate_all(
            """spans => spans.map(span => ({
            text: [...span.childNodes].filter(node => node.nodeType === Node.TEXT_NODE).map(node => node.data).join(""),
            classes: span.className,
        }))"""
        )
    )
    return found


def text(page: Page, side: str = "A") -> str:
    return "".join(token["text"] for token in tokens(page, side))
