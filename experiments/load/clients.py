"""The two ways to ask the server: gRPC through the project's client, and HTTP with server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import httpx

from experiments.load.records import Plan, Used
from turnout.calls import ChatMessage
from turnout.client import AsyncClient
from turnout.errors import TurnoutError

REQUEST_LIMIT_S = 600.0


class Refused(Exception):  # noqa: N818  (a refusal is an outcome here, not a fault of the client)
    """The server answered a request with an error; `code` is its name."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class LoadClient(Protocol):
    """One connection, shared by all requests of a run."""

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        """Ask once, greedily, and read to the end.

        Args:
            prompt: the user's message.
            output: called whenever new output has arrived.

        Returns:
            New tokens of the answer.

        Raises:
            Refused: the server did not answer.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class GrpcClient:
    """StreamGenerate."""

    def __init__(self, plan: Plan) -> None:
        self._client = AsyncClient(plan.address)
        self._plan = plan

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        """See `LoadClient.answer`."""
        tokens = 0
        try:
            async with self._client.stream(
                messages=[ChatMessage("user", prompt)],
                model=self._plan.model,
                temperature=0.0,
                max_tokens=self._plan.max_tokens,
            ) as chunks:
                async for chunk in chunks:
                    if chunk.tokens:
                        tokens += len(chunk.tokens)
                        output()
        except TurnoutError as error:
            raise Refused(error.code.value) from None
        return tokens

    async def close(self) -> None:
        """See `LoadClient.close`."""
        await self._client.close()


class HttpClient:
    """/v1/chat/completions with `stream`.

    Args:
        plan: what is asked.
        api_key: "" where the server asks for none. No part of the plan, which is written down with the results.

    Attributes:
        used: by all answers so far.
    """

    def __init__(self, plan: Plan, api_key: str = "") -> None:
        self.used = Used()
        self._client = httpx.AsyncClient(
            base_url=f"http://{plan.address}",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=REQUEST_LIMIT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._body: dict[str, Any] = {
            "model": plan.model,
            "temperature": 0.0,
            "max_tokens": plan.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        """See `LoadClient.answer`."""
        body = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        tokens = 0
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise Refused(f"HTTP {response.status_code}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Refused(f"HTTP stream: {event['error'].get('type')}")
                    if any(choice["delta"].get("content") for choice in event["choices"]):
                        output()
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
                        self.used.add(event["usage"])
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__) from None
        return tokens

    async def close(self) -> None:
        """See `LoadClient.close`."""
        await self._client.aclose()


CLIENTS: dict[str, Callable[[Plan], LoadClient]] = {"grpc": GrpcClient, "http": HttpClient}
