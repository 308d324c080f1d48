"""What interactive requests feel of a batch: what is taken for a first token, and what the page says."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.bench_batch import interactive, page, ratio

SEED = 3  # of one arrival


async def first_of(*events: dict[str, Any]) -> float | None:
    """The time to the first token of an answer of these events."""
    data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=data)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        [first] = await interactive(client, 1000.0, 0.001, seed=SEED)
        return first


def delta(**content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content}]}


async def test_the_first_token_is_the_first_text_and_an_answer_without_any_has_none() -> None:
    first = await first_of(delta(role="assistant", content="4"), delta(content="2"))
    assert first is not None
    assert first > 0.0
    assert await first_of(delta(role="assistant", content=""), delta()) is None
    assert await first_of() is None


async def test_an_answer_that_breaks_off_is_no_time() -> None:
    with pytest.raises(RuntimeError, match="broke off: the models are lost"):
        await first_of(delta(content="4"), {"error": {"message": "the models are lost"}})


def test_the_page_tells_the_share_and_what_has_no_time() -> None:
    found = {"alone": [0.1] * 20, "during": [0.12] * 10, "silent": 0, "batch_rate": 31.0, "saturated": True}
    assert ratio(found).value == pytest.approx(1.2)
    text = page(found, 3.0).markdown()
    assert "| during a batch | 10 | 120.0 | 120.0 | 120.0 |" in text
    assert "1.20 x that without (1.20 to 1.20;" in text
    assert "no text" not in text
    assert "2 answers had no text" in page({**found, "silent": 2}, 3.0).markdown()


def test_the_ratio_has_an_interval_of_what_other_requests_would_have_given() -> None:
    drawn = np.random.default_rng(1)
    found = {"alone": list(drawn.exponential(0.02, 700)), "during": list(drawn.exponential(0.03, 350))}
    times = ratio(found)
    assert times.low < 1.5 < times.high
    assert 0.1 < times.high - times.low < 1.0
