"""OpenAI's client with helpers for the Responses API, unmodified."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.cases import QUESTION
from tests.clients.site import Site

pytestmark = pytest.mark.clients


class Digit(BaseModel):
    """A digit; the demo models would write a number without end."""

    digit: Literal[1, 2, 3]


def _client(site: Site) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.keys["acme"], max_retries=0)


def test_a_response_is_kept_read_listed_and_deleted(site: Site) -> None:
    client = _client(site)
    made = client.responses.create(model="demo", input=QUESTION, max_output_tokens=4)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    [item] = client.responses.input_items.list(made.id)
    assert item.type == "message"
    other = openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.keys["narrow"], max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_helpers_of_the_client_put_a_stream_together(site: Site) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 60, "temperature": 0}
    with _client(site).responses.stream(**asked, text_format=Digit) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    assert final.output_parsed is not None
    assert final.output_parsed.model_dump() == json.loads(final.output_text)
    assert _client(site).responses.parse(**asked, text_format=Digit).output_parsed == final.output_parsed
