"""The OpenAPI document of the Responses API: bodies, answers and events fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deployments.openapi.document import document
from tests.deployments.responses.kit import PATH, TOOL, answer, events, kept_in, scripted, serving
from turnout.calls import Chunk
from turnout.errors import Code, TurnoutError
from turnout.tools import ToolCall
from turnout.types import FinishReason

TOLD = document(batches=False)
CHUNKS = [
    Chunk(0, "", (), reasoning="They ask."),
    Chunk(0, "Let me see.", ()),
    Chunk(0, "", (), FinishReason.STOP, (ToolCall("call_1", "weather", "{}"),)),
]
BODY: dict[str, Any] = {"tools": [TOOL], "top_logprobs": 2, "decoding": {"tokens": True}, "max_output_tokens": 9}


def _faults(schema: dict[str, Any], value: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator({**schema, "components": TOLD["components"]})
    return [error.message for error in validator.iter_errors(value)]


def _answer_schema(path: str, method: str, media: str = "application/json") -> dict[str, Any]:
    found: dict[str, Any] = TOLD["paths"][path][method]["responses"]["200"]["content"][media]["schema"]
    return found


async def test_answers_fit(tmp_path: Path) -> None:
    async with serving(scripted(CHUNKS), kept_in(tmp_path)) as client:
        got = await answer(client, **BODY)
        at = f"{PATH}/{got['id']}"
        again, items = (await client.get(at)).json(), (await client.get(f"{at}/input_items")).json()
        gone = (await client.delete(at)).json()
    assert _faults(_answer_schema(PATH, "post"), got) == []
    assert _faults(_answer_schema(f"{PATH}/{{response_id}}", "get"), again) == []
    assert _faults(_answer_schema(f"{PATH}/{{response_id}}/input_items", "get"), items) == []
    assert _faults(_answer_schema(f"{PATH}/{{response_id}}", "delete"), gone) == []
    assert _faults(_answer_schema(PATH, "post"), got | {"more": 1}), "a member that it does not know would be found"


@pytest.mark.parametrize("error", [None, TurnoutError(Code.INTERNAL, "it broke")])
async def test_events_fit(error: TurnoutError | None) -> None:
    async with serving(scripted(CHUNKS, error)) as client:
        sent = await events(client, **BODY)
    schema = _answer_schema(PATH, "post", "text/event-stream")["properties"]["data"]["contentSchema"]
    assert [fault for event in sent for fault in _faults(schema, event)] == []
    assert sent[-1]["type"] == ("response.completed" if error is None else "response.failed")
    assert _faults(schema, {**sent[2], "more": 1})


def test_bodies_fit() -> None:
    schema = TOLD["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for more in ({}, {"seed": 4, "user": "u"}, {"tool_choice": {"type": "function", "name": "weather"}}):
        assert _faults(schema, {"input": [{"role": "user", "content": "hi"}], **BODY, **more}) == []
    for wrong in ({"max_tokens": 3}, {"truncation": "auto"}, {"tools": [{"type": "web_search"}]}, {"input": None}):
        assert _faults(schema, {"input": "hi", **wrong})
