from __future__ import annotations

from dataclasses import replace

from pool.local_pool import LocalPool
from turnout.calls import Begun, GenerateCall, Usage
from turnout.types import SamplingParams


async def test_an_answer_begins_with_the_length_of_its_prompt_where_that_is_asked_for(pool: LocalPool) -> None:
    call = GenerateCall("r", pool.name, SamplingParams(max_tokens=3, seed=1), prompt=(1, 2, 3, 4, 5))
    events = [event async for event in pool.generate(replace(call, include_prompt_len=True))]
    assert isinstance(events[0], Begun)
    assert isinstance(events[-1], Usage)
    assert events[0].prompt_tokens == events[-1].prompt_tokens == 5
    plain = [event async for event in pool.generate(call)]
    assert [type(event) for event in plain] == [type(event) for event in events[1:]]
