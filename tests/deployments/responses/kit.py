"""A pool with scripted answers, and applications over it that keep responses."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.service import GenerationService
from kvstore.keys import write_root_key
from tests.deployments.in_process import make_config
from tests.deployments.scripted_answers import ScriptedBackend
from turnout.calls import Chunk, Usage
from turnout.config import TurnoutConfig
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.errors import TurnoutError
from turnout.responses_config import ResponsesConfig
from turnout.types import FinishReason

PATH = "/v1/responses"
NOTHING = Cost(0.0, 0.0, 0.0)
USAGE = Usage(
    7, 5, 2, {}, SpeculationMeter(), 0, CostReport(NOTHING, NOTHING, 0.0), "plain", {}, 1, 0.1, 0.2,
    sampling={"temperature": 0.5, "top_p": 0.9},
)  # fmt: skip
STOP = Chunk(0, "", (), FinishReason.STOP)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "weather", "description": "Tells.", "parameters": {"type": "object"}}


def scripted(chunks: Sequence[Chunk], error: TurnoutError | None = None) -> ScriptedBackend:
    """One answer for every call: chunks, and then an error or the usage."""
    return ScriptedBackend([*chunks, *([] if error is None else [error])], USAGE)


def kept_in(folder: Path, **settings: Any) -> TurnoutConfig:
    """A configuration that keeps responses in a folder."""
    key = folder / "root.key"
    if not key.exists():
        write_root_key(key)
    made = ResponsesConfig(folder=str(folder / "responses"), root_key_file=str(key), **settings)
    return make_config().model_copy(update={"responses": made})


@asynccontextmanager
async def serving(backend: ScriptedBackend, config: TurnoutConfig | None = None) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of an application over the pool."""
    service = GenerationService(config or make_config(), {"demo": backend}, Metrics())
    transport = httpx.ASGITransport(build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    service.close()


def says(*texts: str) -> list[Chunk]:
    """An answer in chunks of text."""
    return [*(Chunk(0, text, ()) for text in texts), STOP]


async def answer(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """A whole answer, which is one to OpenAI's client, too."""
    got = await client.post(PATH, json={"input": "hi", **body})
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    Response.model_validate(found)
    return found


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, each of them one to OpenAI's client, too."""
    got = await client.post(PATH, json={"input": "hi", "stream": True, **body})
    assert got.status_code == 200, got.text
    assert got.headers["content-type"].startswith("text/event-stream")
    *sent, rest = got.text.split("\n\n")
    assert rest == ""
    found = []
    for each in sent:
        name, _, data = each.removeprefix("event: ").partition("\ndata: ")
        event = json.loads(data)
        assert (event["type"], event["sequence_number"]) == (name, len(found))
        EVENT.validate_python(event)
        found.append(event)
    return found


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """What a request is refused with."""
    got = await client.post(PATH, json={"input": "hi", **body})
    assert 400 <= got.status_code < 500, got.text
    return {"status": got.status_code, **got.json()["error"]}
