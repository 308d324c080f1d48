"""A router over llama.cpp's and vLLM's own servers, with one of them killed while it answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peer_servers import LLAMA, SLOTS, VLLM
from tests.deployments.served_pool import until
from tests.neighbours.conftest import PATIENCE_S, PRICES, Street
from turnout.endpoint_config import PriceConfig

pytestmark = [pytest.mark.neighbours, pytest.mark.timeout(3 * PATIENCE_S)]

LONG, SHORT = 600, 12  # tokens of what is broken off, and of what waits
WAITING = 2  # requests of each pool that wait for a place at the server


@dataclass
class Answer:
    """What a client has seen of one streamed chat."""

    pool: str
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Add an event."""
        self.error = event.get("error", {}).get("message", "")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    @property
    def report(self) -> dict[str, Any]:
        """Turnout's part of the usage."""
        found: dict[str, Any] = self.usage["turnout"]
        return found


def body(pool: str, text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A chat whose answer has that many tokens, no fewer."""
    messages = [{"role": "user", "content": text}]
    return {"model": pool, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


async def follow(client: httpx.AsyncClient, answer: Answer, text: str, tokens: int) -> None:
    """Stream one chat to its end."""
    asked = body(answer.pool, text, tokens, stream=True, stream_options={"include_usage": True})
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.take(json.loads(line[6:]))


async def metric(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    """Value of one of the router's metrics."""
    text = (await client.get("/metrics")).raise_for_status().text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def price(report: dict[str, Any]) -> float:
    """What an answer costs by the counts in its report, in US dollars."""
    return sum(
        PriceConfig.model_validate(PRICES[name]).of(
            each["prompt_tokens"], each["cached_tokens"], each["generated_tokens"] + each["discarded_tokens"]
        )
        for name, each in report["models"].items()
    )


@pytest.mark.parametrize("first", [LLAMA, VLLM])
async def test_one_is_killed_under_load(street: Street, first: str) -> None:
    [second] = {LLAMA, VLLM} - {first}
    killed, ends, goes_on = street.neighbours[first], f"{first}-ends", f"{first}-goes-on"
    async with httpx.AsyncClient(base_url=street.url, timeout=PATIENCE_S) as client, asyncio.TaskGroup() as tasks:
        begun = [Answer(ends), Answer(goes_on)]
        waiting = [Answer(pool) for pool in (ends, goes_on) for _ in range(WAITING)]

        async def all_begun() -> bool:
            return all(answer.text for answer in begun)

        async def all_wait() -> bool:
            assert not any(task.done() for task in followed), "one ended before the others waited"
            held = await asyncio.to_thread(killed.held)
            return held == {"running": SLOTS, "waiting": len(waiting)}

        followed = [tasks.create_task(follow(client, each, "Tell me a long story.", LONG)) for each in begun]
        await until(all_begun, "both have begun", PATIENCE_S)
        followed += [
            tasks.create_task(follow(client, each, f"What is {number} + {number}?", SHORT))
            for number, each in enumerate(waiting)
        ]
        await until(all_wait, "the others wait at the server", PATIENCE_S)
        assert not any(each.text for each in waiting)
        before = [each.text for each in begun]
        await asyncio.to_thread(killed.kill)
        await asyncio.gather(*followed)

        broken, continued = begun
        assert "the answer broke off" in broken.error
        assert broken.finish_reason is None
        assert_continued(continued, first, second, before[1])
        for each in waiting:
            assert_answered_elsewhere(each, first, second)
        await check_breaker(client, ends, first, second)
        health = (await client.get("/health")).json()
        assert health["status"] == "degraded"


def assert_continued(answer: Answer, first: str, second: str, before: str) -> None:
    """It began at one server, and was written to its end by the other."""
    assert (answer.error, answer.finish_reason) == ("", "length")
    assert answer.text.startswith(before)
    assert answer.report["switches"] == 1
    assert any(note.startswith(f"{second} continued in place of {first}") for note in answer.report["notes"])
    written = {name: each["generated_tokens"] for name, each in answer.report["models"].items()}
    assert written.keys() == {first, second}
    assert all(written.values())
    assert sum(written.values()) == answer.usage["completion_tokens"] == LONG
    assert answer.report["cost"]["spent"]["usd"] == pytest.approx(price(answer.report))


def assert_answered_elsewhere(answer: Answer, first: str, second: str) -> None:
    """Only the other server wrote it, and only its tokens are paid."""
    assert (answer.error, answer.finish_reason) == ("", "length")
    assert any(note.startswith(f"{second} answered in place of {first}") for note in answer.report["notes"])
    assert answer.report["models"].keys() == {second}
    assert answer.usage["completion_tokens"] == SHORT
    read = answer.report["models"][second]
    assert read["prompt_tokens"] + read["cached_tokens"] == answer.usage["prompt_tokens"]
    assert answer.report["cost"]["spent"]["usd"] == pytest.approx(price(answer.report))


async def check_breaker(client: httpx.AsyncClient, pool: str, first: str, second: str) -> None:
    """It opens, and what is asked meanwhile is answered by the other at once."""

    async def opens() -> bool:
        answer = Answer(pool)
        await follow(client, answer, "Hi", 2)
        assert_two_tokens(answer, second)
        left_alone = any("is left alone" in note for note in answer.report["notes"])
        state = await metric(client, "turnout_endpoint_breaker", pool=pool, model=first, state="open")
        return left_alone and state == 1

    await until(opens, "the breaker is open", PATIENCE_S)
    assert await metric(client, "turnout_endpoint_breaker_opened_total", pool=pool, model=first) >= 1


def assert_two_tokens(answer: Answer, source: str) -> None:
    """A server wrote two tokens."""
    assert answer.error == ""
    assert answer.report["models"].keys() == {source}
    assert answer.usage["completion_tokens"] == 2


@pytest.mark.parametrize("name", [LLAMA, VLLM])
async def test_one_that_is_back_is_asked_again(street: Street, name: str) -> None:
    pool = f"{name}-ends"
    async with httpx.AsyncClient(base_url=street.url, timeout=PATIENCE_S) as client:

        async def answers_itself() -> bool:
            answer = Answer(pool)
            await follow(client, answer, "Hi", 2)
            return answer.report["models"].keys() == {name}

        await until(answers_itself, "it is asked again", PATIENCE_S)
        assert await metric(client, "turnout_endpoint_breaker", pool=pool, model=name, state="closed") == 1
