"""The cases with OpenAI's client for Python, as it comes."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import openai

from tests.clients.cases import Case, Result

if TYPE_CHECKING:
    from tests.clients.site import Site

GIVE_UP_S = 0.5
FREED_WITHIN_S = 5.0


def run_cases(site: Site, cases: list[Case]) -> dict[str, Result]:
    """What the client makes of each case, by name."""
    with openai.DefaultHttpxClient() as shared:
        return {case.name: _run(site, case, shared) for case in cases}


def _run(site: Site, case: Case, shared: openai.DefaultHttpxClient) -> Result:
    key = site.keys.get(case.tenant) or site.keys.get(f"{case.tenant}-python", "tk_000000000000_nobody")
    timeout = GIVE_UP_S if case.then == "give up" else 60.0
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, timeout=timeout, http_client=shared)
    result: Result = {}
    try:
        result = _answer(client, case)
    except openai.OpenAIError as error:
        result = {"error": _told(error)}
    if case.then in ("close", "give up"):
        result["freed"] = _freed(site)
    return result


def _answer(client: openai.OpenAI, case: Case) -> Result:
    method: Any = client
    for name in case.call.split("."):
        method = getattr(method, name)
    known = inspect.signature(method).parameters
    given = {name: value for name, value in case.arguments.items() if name in known}
    more = {name: value for name, value in case.arguments.items() if name not in known}
    answer = method(**given, extra_body=more) if more else method(**given)
    if case.then == "go on" and case.call == "responses.create":
        answer = method(**given | {"previous_response_id": answer.id})
    elif case.then == "go on":  # as users keep what was said: with null for what it does not have
        said = answer.choices[0].message.model_dump()
        answer = method(**given | {"messages": [*given["messages"], said, *given["messages"]]})
    if case.call == "models.list":
        return {"value": [each.to_dict() for each in answer]}
    if not case.arguments.get("stream"):
        return {"value": answer.to_dict()}
    chunks = []
    with answer:
        for chunk in answer:
            chunks.append(chunk.to_dict())
            if case.then == "close":
                break
    return {"chunks": chunks}


def _told(error: openai.OpenAIError) -> dict[str, Any]:
    told: dict[str, Any] = {"class": type(error).__name__, "message": str(error)}
    if isinstance(error, openai.APIStatusError):
        told |= {"status": error.status_code, "code": error.code, "param": error.param, "type": error.type}
        told["retry_after"] = error.response.headers.get("retry-after")
    return told


def _freed(site: Site) -> bool:
    """Whether nothing is left of what was given up."""
    with suppress(AssertionError):
        site.assert_idle(FREED_WITHIN_S)
        return True
    return False
