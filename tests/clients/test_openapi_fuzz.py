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

from deployments.openapi.document import PATH
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
MANY, FEW = 1300, 80
DECODING = ("/v1/completions", "/v1/chat/completions")
MOST_TOKENS, MOST_ANSWERS = 4, 2
CLOCK_S = 0.05


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


def operations(schema: Any) -> list[Any]:
    return [result.ok() for result in schema.get_all_operations()]


def test_at_least_five_thousand_requests_are_answered_as_the_document_says(site: Site, schema: Any) -> None:
    counted: Counter[str] = Counter()
    with requests.Session() as session:
        for operation in operations(schema):
            number = MANY if operation.path in DECODING else FEW
            for mode in GenerationMode:
                if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                    continue  # nothing of it could be wrong
                _ask(operation.as_strategy(generation_mode=mode), number, session, counted)
    site.assert_idle()
    assert counted.total() >= 5000, counted
    told = ", ".join(f"{count} of {status}" for status, count in sorted(counted.items()))
    site.report.setdefault("figures", {})["HTTP, requests made by schemathesis, by status"] = told


def _ask(cases: Any, number: int, session: requests.Session, counted: Counter[str]) -> None:
    turns = count()

    @settings(max_examples=number, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case: Any) -> None:
        _shorten(case.body)
        _aim(case.body, next(turns))
        started = time.monotonic()
        answer = case.call(session=session, timeout=90)
        elapsed_s = time.monotonic() - started
        counted[str(answer.status_code)] += 1
        # A deadline that the request itself sets may pass; a pool that is not there says so; nothing else is our fault.
        allowed = {504: _deadline(case.body, elapsed_s), 503: _asks(case.body, "gone")}
        assert answer.status_code < 500 or allowed.get(answer.status_code, False), (answer.status_code, case.body)
        case.validate_response(answer, checks=CHECKS)

    ask()


def _shorten(body: Any) -> None:
    """Long answers would only take their time."""
    if isinstance(body, dict):
        for name, most in (("max_tokens", MOST_TOKENS), ("max_completion_tokens", MOST_TOKENS), ("n", MOST_ANSWERS)):
            if isinstance(body.get(name), int) and body[name] > most:
                body[name] = most
        if "max_completion_tokens" not in body:
            body.setdefault("max_tokens", MOST_TOKENS)


def _aim(body: Any, turn: int) -> None:
    """Two of three requests name a pool, and one of three little else: where every field is random, one is wrong."""
    if not isinstance(body, dict) or not (body.keys() & {"prompt", "messages"}) or turn % 3 == 0:
        return
    body["model"] = "demo"
    if turn % 3 == 1:
        body["stream"] = turn % 2 == 1
        for name in body.keys() & {"response_format", "tools", "tool_choice", "stop_token_ids", "logit_bias"}:
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
