"""Views of many answers: candidates with votes, hypotheses as a tree, doubt next to the answer, and their forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.deployments.console.driving import ask, choose, pane, text, wait_done
from tests.deployments.console.held_stream import HeldStreams, token
from tests.deployments.console.site import Site
from tests.deployments.console.test_streams import usage as usage

pytestmark = pytest.mark.browser

MARKUP = "<img src=x onerror='window.owned = 1'>"


@pytest.fixture
def streams(page: Page) -> Iterator[HeldStreams]:
    """The page's questions go to the test."""
    with HeldStreams(meanwhile=lambda: page.wait_for_timeout(10)) as held:
        page.route("**/v1/chat/completions", lambda route: route.continue_(url=f"{held.url}/v1"))
        yield held


def answered(page: Page, streams: HeldStreams, usage: dict[str, Any], **more: Any) -> None:
    """Show an answer whose usage has these fields besides."""
    ask(page)
    held = streams.next()
    assert held.body["decoding"]["candidates"] is True
    held.send(token("42"))
    held.end({**usage, "turnout": {**usage["turnout"], **more}})
    wait_done(page)


def candidate(said: str, **more: Any) -> dict[str, Any]:
    known = {"text": said, "tokens": 2, "logprob": -1.0, "score": None, "group": "", "votes": None, "answers": []}
    return {**known, "ended": True, "cut": False, "path": [], **more}


def found_set(slot: str, part: str, candidates: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    known = {"slot": slot, "part": part, "rule": "How it chooses", "score": "nats", "answers": [0], "omitted": 0}
    return {**known, "candidates": candidates, "graph": None, **more}


def part_field(page: Page, label: str) -> Locator:
    return page.get_by_role("group", name="Method A").get_by_label(label, exact=True)


@pytest.mark.smoke
def test_candidates_stand_side_by_side_with_votes(page: Page, streams: HeldStreams, usage: dict[str, Any]) -> None:
    candidates = [
        candidate(f"so {MARKUP}", group="7", votes=1.0, score=-0.5),
        candidate("Answer: 42", group="42", votes=1.0, score=-0.3),
        candidate("well\nAnswer: 42", group="42", votes=1.0, score=-0.2, answers=[0]),
        candidate("thin", ended=False),
    ]
    answered(page, streams, usage, candidates=[found_set("aggregators", "majority", candidates, omitted=3)], doubts=[])
    view = pane(page).get_by_role("region", name="Candidates: majority")
    expect(view.get_by_text("Candidate 3 is shown: its final answer, “42”, has 2 of 3 votes, the most")).to_be_visible()
    votes = view.get_by_role("table", name="Votes")
    assert votes.get_by_role("rowheader").all_inner_texts() == ["42 shown", "7"]
    cards = view.get_by_role("list", name="Candidates of majority").get_by_role("listitem")
    expect(cards).to_have_count(4)
    expect(cards.nth(2)).to_contain_text("shown")
    expect(cards.nth(3)).to_contain_text("cancelled")
    expect(cards.nth(0).get_by_role("region", name="Text of candidate 1")).to_have_text(f"so {MARKUP}")
    boxes = [cards.nth(place).bounding_box() for place in range(2)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"
    expect(view.get_by_text("3 more are left out.")).to_be_visible()
    assert page.evaluate("window.owned") is None


def test_answers_of_a_vote_are_the_servers(page: Page) -> None:
    choose(page, "A", "best_of", k="4")
    ask(page, max_tokens="40", temperature="1", seed="3")
    wait_done(page)
    view = pane(page).get_by_role("region", name="Candidates: majority")
    cards = view.get_by_role("list", name="Candidates of majority").get_by_role("listitem")
    expect(cards).to_have_count(4)
    taken = cards.filter(has=page.locator(".badge", has_text="shown"))
    expect(taken).to_have_count(1)
    shown = taken.get_by_role("region").inner_text()
    assert shown.strip()
    assert shown in text(page)
    expect(view.locator(".why")).to_contain_text("votes")


TEXTS = ["", "one ", "more ", "time", "day", MARKUP]
GRAPH = {
    "nodes": [{"id": place - 1, "text": said} for place, said in enumerate(TEXTS)],
    "edges": [
        {"before": before, "after": after, "logprob": logprob}
        for before, after, logprob in ((0, 1, -0.1), (1, 2, -0.2), (2, 3, -0.5), (2, 4, -1.5), (0, 5, -3.0))
    ],
    "ends": [3, 4, 5], "paths": 3, "omitted": 0,
}  # fmt: skip
BEAMS = [
    candidate("one more time", score=-0.3, path=[1, 2, 3], answers=[0]),
    candidate("one more day", score=-0.6, path=[1, 2, 4]),
    candidate(MARKUP, score=None, path=[5], ended=False),
]


def test_hypotheses_are_a_tree_that_the_keyboard_walks(page: Page, streams: HeldStreams, usage: dict[str, Any]) -> None:
    answered(page, streams, usage, candidates=[found_set("search", "beam", BEAMS, graph=GRAPH)], doubts=[])
    view = pane(page).get_by_role("region", name="Hypotheses: beam")
    rows = view.get_by_role("table", name="The best found").get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.nth(1)).to_contain_text("one more time shown")
    tree = view.get_by_role("tree", name="Tree of beam")
    items = tree.locator("[role=treeitem]")
    expect(items).to_have_count(4)
    own = items.evaluate_all("items => items.map(item => item.querySelector('code').textContent)")
    assert own == ["one more␣", "time", "day", MARKUP], "the shared beginning stands once"
    expect(items.nth(1)).to_contain_text("no. 1, -0.3, shown")
    items.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(items.nth(2)).to_be_focused()
    expect(items.nth(2)).to_have_attribute("aria-selected", "true")
    expect(view.locator(".branch")).to_contain_text("one more day")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(items.nth(0)).to_be_focused()
    expect(items.nth(0)).to_have_attribute("aria-expanded", "false")
    expect(items.nth(1)).to_be_hidden()
    page.keyboard.press("End")
    expect(tree.get_by_text(MARKUP)).to_be_visible()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(items.nth(1)).to_be_visible()
    assert tree.locator("[tabindex='0']").count() == 1, "one stop of the tab key"
    assert page.evaluate("window.owned") is None


def test_a_search_is_chosen_by_its_schema_and_its_lattice_shown(page: Page) -> None:
    choose(page, "A", "search", width="3", search="lattice")
    nested = page.get_by_role("group", name="Method A").locator(".nested:visible")
    nested.get_by_label("suffix", exact=True).fill("1")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, max_tokens="8", temperature="0")
    assert asked.value.post_data_json["decoding"]["params"]["search"] == {"name": "lattice", "suffix": 1}
    wait_done(page)
    view = pane(page).get_by_role("region", name="Hypotheses: lattice")
    best = view.get_by_role("table", name="The best found").get_by_role("row").nth(1)
    expect(best).to_contain_text("shown")
    expect(view.locator(".tree .taken .badge.good").first).to_contain_text("no. 1")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than a phone"


