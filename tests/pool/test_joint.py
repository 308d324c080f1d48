"""Methods that write all answers of a request together: what they are given, how their answers reach the caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import decoding.methods
from pool.local_pool import LocalPool
from tests.engine.harness import answer, ask, call_of, until
from tests.pool.resuming import Client, finish, had, run
from turnout.calls import Chunk, Delivered, Usage
from turnout.errors import Code, TurnoutError
from turnout.registry import get_method
from turnout.types import FinishReason

PROMPT = list(range(65, 65 + 37))
BLOCK = 8  # tokens, of the fixture's pools

# The answers advance together; the first that ends, or has `enough` tokens, ends all.
FIRST_FINISH = '''
import asyncio
from typing import Annotated
from pydantic import Field
from decoding.candidates import charge, show
from decoding.model import StopCondition
from turnout.registry import MethodParams, method
from turnout.types import Segment

class Params(MethodParams):
    enough: Annotated[int, Field(description="tokens of the first answer")] = 6
    shown: Annotated[bool, Field(description="whether the others are shown")] = True

@method(params=Params, lossless=False, needs=frozenset(), joint=True)
async def first_finish(request, models, params):
    """All answers end with the first."""
    model, answers = models.large, request.answers
    drafts = list(answers) if params.shown else [model.fork(each, each.seed) for each in answers]

    async def write(index):
        lengths = 1 if index else params.enough - len(drafts[0].generated)
        while not drafts[index].finished:
            segment = await model.decode(drafts[index], StopCondition(max_tokens=lengths))
            if params.shown:
                made.put_nowait(Segment(segment.tokens, segment.stopped_by, index))
            if len(drafts[index].generated) >= params.enough:
                break
        made.put_nowait(index)

    made = asyncio.Queue()
    if not params.shown:
        for draft in drafts:
            await model.decode(draft, StopCondition(max_tokens=1))
    tasks = [asyncio.create_task(write(index)) for index in range(len(answers))]
    try:
        while isinstance(item := await made.get(), Segment):
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    request.extra["first"] = item
    if not params.shown:
        for index, draft in enumerate(drafts):
            if index != item:
                charge(answers[index], draft)
                model.release(draft)
        segment = show(answers[item], drafts[item], models)
        model.release(drafts[item])
        yield Segment(segment.tokens, segment.stopped_by, item)
'''

IN_TURN = '''
from decoding.model import StopCondition
from turnout.registry import MethodParams, method
from turnout.types import Segment

@method(params=MethodParams, lossless=False, needs=frozenset(), resumable=True, joint=True)
async def in_turn(request, models, params):
    """Two tokens of each answer at a time."""
    while open_ := [each for each in enumerate(request.answers) if not each[1].finished]:
        for index, seq in open_:
            segment = await models.large.decode(seq, StopCondition(max_tokens=2))
            yield Segment(segment.tokens, segment.stopped_by, index)
'''


@pytest.fixture(autouse=True)
def joint_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods `first_finish` and `in_turn`."""
    (tmp_path / "first_finish.py").write_text(FIRST_FINISH, encoding="utf-8")
    (tmp_path / "in_turn.py").write_text(IN_TURN, encoding="utf-8")
    monkeypatch.setattr(decoding.methods, "__path__", [*decoding.methods.__path__, str(tmp_path)])
    get_method.cache_clear()
    yield
    get_method.cache_clear()


SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}


async def test_the_answers_are_those_of_runs_of_their_own(pool: LocalPool) -> None:
    alone = await ask(pool, PROMPT, "plain", n=3, **SAMPLED)
    together = await ask(pool, PROMPT, "in_turn", n=3, **SAMPLED)
    ids = [[[token.id for token in each] for each in reply.answers] for reply in (alone, together)]
    assert ids[0] == ids[1]
    assert together.texts == alone.texts
    assert together.reasons == [FinishReason.LENGTH] * 3
    assert together.usage.completion_tokens == 36


async def test_chunks_say_which_answer_they_belong_to(pool: LocalPool) -> None:
    events = [event async for event in pool.generate(call_of(PROMPT, "in_turn", n=2, **SAMPLED))]
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [chunk.index for chunk in chunks if chunk.tokens] == [0, 1] * 6
    assert [chunk.index for chunk in chunks if chunk.finish_reason is not None] == [0, 1]
    assert isinstance(events[-1], Usage)


