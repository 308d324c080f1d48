"""Mixed seeded requests, how they are asked over gRPC and HTTP, and what says whether an answer is the right one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from experiments.load.clients import Refused
from turnout.client import AsyncClient
from turnout.errors import TurnoutError

PROMPTS = ("Question: what is 12 plus 30?", "2 + 2 =", "The list of things: one, two,", "Answer in one word.")
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("speculative", {"length": "fixed", "draft_length": 4}),
    ("entropy_adaptive", {"threshold": 0.5, "window": 3, "min_stay": 4}),
    ("pearl", {"draft_length": 3}),
)
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95})
# A client that keeps to the rules retries: what did not come whole is asked again, with the same seed.
AGAIN_AFTER_S = 0.25
PATIENCE_S = 280.0
NOT_AGAIN = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND", "HTTP 400", "HTTP 404", "HTTP 422"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: everything that decides its answer."""

    prompt: str
    method: str
    params: Mapping[str, Any]
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Content of an answer: text, and ids of tokens where the protocol has them."""

    text: str
    finish: str | None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A request that has ended, times in seconds of one clock.

    Attributes:
        number: which of the requests it was.
        begun: when it was first sent.
        ended: when its answer was whole, or it was given up.
        refusals: when and why it had to be asked again, in order.
        error: why it was given up; None: it has an answer.
        wrong: how its answer differs from the undisturbed one; None: not at all.
    """

    number: int
    client: str
    method: str
    begun: float
    ended: float
    refusals: tuple[tuple[float, str], ...] = ()
    error: str | None = None
    wrong: str | None = None

    @property
    def seconds(self) -> float:
        """From begin to end."""
        return self.ended - self.begun

    @property
    def codes(self) -> list[str]:
        """Why it had to be asked again, in order."""
        return [code for _, code in self.refusals]


def mixed(tokens: int, seed: int = 0) -> list[Asked]:
    """Every prompt by every method, greedy and sampled."""
    return [
        Asked(prompt, method, params, {"seed": seed + place, "max_tokens": tokens, "ignore_eos": True, **sampling})
        for place, (prompt, (method, params), sampling) in enumerate(
            (prompt, method, sampling) for prompt in PROMPTS for method in METHODS for sampling in SAMPLING
        )
    ]


def difference(expected: Answer, got: Answer) -> str | None:
    """How an answer differs from the undisturbed one; None: it does not.

    Tokens are compared where both have them, and text and the reason of the end always.
    """
    if expected.ids is not None and got.ids is not None and expected.ids != got.ids:
        pairs = enumerate(zip(expected.ids, got.ids, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(expected.ids), len(got.ids)))
        return f"token {place} of {len(expected.ids)} (got {len(got.ids)})"
    if expected.text != got.text:
        return f"text {got.text!r}, not {expected.text!r}"
    if expected.finish != got.finish:
        return f"it ended by {got.finish}, not {expected.finish}"
    return None


Output = Callable[[], None]


class Grpc:
    """StreamGenerate."""

    name = "grpc"

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def ask(self, asked: Asked, output: Output) -> Answer:
        """One attempt.

        Raises:
            Refused: it did not come to its end.
        """
        text, ids, finish = "", [], None
        try:
            stream = self._client.stream(
                asked.prompt, method=asked.method, params=asked.params, deadline_s=PATIENCE_S, **asked.sampling
            )
            async with stream as chunks:
                async for chunk in chunks:
                    text += chunk.text
                    ids += [token.id for token in chunk.tokens]
                    finish = chunk.finish_reason or finish
                    output()
        except TurnoutError as error:
            raise Refused(error.code.value) from None
        if stream.usage is None:
            raise Refused("no end")
        return Answer(text, finish, tuple(ids))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


class Http:
    """/v1/completions with `stream`."""

    name = "http"

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)

    async def ask(self, asked: Asked, output: Output) -> Answer:
        """One attempt.

        Raises:
            Refused: it did not come to its end.
        """
        decoding = {"method": asked.method, "params": asked.params}
        body = {"prompt": asked.prompt, "stream": True, "decoding": decoding, "deadline_s": PATIENCE_S}
        text, finish, ended = "", None, False
        try:
            async with self._client.stream("POST", "/v1/completions", json={**body, **asked.sampling}) as response:
                if response.status_code != httpx.codes.OK:
                    raise Refused(f"HTTP {response.status_code}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        ended = True
                        break
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Refused(f"HTTP stream: {event['error'].get('code') or event['error'].get('type')}")
                    for choice in event["choices"]:
                        text += choice["text"]
                        finish = choice.get("finish_reason") or finish
                        output()
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__) from None
        if not ended:
            raise Refused("no end")
        return Answer(text, finish)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


@dataclass
class CheckingClient:
    """A `LoadClient` whose "prompt" is the number of a request; every answer is compared.

    Attributes:
        front: how to ask.
        requests: by number.
        expected: their undisturbed answers, by number.
        done: what has ended.
        running: when each request began that has not.
    """

    front: Grpc | Http
    requests: list[Asked]
    expected: list[Answer]
    clock: Callable[[], float] = time.monotonic
    done: list[Done] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)
    _count: int = 0

    async def answer(self, prompt: str, output: Output) -> int:
        """Ask until there is a whole answer.

        Returns:
            Tokens of the answer, or characters where the protocol has no tokens.

        Raises:
            Refused: there is none after `PATIENCE_S`, or asking again cannot help.
        """
        number, begun, refusals = int(prompt), self.clock(), list[tuple[float, str]]()
        self._count += 1
        mine = self._count
        self.running[mine] = begun
        got, error = None, None
        try:
            while got is None:
                try:
                    got = await self.front.ask(self.requests[number], output)
                except Refused as refusal:
                    if refusal.code in NOT_AGAIN or self.clock() - begun > PATIENCE_S:
                        error = refusal.code
                        raise
                    refusals.append((self.clock(), refusal.code))
                    await asyncio.sleep(AGAIN_AFTER_S)
        except asyncio.CancelledError:
            error = "UNFINISHED"
            raise
        finally:
            del self.running[mine]
            wrong = None if got is None else difference(self.expected[number], got)
            name, method = self.front.name, self.requests[number].method
            self.done.append(Done(number, name, method, begun, self.clock(), tuple(refusals), error, wrong))
        return len(got.ids) if got.ids is not None else len(got.text)

    async def close(self) -> None:
        """Close the connection."""
        await self.front.close()
