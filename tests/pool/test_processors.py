"""Logits processors of requests: refused by name before work starts, and in force in a pool's answers."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.schemas import chat_job
from pool.local_pool import LocalPool
from tests.engine.harness import answer, call_of
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("processors", "field", "said"),
    [
        (["eta_cutof"], "processors.0", "eta_cutoff"),
        (["xtc", {"name": "top_p", "p": 1.5}], "processors.1.p", "less than or equal to 1"),
        ([{"name": "logit_bias", "bias": {"-1": 1.0}}], "processors.0", "token id -1; allowed: 0 to"),
        ([{"name": "logit_bias", "bias": {"99999999": 1.0}}], "processors.0", "token id 99999999; allowed"),
        ([{"name": "top_p", "q": 0.5}], "processors.0.q", "allowed here: p"),
        (["fsd"], "processors.0", "needs temperature 0 (got 0.9)"),
        ([{"name": "dynamic_temperature", "low": 2.0}], "processors.0.low", "at most high"),
    ],
)
async def test_refusals_name_the_processor(pool: LocalPool, processors: list[Any], field: str, said: str) -> None:
    chosen = tuple(map(PartChoice.model_validate, processors))
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call_of("hi", "plain", temperature=0.9, max_tokens=4, processors=chosen))
    assert caught.value.field == field
    assert said in caught.value.message


async def test_processors_hold_in_answers_and_texts_become_ids(pool: LocalPool) -> None:
    prepared = pool.intake().prepare(call_of("a:b", "plain", processors=(PartChoice.of("dry", breakers=[":"]),)))
    [choice] = prepared.call.sampling.processors
    assert {pool.tokenizer.encode(":")[-1]} <= set(choice.params["breaker_ids"])
    never_twice = (PartChoice.of("no_repeat_ngram", n=1),)
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    free = await answer(pool, call_of("aaaa", "plain", **sampling))
    held = await answer(pool, call_of("aaaa", "plain", **sampling, processors=never_twice))
    assert len(set(free.ids)) < len(free.ids)
    assert len(set(held.ids)) == len(held.ids) == 40


async def test_a_body_lists_them_below_decoding() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    listed = [{"name": "xtc", "chance": 0.2}, "top_n_sigma"]
    job = chat_job({**body, "decoding": {"processors": listed}})
    assert job.calls[0].sampling.processors == (PartChoice.of("xtc", chance=0.2), PartChoice.of("top_n_sigma"))
    with pytest.raises(TurnoutError) as caught:
        chat_job({**body, "decoding": {"processors": ["xtc"] * 17}})
    assert caught.value.field == "decoding.processors"
    with pytest.raises(TurnoutError, match="unknown"):
        chat_job({**body, "processors": ["xtc"]})
