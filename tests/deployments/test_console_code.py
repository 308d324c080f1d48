"""What of the console's code needs no page, run by the Node that Playwright brings, beside the engine's own rules."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import httpx
import playwright
import pytest

import deployments.console
from decoding.parts import with_parts
from deployments.http import build_http
from pool.validation import RequestValidator
from tests.deployments.conftest import poll
from tests.deployments.console.held_stream import HeldStreams, token
from tests.deployments.in_process import make_service
from turnout.candidate_sets import CandidateSet, Doubt, Outcome, ReportedCandidate
from turnout.registry import all_methods, get_method, names

NODE = Path(playwright.__file__).parent / "driver" / "node"
OWN = {"threshold": 0.1, "window": 1, "min_stay": 2}
METHODS = [{"name": info.name, "params": with_parts(info.params.model_json_schema())} for info in all_methods()]


class Code:
    """The page's modules, outside of a page."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(Path(deployments.console.__file__).parent / "static", folder, dirs_exist_ok=True)
        (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
        self._folder = folder

    def run(self, imports: str, body: str, **given: Any) -> Any:
        """What `body` returns; `given` are its variables."""
        names = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
        script = (
            f"{imports}\n{names}const out = await (async () => {{ {body} }})();\nconsole.log(JSON.stringify(out));\n"
        )
        path = self._folder / "run.js"
        path.write_text(script, encoding="utf-8")
        done = subprocess.run([NODE, path], capture_output=True, timeout=60, check=False, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Code:
    return Code(tmp_path_factory.mktemp("code"))


def test_a_link_holds_everything_and_a_spoilt_one_nothing(code: Code) -> None:
    state = {"prompt": "né? 日本 🚀 <b>", "sides": [{"method": "plain", "params": {"model": "small"}}]}
    body = """const link = encode(state);
        const spoilt = [link.slice(0, -3), "%%%", encode([1]), encode(1)];
        return [link, decode(link), ...spoilt.map(decode)];"""
    link, again, *spoilt = code.run('import { decode, encode } from "./share.js";', body, state=state)
    assert again == state
    assert spoilt == [None] * 4
    assert set(link) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_a_number_is_sent_as_it_was_typed_or_as_text(code: Code) -> None:
    typed = [
        "5",
        " 0.25 ",
        "-1",
        "1e3",
        "9007199254740991",
        "9007199254740993",
        "18446744073709551615",
        "1e999",
        "a",
        " ",
    ]
    read = code.run('import { parsed } from "./schema_form.js";', "return typed.map(parsed);", typed=typed)
    assert read[:5] == [5, 0.25, -1, 1000, 9007199254740991]
    assert read[5:] == typed[5:]


def test_every_parameter_of_every_method_has_a_field(code: Code) -> None:
    body = """return methods.map(({ params }) => Object.entries(params.properties ?? {}).map(([name, schema]) => {
        const field = resolve(schema, params);
        return [name, Boolean(field.type || field.enum || field.choices || params["x-parts"]?.[field["x-slot"]]),
          field.nullable === true];
    }));"""
    found = code.run('import { resolve } from "./schema_form.js";', body, methods=METHODS)
    for info, fields in zip(all_methods(), found, strict=True):
        assert [name for name, _, _ in fields] == list(info.params.model_fields)
        assert [name for name, drawn, _ in fields if not drawn] == [], info.name
        properties = info.params.model_json_schema().get("properties", {})
        nullable = [name for name, schema in properties.items() if {"type": "null"} in schema.get("anyOf", [])]
        assert [name for name, _, none in fields if none] == nullable


async def test_every_part_of_a_request_is_listed_with_its_schema() -> None:
    transport = httpx.ASGITransport(app=build_http(make_service()))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        listed = (await client.get("/v1/methods")).json()["request"]
    slots = {field["x-slot"] for field in listed["properties"].values() if "x-slot" in field}
    assert slots
    assert {field.get("x-read-by") for field in listed["properties"].values()} - {None} <= slots
    assert "context" in listed["properties"]
    assert {slot: set(listed["x-parts"][slot]) for slot in slots} == {
        slot: set(names(f"decoding.{slot}")) for slot in slots
    }


@pytest.mark.parametrize(
    ("own", "name", "given"),
    [
        (OWN, "", {}),
        (OWN, "", {"threshold": 0.25}),
        (OWN, "entropy_adaptive", {}),
        (OWN, "entropy_adaptive", {"window": 4}),
        ({}, "entropy_adaptive", {}),
        ({"calibration": "mine"}, "", {"threshold": 0.25}),
    ],
)
def test_the_line_that_is_drawn_is_the_engines(
    code: Code, own: dict[str, Any], name: str, given: dict[str, Any]
) -> None:
    model = {"default_method": "entropy_adaptive", "default_params": own, "routed": False}
    drawn = _drawn(code, model, name, given)
    intake = RequestValidator("demo", {}, None, 10, 10, "entropy_adaptive", own)  # type: ignore[arg-type]
    params = intake.plan(name or "entropy_adaptive", given).params
    assert drawn == {"threshold": params.threshold, "window": params.window}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "name", "given"),
    [
        ({"routed": True}, "", {}),
        ({}, "plain", {}),
        ({}, "cascade", {"threshold": 0.5}),
        ({}, "entropy_adaptive", {"threshold": "much"}),
        ({"default_params": {"calibration": "mine"}}, "", {}),
        ({}, "", {"calibration": "mine"}),
        ({"default_method": "gone"}, "", {}),
    ],
)
def test_what_is_not_known_is_not_drawn(code: Code, model: dict[str, Any], name: str, given: dict[str, Any]) -> None:
    whole = {"default_method": "entropy_adaptive", "default_params": {}, "routed": False, **model}
    assert _drawn(code, whole, name, given)["threshold"] is None


