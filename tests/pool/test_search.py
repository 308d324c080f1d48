"""The method `search` behind a pool: n answers of one search, what holds for them, what is left of it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from pool.local_pool import LocalPool
from tests.engine.harness import answer, ask, call_of, until
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

PROMPT = list(range(65, 65 + 37))
LONG = {"max_tokens": 10, "ignore_eos": True}


async def test_the_answers_of_a_request_are_the_best_of_one_search(pool: LocalPool) -> None:
    reply = await ask(pool, PROMPT, "search", {"width": 4}, n=3, logprobs=0, **LONG)
    sums = [sum(token.logprob or 0.0 for token in each) for each in reply.answers]
    assert sums == sorted(sums, reverse=True)
    assert len({tuple(token.id for token in each) for each in reply.answers}) == 3
    assert reply.reasons == [FinishReason.LENGTH] * 3
    meter = reply.usage.models["large"]
    assert (meter.prompt_tokens, reply.usage.completion_tokens, meter.generated_tokens) == (37, 30, 30)
    assert meter.decode_tokens == 4 * 9
    again = await ask(pool, PROMPT, "search", {"width": 4}, n=3, logprobs=0, **{**LONG, "seed": 7})
    assert again.texts == reply.texts


@pytest.mark.parametrize("search", ["beam", "diverse", "best_first", "constrained", "uid", "lattice"])
async def test_a_structure_holds_for_every_answer(pool: LocalPool, search: str) -> None:
    structure = Structure(kind="regex", value="[ab]{2}c")
    reply = await ask(pool, PROMPT, "search", {"search": search}, n=3, max_tokens=8, structure=structure)
    assert [bool(re.fullmatch("[ab]{2}c", text)) for text in reply.texts] == [True] * 3
    assert len(set(reply.texts)) == 3 or search == "diverse"


async def test_phrases_may_be_texts(pool: LocalPool) -> None:
    params = {"search": {"name": "constrained", "phrases": ["xyz", "Q"]}}
    reply = await ask(pool, PROMPT, "search", params, n=2, **LONG)
    assert all("xyz" in text and "Q" in text for text in reply.texts)


async def test_a_contrast_holds_in_it(pool: LocalPool) -> None:
    contrast = PartChoice.of("contrastive", alpha=0.05)
    plain = await answer(pool, replace(call_of(PROMPT, "plain", **LONG), contrast=contrast))
    one = await answer(pool, replace(call_of(PROMPT, "search", {"width": 1}, **LONG), contrast=contrast))
    assert one.ids == plain.ids
    assert one.ids != (await ask(pool, PROMPT, "search", {"width": 1}, **LONG)).ids


async def test_a_request_that_names_no_length_is_answered(pool: LocalPool) -> None:
    """Memory is looked at as hypotheses grow, not for the longest that there may be."""
    call = replace(call_of(PROMPT, "search", {"width": 6}), sampling=SamplingParams(temperature=0.0))
    reply = await answer(pool, call)
    assert reply.reasons[0] in (FinishReason.LENGTH, FinishReason.STOP)
    assert pool.stats().sequences == 0


async def test_leaving_in_the_middle_frees_everything(pool: LocalPool) -> None:
    task = asyncio.ensure_future(ask(pool, PROMPT, "search", {"width": 6}, n=2, max_tokens=200, ignore_eos=True))
    await until(lambda: pool.stats().sequences >= 6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: pool.stats().sequences == 0)
    assert pool.stats().requests == 0


async def test_what_a_search_cannot_take_is_refused_by_its_field(pool: LocalPool) -> None:
    for params, field in (
        ({"search": "guess"}, "method.params.search"),
        ({"search": {"name": "beam", "length_penalty": 99}}, "method.params.search.length_penalty"),
        ({"search": {"name": "beam", "early_stopping": "soon"}}, "method.params.search.early_stopping"),
        ({"width": 0}, "method.params.width"),
        ({"model": "judge"}, "method.params.model"),
    ):
        with pytest.raises(TurnoutError) as caught:
            await ask(pool, PROMPT, "search", params)
        assert str(caught.value.field) in (field, "method"), params