@pytest.mark.parametrize(
    ("limit", "outcome"), [(None, "reported"), (0.7, "abstained"), (1.2, "kept"), (0.5, "deferred")]
)
def test_doubt_stands_next_to_the_answer(
    page: Page, streams: HeldStreams, usage: dict[str, Any], limit: float | None, outcome: str
) -> None:
    doubt = {"answer": 0, "part": "semantic_entropy", "value": 0.9, "unit": "nats", "meaning": f"entropy {MARKUP}"}
    doubt |= {"least": 0.0, "greatest": 1.6, "limit": limit, "outcome": outcome}
    samples = [candidate(said, group=f"meaning {place}") for place, said in ((1, "yes"), (2, "no"), (1, "aye"))]
    answered(page, streams, usage, doubts=[doubt], candidates=[found_set("uncertainty", "semantic_entropy", samples)])
    view = pane(page).get_by_role("region", name="Doubt", exact=True)
    expect(view).to_contain_text("Doubt: 0.9 nats")
    expect(view).to_contain_text(f"semantic_entropy: entropy {MARKUP}")
    expect(view.get_by_role("meter", name="Doubt, from 0 to 1.6")).to_be_visible()
    said = {"reported": "No limit is set", "abstained": "Above the limit, 0.7", "kept": "Not above the limit, 1.2"}
    expect(view).to_contain_text(said.get(outcome, "another model's answer"))
    says_so = "No answer is given: the doubt is too high" in pane(page).locator(".state").inner_text()
    assert says_so == (outcome == "abstained")
    expect(pane(page).get_by_role("table", name="Meanings").get_by_role("row")).to_have_count(3)
    assert page.evaluate("window.owned") is None


def test_parts_within_parts_and_lists_of_objects_are_chosen_by_schema(page: Page, site: Site) -> None:
    choose(page, "A", "best_of", k="2", rerank="nbest")
    group = page.get_by_role("group", name="Method A")
    group.get_by_role("button", name="Add to terms").click()
    group.get_by_label("part", exact=True).select_option("mbr")
    group.get_by_label("weight", exact=True).fill("much")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, max_tokens="4", temperature="1")
    sent = {"name": "nbest", "terms": [{"part": "mbr", "weight": "much"}]}
    assert asked.value.post_data_json["decoding"]["params"]["rerank"] == sent
    expect(group.get_by_label("weight", exact=True)).to_have_attribute("aria-invalid", "true")
    group.get_by_label("weight", exact=True).fill("2")
    ask(page, max_tokens="4", temperature="1")
    wait_done(page)
    expect(pane(page).get_by_role("region", name="Candidates: nbest")).to_be_visible()
    choose(page, "A", "abstain", uncertainty="semantic_entropy")
    expect(part_field(page, "judge")).to_be_visible()
    assert {"asked", "final_answer"} <= set(part_field(page, "judge").locator("option").all_inner_texts())