def _drawn(code: Code, model: dict[str, Any], name: str, given: dict[str, Any]) -> Any:
    return code.run(
        'import { inForce, switchRule } from "./in_force.js";',
        "return switchRule(methods, inForce(methods, model, name, given));",
        methods=METHODS, model=model, name=name, given=given,
    )  # fmt: skip


READ = """import { writeFileSync } from "node:fs";
import { stream } from "./api.js";
globalThis.sessionStorage = { getItem: () => null };"""
ASK = """const real = globalThis.fetch;
globalThis.fetch = (path, options) => real(new URL(path.slice(3), url), options);
const seen = [];
try {
  for await (const event of stream("v1/chat/completions", { n: 1 }, undefined)) {
    if (seen.push(event) === 2) writeFileSync(mark, "");
  }
} catch (error) { return [seen.length, error.constructor.name, error.message]; }
return [seen.length, null, null];"""


@pytest.mark.parametrize(
    ("how", "events", "said"),
    [
        ("ends", 3, None),
        ("cut", 2, "the connection to the server was lost"),
        ("shut", 2, "the connection ended before the answer did"),
        ("fault", 2, "the pool broke"),
    ],
)
def test_a_stream_says_how_it_ended(code: Code, tmp_path: Path, how: str, events: int, said: str | None) -> None:
    mark = tmp_path / "seen"
    with HeldStreams() as streams, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(code.run, READ, ASK, url=streams.url, mark=str(mark))
        held = streams.next()
        assert held.body == {"n": 1}
        held.send(token("é"))
        held.send(token("\n\ndata: ", 1), token("日", 2))
        poll(mark.exists, "both are read", 60)
        if how == "ends":
            held.end({})
        elif how == "fault":
            held.say('{"error": {"message": "the pool broke", "param": null}}')
        elif how == "cut":
            held.cut()
        else:
            held.shut()
        assert asked.result(60) == [events, None if said is None else "ApiError", said]


def test_an_arm_is_unbeaten_where_no_other_is_as_good_for_less(code: Code) -> None:
    points = [{"quality": quality, "cost": cost} for quality, cost in ((1, 1), (1, 2), (2, 2), (2, 2), (0, 0), (3, 9))]
    best = code.run(
        'import { frontier } from "./experiments_page.js";',
        "const best = frontier(points); return points.map((point) => best.has(point));",
        points=points,
    )
    assert best == [True, False, True, True, True, True]


def _set(*candidates: ReportedCandidate, **more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"slot": "aggregators", "part": "p", "rule": "r", "score": "s", "answers": (0,)}
    return asdict(CandidateSet(candidates=candidates, **known | more))


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        ([ReportedCandidate("a", score=1.0, answers=(0,))], "Candidate 1 is shown: there is no other."),
        (
            [ReportedCandidate("a", score=1.0), ReportedCandidate("b", score=2.0, answers=(0,))],
            "Candidate 2 is shown: its score, 2, is the greatest of 2.",
        ),
        (
            [ReportedCandidate("a", score=0.6), ReportedCandidate("b", score=0.4, answers=(0,))],
            "Candidate 2 is shown: its score, 0.4, is number 2 of 2.",
        ),
        (
            [
                ReportedCandidate("x", score=9.0, group="7", votes=1.0),
                ReportedCandidate("y", score=1.0, group="<b>", votes=1.5),
                ReportedCandidate("z", score=2.0, group="<b>", votes=1.0, answers=(0,)),
            ],
            "Candidate 3 is shown: its final answer, “<b>”, has 2.5 of 3.5 votes, the most; its score, 2, is the"
            " greatest of the 2 with it.",
        ),
        (
            [ReportedCandidate("a", ended=False), ReportedCandidate("b", score=-3.0, answers=(0,))],
            "Candidate 2 is shown: it was the first to end. 1 not needed for the choice was cancelled.",
        ),
        (
            [ReportedCandidate("a"), ReportedCandidate("b", answers=(0,))],
            "Candidate 2 is shown.",
        ),
    ],
)  # fmt: skip
def test_the_reason_follows_from_scores_and_votes(code: Code, candidates: list[ReportedCandidate], said: str) -> None:
    read = 'import { reason } from "./candidates_view.js";'
    assert code.run(read, "return reason(set);", set=_set(*candidates)) == said


