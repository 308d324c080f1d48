"""/v1/embeddings, /v1/score and /v1/rerank: shapes, refusals by field, order, billing."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import jsonschema
import pytest

from deployments.access.admission import estimated_tokens
from deployments.openapi.document import PATH
from deployments.reading import MAX_INPUTS
from turnout.calls import ScoreCall
from turnout.embed_calls import EmbedCall


async def test_both_encodings_hold_the_same_numbers(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "input": ["ab", [1, 2, 3]], "user": "somebody"}
    floats = (await http.post("/v1/embeddings", json=body)).json()
    coded = (await http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
    for length, one, other in zip((2, 3), floats["data"], coded["data"], strict=True):
        assert one["embedding"] == list(struct.unpack("<2f", base64.b64decode(other["embedding"])))
        assert one["embedding"] == pytest.approx([math.cos(length), math.sin(length)], abs=1e-6)
    assert floats["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [each["index"] for each in floats["data"]] == [0, 1]


async def test_documents_come_by_relevance(http: httpx.AsyncClient) -> None:
    body = {"query": "four", "documents": ["seven..", "five.", {"text": "fore"}], "scoring": "embedding"}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = (await http.post(path, json=body)).json()
        assert [each["index"] for each in found["results"]] == [2, 1, 0]
        assert [each["document"]["text"] for each in found["results"]] == ["fore", "five.", "seven.."]
        expected = [(1 + math.cos(apart)) / 2 for apart in (0, 1, 3)]
        assert [each["relevance_score"] for each in found["results"]] == pytest.approx(expected, abs=1e-6)
    short = (await http.post("/rerank", json={**body, "top_n": 1, "return_documents": False})).json()
    assert [sorted(each) for each in short["results"]] == [["index", "relevance_score"]]


async def test_scores_are_likelihoods_in_the_order_of_the_pairs(http: httpx.AsyncClient) -> None:
    for path in ("/score", "/v1/score"):
        one = (await http.post(path, json={"text_1": "q", "text_2": ["a", "b"]})).json()
        assert [each["index"] for each in one["data"]] == [0, 1]
        assert [each["score"] for each in one["data"]] == pytest.approx([math.exp(-0.5)] * 2)
    several = await http.post("/score", json={"text_1": ["q", "r"], "text_2": ["a", "b"]})
    assert len(several.json()["data"]) == 2


PAIR = {"query": "q", "documents": ["a"]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input.1"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "model": "none"}, "model"),
        ("/v1/embeddings", {"input": "a", "colour": 1}, "colour"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "scoring": "bm25"}, "scoring"),
        ("/rerank", {"query": "q"}, "documents"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {**PAIR, "top_n": 0}, "top_n"),
        ("/rerank", {**PAIR, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/rerank", {**PAIR, "truncate_prompt_tokens": 3, "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
    ],
)
async def test_bad_input_is_refused_by_name(http: httpx.AsyncClient, path: str, body: Any, field: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == field


async def test_answers_fit_the_document(http: httpx.AsyncClient) -> None:
    told = (await http.get(PATH)).json()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"input": [[1], [2]], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", PAIR),
        ("/v2/rerank", {**PAIR, "return_documents": False}),
    ]
    for path, body in asked:
        operation = told["paths"][path]["post"]
        answer = await http.post(path, json=body)
        for schema, value in (
            (operation["requestBody"]["content"]["application/json"]["schema"], body),
            (operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json()),
        ):
            validator = jsonschema.Draft202012Validator({**schema, "components": told["components"]})
            assert [error.message for error in validator.iter_errors(value)] == []


def test_what_is_read_is_estimated_before_it_is_let_in() -> None:
    assert estimated_tokens(EmbedCall("r", "m", ("abcde", (1, 2, 3)))) == 2 + 3
    assert estimated_tokens(ScoreCall("r", "m", (), ("abcd",), prompts=((1, 2),))) == 2 + 1
