"""What stands on the page while an answer is being written, event by event, and what is left when it breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.deployments.console.driving import ask, choose, pane, text, tokens, wait_done
from tests.deployments.console.held_stream import HeldStreams, token
from tests.deployments.console.site import Site

pytestmark = pytest.mark.browser

# How many points of the chart have the colour of the switch threshold.
DASHES = """element => {
  const canvas = element.querySelector("canvas");
  const warn = getComputedStyle(canvas).getPropertyValue("--warn").match(/[0-9a-f]{2}/gi);
  const [r, g, b] = warn.map((each) => parseInt(each, 16));
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    const off = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
    if (off < 12 && data[at + 3] > 100) found += 1;
  }
  return found;
}"""
HEARD = """() => {
  window.heard = [];
  const live = document.getElementById("live");
  const hear = () => live.textContent && window.heard.push(live.textContent);
  new MutationObserver(hear).observe(live, { childList: true });
}"""


@pytest.fixture
def streams(page: Page) -> Iterator[HeldStreams]:
    """The page's questions go to the test, over a connection of their own."""
    with HeldStreams(meanwhile=lambda: page.wait_for_timeout(10)) as held:
        page.route("**/v1/chat/completions", lambda route: route.continue_(url=f"{held.url}/v1"))
        yield held


@pytest.fixture(scope="module")
def usage(site: Site) -> dict[str, Any]:
    """What a real answer ends with."""
    body = {"model": "demo", "prompt": "hi", "max_tokens": 2, "seed": 1}
    found: dict[str, Any] = httpx.post(f"{site.url}/v1/completions", json=body, timeout=60).json()["usage"]
    return found


def state(page: Page, side: str = "A") -> Any:
    return pane(page, side).locator(".state")


@pytest.mark.parametrize(("method", "threshold"), [("", "0.1"), ("entropy_adaptive", "0.1"), ("plain", None)])
def test_the_threshold_is_drawn_while_the_text_grows(
    page: Page, streams: HeldStreams, usage: dict[str, Any], method: str, threshold: str | None
) -> None:
    choose(page, "A", method)
    ask(page)
    held = streams.next()
    assert "params" not in held.body["decoding"] or held.body["decoding"]["params"] == {}
    held.send(token("a"), token("b", 1, source="demo-large", entropy_bits=2.0))
    expect(state(page)).to_have_text("Writing: 2 tokens so far.")
    note = pane(page).locator("figcaption")
    expect(note).to_contain_text("mean 1.25")
    dashes = pane(page).locator("figure").evaluate(DASHES)
    if threshold is None:
        expect(note).not_to_contain_text("threshold")
        assert dashes == 0
    else:
        expect(note).to_contain_text(f"the switch threshold, {threshold} bits")
        assert dashes > 100
    held.end(usage)
    wait_done(page)


def test_a_server_that_dies_leaves_what_it_wrote(page: Page, streams: HeldStreams) -> None:
    page.get_by_role("button", name="Run").focus()
    page.keyboard.press("Enter")
    held = streams.next()
    held.send(token("left "), token("over", 1))
    expect(state(page)).to_contain_text("Writing: 2")
    held.cut()
    expect(state(page)).to_have_text("Broken off after 2 tokens.")
    expect(pane(page).get_by_role("alert")).to_have_text("the connection to the server was lost.")
    assert text(page) == "left over"
    expect(pane(page)).to_have_attribute("aria-busy", "false")
    # The keyboard is where it was, and asks again.
    expect(page.get_by_role("button", name="Run")).to_be_focused()
    page.keyboard.press("Enter")
    streams.next().cut()
    expect(state(page)).to_have_text("No answer.")
    expect(pane(page).get_by_role("alert")).to_have_text("the connection to the server was lost.")


def test_waiting_can_be_ended_from_anywhere(page: Page, streams: HeldStreams) -> None:
    ask(page)
    held = streams.next()
    expect(state(page)).to_have_text("Asked; waiting for the first token.")
    page.locator("#tools button").last.focus()
    page.keyboard.press("Escape")
    expect(state(page)).to_have_text("Stopped after 0 tokens.")
    assert held.left()


def test_an_answer_goes_on_while_another_page_is_looked_at(
    page: Page, streams: HeldStreams, usage: dict[str, Any]
) -> None:
    ask(page, "what I typed")
    held = streams.next()
    held.send(token("one "))
    expect(state(page)).to_contain_text("Writing: 1")
    page.locator("#nav a[data-page=methods]").click()
    expect(page.get_by_role("heading", name="Methods", exact=True)).to_be_visible()
    held.send(token("two", 1))
    page.locator("#nav a[data-page=generate]").click()
    expect(page.get_by_label("Prompt")).to_have_value("what I typed")
    expect(state(page)).to_contain_text("Writing: 2")
    held.end(usage)
    wait_done(page)
    assert text(page) == "one two"