def test_a_search_says_how_many_of_the_found_are_shown(code: Code) -> None:
    read = 'import { reason } from "./candidates_view.js";'
    found = [ReportedCandidate("a", answers=(0, 2)), ReportedCandidate("b", answers=(1,)), ReportedCandidate("c")]
    sets = [_set(*found, slot="search", omitted=1), _set(*found[1:], slot="search")]
    said = code.run(read, "return sets.map(reason);", sets=sets)
    assert said == ["The best 2 are shown, of 4 found.", "The best is shown, of 2 found."]


def test_samples_are_counted_by_meaning(code: Code) -> None:
    samples = [ReportedCandidate(text, group=f"meaning {meaning}") for text, meaning in (("a", 1), ("b", 2), ("c", 1))]
    given = _set(*samples, slot="uncertainty")
    read = 'import { reason, votes } from "./candidates_view.js";'
    why, counted = code.run(read, "return [reason(set), votes(set)];", set=given)
    assert why == "None of these 3 is shown. They have 2 different meanings."
    assert [(each["group"], each["weight"]) for each in counted] == [("meaning 1", 2), ("meaning 2", 1)]


def test_runs_of_tokens_are_one_piece_and_merged_ways_name_it(code: Code) -> None:
    nodes = [{"id": place - 1, "text": text} for place, text in enumerate(["", "a", "b", "c", "d", "e", "f"])]
    edges = [(0, 1, -0.1), (1, 2, -0.2), (2, 3, -0.7), (2, 4, -0.6), (3, 5, -1.0), (4, 5, -2.0), (5, 6, -0.5)]
    graph = {
        "nodes": nodes, "ends": [5, 6], "paths": 4, "omitted": 0,
        "edges": [dict(zip(("before", "after", "logprob"), edge, strict=True)) for edge in edges],
    }  # fmt: skip
    body = """const flat = (piece) => [piece.joins ? `to ${piece.joins.text}` : piece.text,
      Math.round(10 * piece.logprob), ...piece.children.map(flat)];
    return branches(graph).children.map(flat);"""
    # The likelier comes first; e stands after d, and is named where c leads to it. A piece ends where an answer may.
    tree = [["ab", -3, ["d", -6, ["e", -20, ["f", -5]]], ["c", -7, ["to e", -10]]]]
    assert code.run('import { branches } from "./tree_view.js";', body, graph=graph) == tree


def test_every_outcome_of_a_doubt_has_words(code: Code) -> None:
    doubts = [asdict(Doubt(0, "snne", 0.5, limit=0.4, outcome=outcome)) for outcome in get_args(Outcome)]
    said = code.run('import { outcome } from "./doubt_view.js";', "return doubts.map(outcome);", doubts=doubts)
    assert len(set(said)) == len(said) == 4
    assert all(said)


DOM = """globalThis.Node = class {};
class Element extends Node {
  constructor() { super(); this.children = []; this.dataset = {}; this.value = ""; }
  setAttribute() {} removeAttribute() {} addEventListener() {} focus() {}
  append(...more) { this.children.push(...more); } replaceChildren() { this.children = []; }
}
globalThis.document = { createElement: () => new Element(), createTextNode: (text) => text };
"""
LISTS = f"{DOM}const {{ SchemaForm }} = await import('./schema_form.js');"


def test_branches_within_branches_are_drawn_to_a_depth_that_can_be_read(code: Code) -> None:
    nodes, edges, at = [{"id": -1, "text": ""}], list[dict[str, float]](), 0
    for _ in range(2040):  # at each token one alternative that does not continue
        nodes += [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]
        edges += [{"before": at, "after": len(nodes) - place, "logprob": -place} for place in (1, 2)]
        at = len(nodes) - 1
    graph = {"nodes": nodes, "edges": edges, "ends": [], "paths": 1, "omitted": 0}
    read = f"{DOM}const {{ TreeView, branches }} = await import('./tree_view.js');"
    assert code.run(read, "return new TreeView(branches(graph), new Map(), 'tree').items.size;", graph=graph) == 80


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("best_of", {"rerank": {"name": "nbest", "terms": [{"part": {"name": "mbr", "first": "logprob"}}]}}),
        ("best_of", {"rerank": {"name": "nbest", "terms": [{"part": "logprob"}, {"part": "mbr", "weight": 2}]}}),
        ("best_of", {"k": 3, "rerank": "self_certainty"}),
        ("search", {"search": {"name": "lattice", "suffix": 2}, "width": 8}),
        ("abstain", {"uncertainty": {"name": "semantic_entropy", "judge": "final_answer"}, "inner": "best_of"}),
        ("cascade", {"uncertainty": None}),
        ("step_speculation", {"scorer": "self_grade", "speculate": {"drafter": {"name": "input_copy"}}}),
        ("step_speculation", {"scorer": "self_grade", "speculate": {}}),
    ],
)  # fmt: skip
def test_the_form_sends_what_it_was_given(code: Code, method: str, values: dict[str, Any]) -> None:
    schema = next(each["params"] for each in METHODS if each["name"] == method)
    body = "const form = new SchemaForm(schema, 'p', () => {}); form.value = values; return form.value;"
    found = code.run(LISTS, body, schema=schema, values=values)
    parse = get_method(method).parse
    assert parse(found) == parse(values)
