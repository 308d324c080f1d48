"""Events of streamed choices: most are made from a template, and none shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deployments.choices import ChoiceEvents
from deployments.openai_format import ChatFormat, CompletionFormat, Format
from deployments.schemas import Job, chat_job, completion_job
from deployments.surface import Head
from turnout.calls import Chunk, TokenOut
from turnout.types import FinishReason, TokenKind

HEAD = Head("id-1", 1, "demo")
SAID = ['quote " and \\', "line\nand \u2028 separator \u0085", "", "\u00e9\U0001f600", "\x00text\x00"]
CHUNKS = [
    Chunk(index, text, (TokenOut(1, text, "large", TokenKind.DECODED, -0.5),)) for text in SAID for index in (0, 1)
] + [Chunk(0, "", (), FinishReason.STOP, stop="END"), Chunk(1, "x", (), FinishReason.LENGTH)]
ENDPOINTS: dict[str, tuple[Callable[[dict[str, Any]], Job], Callable[[], Format], dict[str, Any]]] = {
    "text": (completion_job, CompletionFormat, {"prompt": "p"}),
    "chat": (chat_job, ChatFormat, {"messages": [{"role": "user", "content": "p"}]}),
}


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"decoding": {"tokens": True}}], ids=str)
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_event_is_what_its_chunk_alone_would_be(endpoint: str, usage: bool, more: dict[str, Any]) -> None:
    translate, form, asked = ENDPOINTS[endpoint]
    body = {"model": "demo", "max_tokens": 9, "n": 2, "stream": True, "stream_options": {"include_usage": usage}}
    job = translate({**body, **asked, **({"logprobs": 1} if more.get("logprobs") and endpoint == "text" else more)})
    text = ChoiceEvents(form(), job, HEAD, ()).of(tuple(CHUNKS))
    assert len(text.splitlines()) == 2 * len(CHUNKS), "nothing in a text cuts a line"
    found = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-1]]
    assert [_said(event) for event in found] == [(chunk.index, chunk.text) for chunk in CHUNKS]
    alone = _each_alone(form(), job)
    assert found == alone


def _each_alone(form: Format, job: Job) -> list[dict[str, Any]]:
    """As written without a template."""
    events = ChoiceEvents(form, job, HEAD, ())
    return [json.loads(events._written(chunk).removeprefix("data: ")) for chunk in CHUNKS]


def _said(event: dict[str, Any]) -> tuple[int, str]:
    [choice] = event["choices"]
    return choice["index"], choice["text"] if "text" in choice else choice["delta"]["content"]