async def test_the_first_to_finish_ends_all_and_what_they_wrote_is_sent(pool: LocalPool) -> None:
    reply = await ask(pool, PROMPT, "first_finish", {"enough": 4}, n=3, **SAMPLED)
    lengths = [len(each) for each in reply.answers]
    assert max(lengths) < 12
    assert 4 in lengths
    assert reply.usage.completion_tokens == sum(lengths)
    assert reply.usage.models["large"].generated_tokens == sum(lengths)
    alone = await ask(pool, PROMPT, "plain", n=3, **SAMPLED)
    for mine, whole in zip(reply.answers, alone.answers, strict=True):
        assert [token.id for token in mine] == [token.id for token in whole][: len(mine)]


async def test_what_was_thrown_away_is_counted(pool: LocalPool) -> None:
    reply = await ask(pool, PROMPT, "first_finish", {"enough": 4, "shown": False}, n=3, **SAMPLED)
    assert sorted(map(len, reply.answers)) == [0, 0, 4]
    meter = reply.usage.models["large"]
    assert (reply.usage.completion_tokens, meter.generated_tokens) == (4, 4)
    assert meter.discarded_tokens >= 2  # the others had begun


@pytest.mark.parametrize("method", ["plain", "in_turn", "speculative"])
@pytest.mark.parametrize("length", [37, 40, 41])
async def test_the_prompt_is_computed_once_for_all_answers(pool: LocalPool, method: str, length: int) -> None:
    """But for the tokens after its last full block, of which the last one is fed for each answer in any case."""
    prompt = list(range(60, 60 + length))
    reply = await ask(pool, prompt, method, n=4, **SAMPLED)
    rest = length - (length - 1) // BLOCK * BLOCK
    assert reply.usage.models["large"].prompt_tokens == length + 3 * rest


async def test_leaving_early_frees_everything(pool: LocalPool) -> None:
    events = pool.generate(call_of(PROMPT, "in_turn", n=3, **{**SAMPLED, "max_tokens": 400}))
    assert isinstance(await anext(events), Chunk)
    await events.aclose()  # type: ignore[attr-defined]
    await until(lambda: pool.stats().sequences == 0)
    assert pool.stats().requests == 0


async def test_a_fault_fails_the_call_once(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(request: object, models: object, params: object) -> AsyncIterator[None]:
        raise ZeroDivisionError
        yield

    info = replace(get_method("in_turn"), run=broken)
    monkeypatch.setattr("pool.validation.get_method", lambda name: info)
    with pytest.raises(ZeroDivisionError):
        await ask(pool, PROMPT, "in_turn", n=3, **SAMPLED)
    assert pool.stats().sequences == 0


async def test_one_that_can_be_continued_goes_on_from_what_each_answer_has(pool: LocalPool) -> None:
    call = call_of(PROMPT, "in_turn", n=2, **SAMPLED)
    whole = await answer(pool, call)
    ids = [tuple(token.id for token in each) for each in whole.answers]
    delivered = [had(pool, call, each, count) for each, count in zip(ids, (3, 8), strict=True)]
    rest = await finish(pool, call, *delivered)
    assert [tuple(token.id for token in each) for each in rest.answers] == [ids[0][3:], ids[1][8:]]
    assert rest.usage.models["large"].generated_tokens == 24 - 11


@pytest.mark.parametrize("had", [Delivered((65,), 1, False), Delivered((), 0, True)])
async def test_one_that_cannot_is_not_made_again_once_it_has_begun(pool: LocalPool, had: Delivered) -> None:
    call = call_of(PROMPT, "first_finish", n=2, **SAMPLED)
    with pytest.raises(TurnoutError, match="'first_finish' writes its answers together") as caught:
        await answer(pool, replace(call, delivered=(had,)))
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(("method", "leaves"), [("in_turn", True), ("first_finish", False)])
async def test_only_one_that_can_be_continued_is_handed_over(pool: LocalPool, method: str, leaves: bool) -> None:
    call = call_of(PROMPT, method, {} if leaves else {"enough": 12}, n=2, **SAMPLED)
    client = Client.of(call)
    moved = await run(pool, call, client, 5, again=True)
    assert (moved is not None) == leaves
    if moved is not None:
        assert set(moved.meters) == {0, 1}
        assert await run(pool, replace(call, moved=moved), client, None) is None
        whole = await answer(pool, call)
        assert client.ids == [[token.id for token in each] for each in whole.answers]
        assert client.texts == whole.texts
    assert client.usage is not None
    assert client.usage.completion_tokens == sum(map(len, client.ids))
    assert pool.stats().sequences == 0


async def test_a_monitored_method_cannot_be_joint(pool: LocalPool) -> None:
    with pytest.raises(TurnoutError, match="writes all answers of a request together") as caught:
        await ask(pool, PROMPT, "monitored", {"inner": {"name": "in_turn"}})
    assert caught.value.field == "method.params.inner"
