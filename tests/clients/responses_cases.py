"""The cases of the Responses API, for the client of every language."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.cases import QUESTION, Case, Check, Result, refused

DIGIT = {"type": "object", "properties": {"digit": {"enum": [1, 2, 3]}}, "required": ["digit"],
         "additionalProperties": False}  # fmt: skip
FORM = {"format": {"type": "json_schema", "name": "digit", "schema": DIGIT, "strict": True}}
TOOL = {"type": "function", "name": "press", "description": "Presses a key.", "parameters": DIGIT, "strict": True}
TOOLS: dict[str, Any] = {"model": "tools", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200}
Others = dict[str, Result]


def _case(name: str, check: Check, then: str = "read", **arguments: Any) -> Case:
    body = {"model": "demo", "input": QUESTION, "max_output_tokens": 12, "temperature": 0, **arguments}
    return Case(f"responses: {name}", "responses.create", body, check, "acme", then)


def response(got: Result) -> dict[str, Any]:
    """The response, whole or the one that a stream ends in."""
    assert "error" not in got, got["error"]
    if "value" in got:
        found: dict[str, Any] = got["value"]
        return found
    assert [each["sequence_number"] for each in got["chunks"]] == list(range(len(got["chunks"])))
    assert [each["type"] for each in got["chunks"][:2]] == ["response.created", "response.in_progress"]
    found = got["chunks"][-1]["response"]
    assert got["chunks"][-1]["type"] == f"response.{found['status']}"
    return found


def text(got: Result) -> str:
    """What was said."""
    parts = [part for item in response(got)["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def says_it(got: Result, _: Others) -> None:
    found = response(got)
    assert (found["object"], found["model"], found["store"]) == ("response", "demo", True)
    assert text(got)
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    assert found["usage"]["turnout"]["method"]


def same_text(got: Result, others: Others) -> None:
    assert text(got) == text(others["responses: a text"])
    deltas = [each["delta"] for each in got["chunks"] if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text(got)


def fits(got: Result, _: Others) -> None:
    assert response(got)["status"] == "completed"
    assert json.loads(text(got))["digit"] in (1, 2, 3)


def calls(got: Result, _: Others) -> None:
    found = response(got)
    [item] = [each for each in found["output"] if each["type"] == "function_call"]
    assert item["name"] == "press"
    assert json.loads(item["arguments"])["digit"] in (1, 2, 3)
    assert found["status"] == item["status"] == "completed"
    if "chunks" in got:
        deltas = [each["delta"] for each in got["chunks"] if each["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == item["arguments"]


def follows(got: Result, others: Others) -> None:
    before, found = response(others["responses: a text"]), response(got)
    assert found["previous_response_id"]
    assert found["usage"]["input_tokens"] > before["usage"]["input_tokens"] + before["usage"]["output_tokens"] - 1


CASES = [
    _case("a text", says_it),
    _case("a stream", same_text, stream=True),
    _case("items", says_it, instructions="Be brief.", input=[
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "42", "annotations": []}]},
        {"role": "user", "content": "Sure?"}]),
    _case("a schema", fits, text=FORM, max_output_tokens=200),
    _case("a schema, stream", fits, text=FORM, max_output_tokens=200, stream=True),
    _case("a tool", calls, **TOOLS),
    _case("a tool, stream", calls, **TOOLS, stream=True),
    _case("the next turn by its id", follows, then="go on"),
    _case("a tool that is not ours", refused("BadRequestError", 400, "tools.0.type"), tools=[{"type": "web_search"}]),
    _case("a response that is not there", refused("NotFoundError", 404, "previous_response_id"),
          previous_response_id="resp_" + "0" * 32),
    _case("no input", refused("BadRequestError", 400, "input"), input=[]),
]  # fmt: skip
