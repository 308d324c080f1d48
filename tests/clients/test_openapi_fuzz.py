"""schemathesis on the OpenAPI document that the server serves: requests that fit it, and requests that do not."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from deployments.openapi.document import ALL, BATCHES, PATH, Operation
from tests.clients.all_cases import CASES
from tests.clients.cases import Case
from tests.clients.site import Site

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
# Cases that fit the document and cases that do not, of each operation; those that decode are most.
MANY = {"/v1/completions": 1300, "/v1/chat/completions": 1300, "/v1/messages": 400, "/v1/responses": 400}
FEW = 80
OPERATIONS = (*ALL, *BATCHES)
MOST_TOKENS, MOST_ANSWERS = 4, 2
# What limits an answer, by endpoint: the first is given where none is.
LENGTHS = {
    "/v1/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
# What a model is given to read.
READ = {"prompt", "messages", "input", "text_1", "query", "tokens"}
SELDOM_RIGHT = {
    *("response_format", "tools", "tool_choice", "stop_token_ids", "logit_bias", "structured_outputs", "min_tokens"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema", "top_logprobs"),
    *("previous_response_id", "text", "include", "output_config", "thinking", "chat_template_kwargs"),
    *("truncate_prompt_tokens", "continue_final_message", "add_generation_prompt", "reasoning_effort"),
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# Random messages of a chat are never all right.
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "1+1="}],
    [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1+1="}]}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]},
     {"role": "tool", "tool_call_id": "c", "content": "done"}],
)  # fmt: skip
CLOCK_S = 0.05
STATUSES: dict[str, Counter[str]] = {}


@pytest.fixture(scope="module")
def schema(site: Site) -> Any:
    return schemathesis.openapi.from_url(site.url + PATH)


STREAMED = [each for each in CASES if each.arguments.get("stream") and each.then == "read" and each.tenant == "acme"]
PATHS = {
    "completions.create": "/v1/completions",
    "chat.completions.create": "/v1/chat/completions",
    "responses.create": "/v1/responses",
}


@pytest.mark.parametrize("case", STREAMED, ids=lambda case: case.name)
def test_every_event_of_a_stream_fits_the_document(site: Site, schema: Any, case: Case) -> None:
    asked = schema[PATHS[case.call]]["POST"].Case(body=case.arguments, media_type="application/json")
    answer = asked.call(headers={"Authorization": f"Bearer {site.keys[case.tenant]}"}, timeout=90)
    asked.validate_response(answer, checks=CHECKS)
    assert (answer.status_code == 200) == answer.headers["content-type"][0].startswith("text/event-stream")


def test_streams_of_every_endpoint_are_among_the_cases() -> None:
    assert {each.call for each in STREAMED} == set(PATHS)
    assert len(STREAMED) >= 10


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
def test_every_request_is_answered_as_the_document_says(site: Site, schema: Any, operation: Operation) -> None:
    asked = schema[operation.path][operation.method]
    counted: Counter[str] = Counter()
    with requests.Session() as session:
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not (asked.body or asked.query):
                continue  # nothing of it could be wrong
            _ask(asked.as_strategy(generation_mode=mode), _number(operation), session, counted)
    site.assert_idle()
    name = operation.path if operation.path in MANY else "all other paths"
    STATUSES.setdefault(name, Counter()).update(counted)
    told = ", ".join(f"{count} of {status}" for status, count in sorted(STATUSES[name].items()))
    site.report.setdefault("figures", {})[f"HTTP, requests made by schemathesis to {name}, by status"] = told


def test_they_are_all_operations_and_at_least_five_thousand_requests(schema: Any) -> None:
    served = [result.ok() for result in schema.get_all_operations()]
    assert {(each.method, each.path) for each in served} == {(each.method, each.path) for each in OPERATIONS}
    assert sum(_number(each) for each in OPERATIONS for _ in range(2 if each.body else 1)) >= 5000


def _number(operation: Operation) -> int:
    return MANY.get(operation.path, FEW)


def _ask(cases: Any, number: int, session: requests.Session, counted: Counter[str]) -> None:
    turns = count()

    @settings(max_examples=number, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case: Any) -> None:
        _shorten(case.operation.path, case.body)
        _aim(case.operation.path, case.body, next(turns))
        started = time.monotonic()
        answer = case.call(session=session, timeout=90)
        elapsed_s = time.monotonic() - started
        counted[str(answer.status_code)] += 1
        # A deadline that the request itself sets may pass; a pool that is not there says so; nothing else is our fault.
        allowed = {504: _deadline(case.body, elapsed_s), 503: _asks(case.body, "gone")}
        assert answer.status_code < 500 or allowed.get(answer.status_code, False), (answer.status_code, case.body)
        case.validate_response(answer, checks=CHECKS)

    ask()


def _shorten(path: str, body: Any) -> None:
    """Long answers would only take their time."""
    if not isinstance(body, dict) or path not in LENGTHS:
        return
    for name, most in (*((name, MOST_TOKENS) for name in LENGTHS[path]), ("n", MOST_ANSWERS)):
        if isinstance(body.get(name), int) and body[name] > most:
            body[name] = most
    if not body.keys() & set(LENGTHS[path]):
        body[LENGTHS[path][0]] = MOST_TOKENS


def _aim(path: str, body: Any, turn: int) -> None:
    """Two of three requests name a pool, and one of three little else: where every field is random, one is wrong."""
    if not isinstance(body, dict) or not (body.keys() & READ) or turn % 3 == 0:
        return
    body["model"] = "demo"
    if path == "/v1/chat/completions":
        body["messages"] = CHATS[turn // 3 % len(CHATS)]
    if turn % 3 == 1:
        if body.keys() & {"stream", "max_tokens", "max_output_tokens"}:
            body["stream"] = turn % 2 == 1
        for name in body.keys() & SELDOM_RIGHT:
            del body[name]
        if isinstance(body.get("decoding"), dict):
            body["decoding"] = {
                name: body["decoding"][name] for name in body["decoding"].keys() & {"tokens", "explain"}
            }


def _deadline(body: Any, elapsed_s: float) -> bool:
    given = body.get("deadline_s") if isinstance(body, dict) else None
    return isinstance(given, int | float) and 0 < given <= elapsed_s + CLOCK_S


def _asks(body: Any, model: str) -> bool:
    return isinstance(body, dict) and body.get("model") == model
