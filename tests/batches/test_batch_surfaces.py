"""Lines of the other surfaces: each is answered as its endpoint would, once, and what it used is counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments import embeddings_http
from deployments.batches.inputs import Defaults, read_input
from deployments.batches.lines import Line
from deployments.batches.outputs import write_outputs
from deployments.responses.store import open_responses
from tests.batches.house import House, begin, content, ended, jsonl
from tests.batches.test_workplace import answer_all, answerer, outputs, place_of
from tests.deployments.responses.kit import kept_in

TURN = [{"role": "user", "content": "short"}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/responses": [{"input": "short", "max_output_tokens": n} for n in (3, 4)],
    "/v1/messages": [{"messages": TURN, "max_tokens": n} for n in (3, 4)],
    "/v1/embeddings": [{"input": ["ab", [1, 2, 3]]}, {"input": "abcd", "encoding_format": "base64"}],
    "/v1/score": [{"text_1": "ab", "text_2": ["c", "d"]}, {"text_1": "ab", "text_2": "cd", "scoring": "embedding"}],
    "/v1/rerank": [{"query": "ab", "documents": ["abc", "ab"], "scoring": "embedding"}],
    "/v1/tasks/score": [{"params": {"prompt": "ab", "completions": ["c", "d"]}}],
    "/v1/tasks/compress": [{"params": {"text": "abc", "lanes": 2}}, {"params": {"data": "YQ=="}}],
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    "/v1/messages": ({"messages": TURN, "max_tokens": 0}, "max_tokens"),
    "/v1/embeddings": ({"input": []}, "input"),
    "/v1/score": ({"text_1": "ab"}, "text_2"),
    "/v1/rerank": ({"query": "a", "documents": []}, "documents"),
    "/v1/tasks/score": ({"params": {"prompt": "a", "completions": []}}, "params.completions"),
    "/v1/tasks/compress": ({"params": {"text": "a", "lanes": 0}}, "params.lanes"),
}
OWN = {"id", "created", "created_at", "completed_at", "turnout", "store", "signature"}


def told(answer: Any) -> Any:
    """What an answer says, but for what names it, and times."""
    if isinstance(answer, dict):
        return {name: told(value) for name, value in answer.items() if name not in OWN}
    return [told(each) for each in answer] if isinstance(answer, list) else answer


def lines_of(endpoint: str, bodies: list[dict[str, Any]]) -> bytes:
    return jsonl(
        {"custom_id": f"id-{n}", "method": "POST", "url": endpoint, "body": {"model": "demo", **body}}
        for n, body in enumerate(bodies)
    )


@pytest.fixture
async def web(house: House) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=house.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t", headers={"authorization": "acme"}) as client:
        yield client


@pytest.mark.parametrize("endpoint", BODIES)
async def test_a_line_is_answered_as_its_endpoint_answers(
    house: House, web: httpx.AsyncClient, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings_http, "MANY", 1)  # written in a thread
    seen: list[Any] = []
    for name in ("embed", "score", "task", "generate"):
        original = getattr(house.pool, name)
        monkeypatch.setattr(house.pool, name, lambda call, original=original: seen.append(call) or original(call))
    bad, field = BAD[endpoint]
    bodies = [*BODIES[endpoint], bad]
    client = house.client("acme")
    batch = await ended(client, (await begin(client, lines_of(endpoint, bodies), endpoint=endpoint)).id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
        "completed",
        len(bodies) - 1,
        1,
    )
    assert {(call.tenant, call.key_id, call.priority, call.batch_id) for call in seen} == {
        ("acme", "k", "batch", batch.id)
    }
    rows = await content(client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"id-{n}" for n in range(len(bodies) - 1)]
    direct = [(await web.post(endpoint, json={"model": "demo", **body})).json() for body in bodies]
    assert told([row["response"]["body"] for row in rows]) == told(direct[:-1])
    read = sum(sum(each["usage"].get(n, 0) for n in ("prompt_tokens", "input_tokens")) for each in direct[:-1])
    written = sum(each["usage"].get("output_tokens", 0) for each in direct[:-1])
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (read, written)
    assert batch.usage.model_extra["turnout"]["flops"] == (20.0 if written else 0.0)
    [refused] = await content(client, batch.error_file_id)
    assert refused["custom_id"] == f"id-{len(bodies) - 1}"
    found = refused["response"]["body"]
    found["request_id"], direct[-1]["request_id"] = None, None
    assert found == direct[-1]
    assert field in found["error"]["message"]


@pytest.mark.parametrize("endpoint", ["/v1/responses", "/v1/messages"])
async def test_a_restarted_server_answers_no_line_twice_and_counts_each_once(tmp_path: Path, endpoint: str) -> None:
    slow, asked = tmp_path / "waits", list[str]()
    body = {"max_output_tokens": 3} if "responses" in endpoint else {"max_tokens": 3}

    def bodies() -> bytes:
        words = [*["short"] * 20, "short wait"]
        read = "input" if "responses" in endpoint else "messages"
        return lines_of(
            endpoint,
            [{read: w if read == "input" else [{"role": "user", "content": w}], **body} for w in words],
        )

    async with House(tmp_path, concurrency=4).open() as house:
        client = house.client()
        batch = await begin(client, bodies(), endpoint=endpoint)
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 20:
            pass
        slow.touch()
    house = House(tmp_path, concurrency=4)
    generate = house.pool.generate

    def noted(call: Any) -> Any:
        asked.append(call.messages[-1].content)
        shown = [turn.__class__(turn.role, turn.content.replace("wait", "")) for turn in call.messages]
        return generate(call.__class__(**{**fields(call), "messages": tuple(shown)}))

    house.pool.generate = noted  # type: ignore[method-assign]
    async with house.open():
        client = house.client()
        batch = await ended(client, batch.id)
        rows = await content(client, batch.output_file_id)
    assert asked == ["short wait"]
    assert [row["custom_id"] for row in rows] == [f"id-{n}" for n in range(21)]
    assert batch.usage.output_tokens == 3 * 21
    assert batch.usage.model_extra["turnout"]["flops"] == 210.0


def fields(call: Any) -> dict[str, Any]:
    return {name: getattr(call, name) for name in call.__slots__}


async def test_a_response_is_kept_where_its_line_says_so_and_can_be_followed(tmp_path: Path) -> None:
    house = House(tmp_path)
    store = house.service.responses = open_responses(kept_in(tmp_path))
    assert store is not None
    async with house.open():

        async def answered(*bodies: dict[str, Any], tenant: str = "acme") -> list[dict[str, Any]]:
            client = house.client(tenant)
            batch = await begin(client, lines_of("/v1/responses", list(bodies)), endpoint="/v1/responses")
            batch = await ended(client, batch.id)
            rows = await content(client, batch.output_file_id) + await content(client, batch.error_file_id)
            return [row["response"]["body"] for row in rows]

        few = {"max_output_tokens": 3}
        kept, left = await answered({"input": "short a", "store": True, **few}, {"input": "short b", **few})
        assert (kept["store"], left["store"]) == (True, False)
        assert store.load("acme", kept["id"]).response["output"] == kept["output"]
        after = [{"input": "short", "previous_response_id": each["id"], **few} for each in (kept, left)]
        followed, refused = await answered(*after)
        assert followed["previous_response_id"] == kept["id"]
        assert refused["error"]["param"] == "previous_response_id"
        [foreign] = await answered(after[0], tenant="other")
        assert foreign["error"]["param"] == "previous_response_id"


def test_a_job_without_a_server_takes_lines_of_all_surfaces(tmp_path: Path) -> None:
    asked = [(endpoint, body) for endpoint, bodies in BODIES.items() for body in bodies]
    asked.append(("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}))
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b"".join(lines_of(endpoint, [body]).replace(b"id-0", b"id-%d" % n) for n, (endpoint, body) in enumerate(asked))
    )
    place = place_of(tmp_path, 0)
    place.stage(read_input(str(source), Defaults(True, {"model": "demo", "temperature": 0.5})), 3, None)
    answer_all(answerer(tmp_path), place)
    good, [bad] = outputs(tmp_path, place)
    assert [row["custom_id"] for row in good] == [f"id-{n}" for n in range(len(asked) - 1)]
    assert bad["response"]["body"]["error"]["param"] == "previous_response_id"
    spent = [place.spent(block) for block in place.blocks()]
    assert sum(each.completion_tokens for each in spent) == 14
    write_outputs(str(tmp_path / "out.parquet"), str(tmp_path / "e"), place.records(True), [])
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    shown = [(row["text"], row["finish_reason"]) for row in table]
    assert shown[:5] == [
        ("aba", "incomplete"),
        ("abab", "incomplete"),
        ("aba", "max_tokens"),
        ("abab", "max_tokens"),
        (None, None),
    ]


def test_what_is_asked_for_all_lines_is_left_out_where_it_means_nothing(tmp_path: Path) -> None:
    defaults = Defaults(True, {"model": "m", "max_tokens": 5, "decoding": {"method": "plain"}})
    filled = {url: defaults.filled(Line(1, "a", url, {"input": "x"})).body for url in BODIES}
    assert filled["/v1/responses"] == {
        "model": "m",
        "max_output_tokens": 5,
        "decoding": {"method": "plain"},
        "input": "x",
    }
    assert filled["/v1/messages"]["max_tokens"] == 5
    assert filled["/v1/embeddings"] == {"model": "m", "input": "x"}
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"url": ["/v1/embeddings"], "body": [json.dumps({"input": "x"})]}), path)
    [line] = read_input(str(path), defaults)
    assert isinstance(line, Line)
    assert (line.endpoint, line.body) == ("/v1/embeddings", {"model": "m", "input": "x"})