def test_four_thousand_tokens_are_followed_and_not_read_out(
    page: Page, streams: HeldStreams, usage: dict[str, Any]
) -> None:
    page.get_by_label("Compare two methods").check()
    page.evaluate(HEARD)
    ask(page)
    answer = pane(page).locator(".answer")
    both = [streams.next(), streams.next()]
    for start in range(0, 4000, 10):
        for held in both:
            held.send(*(token(f"w{place} ", place) for place in range(start, start + 10)))
    for side in "AB":
        expect(state(page, side)).to_contain_text("Writing: 4000")
    expect(page.locator(".parting")).to_have_text("The same so far: 4000 tokens.")
    at_end = "box => box.scrollHeight - box.scrollTop - box.clientHeight < 40"
    page.wait_for_function(f"() => ({at_end})(document.querySelector('.answer'))")
    # Whoever scrolls up is left there.
    answer.evaluate("box => { box.scrollTop = 0; }")
    page.wait_for_function("() => document.querySelector('.answer').scrollTop === 0")
    for held in both:
        held.send(token("last", 4000))
        held.end(usage)
    wait_done(page, "A", "B")
    assert answer.evaluate("box => box.scrollTop") == 0
    assert len(tokens(page)) == 4001
    page.wait_for_function("() => window.heard.join(' ').includes('Both answers are the same: 4001 tokens.')")
    heard = page.evaluate("window.heard")
    assert len(heard) <= 4
    assert sum(map(len, heard)) < 500
    answer.focus()
    page.keyboard.press("End")
    last = answer.locator(".token").last
    expect(last).to_be_in_viewport()
    assert answer.get_attribute("aria-activedescendant") == last.get_attribute("id")
    pane(page).get_by_text("Plain text").click()
    assert pane(page).get_by_role("region", name="Answer A, plain text").inner_text().endswith("w3999 last")


def test_plain_text_is_what_was_said_and_not_the_tokens_joined(
    page: Page, streams: HeldStreams, usage: dict[str, Any]
) -> None:
    page.evaluate(HEARD)
    ask(page)
    held = streams.next()
    held.send(token("caf"), token("\ufffd", 1), said="caf")
    held.send(token("\ufffd", 2), token("<|im_end|>", 3), said="é")
    held.end(usage)
    wait_done(page)
    pane(page).get_by_text("Plain text").click()
    expect(pane(page).get_by_role("region", name="Answer A, plain text")).to_have_text("café")
    heard = " ".join(page.evaluate("window.heard"))
    assert "4 tokens. café" in heard
    assert "im_end" not in heard


def test_a_character_of_several_tokens_stands_in_the_last_of_them(
    page: Page, streams: HeldStreams, usage: dict[str, Any]
) -> None:
    ask(page)
    held = streams.next()
    held.send(token("caf"), token("", 1, bytes=[0xC3]), said="caf")
    options = pane(page).get_by_role("option")
    expect(options).to_have_count(2)
    assert options.all_inner_texts() == ["caf", ""], "half a character is none yet"
    held.send(token("é", 2, bytes=[0xA9], source="demo-large"), token("s", 3, bytes=None))
    held.send(token("\ufffd", 4, bytes=[0x80]), token("!", 5), token("", 6, bytes=[0xE2]))
    held.end(usage)
    wait_done(page)
    assert options.all_inner_texts() == ["caf", "", "é", "s", "\ufffd", "!", ""], "bytes that make none are U+FFFD"
    names = options.evaluate_all("spans => spans.map(span => span.getAttribute('aria-label'))")
    assert names[1:3] == ["part of é, demo-small", "é, demo-large"]
    pane(page).locator(".answer").focus()
    page.keyboard.press("ArrowRight")
    expect(pane(page).locator(".detail")).to_contain_text("c3")


def test_each_token_says_in_words_what_its_marks_say(page: Page, streams: HeldStreams, usage: dict[str, Any]) -> None:
    ask(page)
    held = streams.next()
    held.send(
        token("a", source="demo-large", kind="recovered", rejected=["b", " "]),
        token("\n", 1, source="demo-large", kind="bonus"),
        token("c", 2, source="demo-large", kind="accepted"),
    )
    held.end(usage)
    wait_done(page)
    names = [
        "a, demo-large, recovered, instead of b space", "new line, demo-large, bonus", "c, demo-large, accepted",
    ]  # fmt: skip
    options = pane(page).get_by_role("option")
    assert options.evaluate_all("spans => spans.map(span => span.getAttribute('aria-label'))") == names
    legend = pane(page).get_by_role("list", name="Which model wrote what")
    for said in ("accepted 1", "recovered 1", "bonus 1", "rejected 2"):
        expect(legend.get_by_role("listitem").filter(has_text=said)).to_have_count(1)


def test_none_can_be_asked_for(page: Page, streams: HeldStreams) -> None:
    choose(page, "A", "entropy_adaptive", threshold_down="none", clear_on_switch="none")
    ask(page)
    held = streams.next()
    assert held.body["decoding"]["params"] == {"threshold_down": None, "clear_on_switch": None}
    held.cut()
    expect(state(page)).to_have_text("No answer.")
