"""A member through its lives, in this process: what was not answered is answered by the next one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import OutOfDiskError

from actors.protocol import PendingCall
from decoding.model import StopCondition
from decoding.operations import Decode
from decoding.sequence import Sequence
from tests.actors.hosts import open_local, poll
from tests.actors.near import POISON, NearPool
from tests.engine.harness import Reply, answer, call_of, random_prompts
from turnout.calls import GenerateCall
from turnout.config import TurnoutConfig
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.types import SamplingParams

Open = Callable[..., Any]
SAMPLED = {"temperature": 0.9, "max_tokens": 48, "ignore_eos": True}
METHODS: list[Any] = [
    ("plain", {}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
    ("speculative", {"length": "fixed"}),
    ("best_of", {}),
]


@pytest.fixture
async def near(actors_config: TurnoutConfig) -> AsyncIterator[Open]:
    """Opens pools; idle afterwards, unless a test has ended a member for good."""
    opened: list[NearPool] = []

    async def open(**options: Any) -> NearPool:
        opened.append(await NearPool.open(actors_config, **options))
        return opened[-1]

    yield open
    for pool in opened:
        if all(supervisor.over is None for supervisor in pool.supervisors.values()):
            await pool.assert_idle()
        await pool.finish()


async def expected(config: TurnoutConfig, calls: list[GenerateCall]) -> list[Reply]:
    """From models in one piece."""
    local = open_local(config)
    replies = [await answer(local, call) for call in calls]
    await local.close()
    return replies


def calls_of(count: int = 6, **options: Any) -> list[GenerateCall]:
    return [
        call_of(prompt, *METHODS[i % len(METHODS)], **{**SAMPLED, "seed": i, **options})
        for i, prompt in enumerate(random_prompts(count, 24, seed=5))
    ]


def same(replies: list[Reply], others: list[Reply]) -> bool:
    """The same tokens, by the same models."""
    return [told(reply) for reply in replies] == [told(other) for other in others]


def told(reply: Reply) -> list[list[tuple[int, str]]]:
    return [[(token.id, token.source) for token in tokens] for tokens in reply.answers]


async def at_work(pool: NearPool, name: str = "large") -> None:
    """Wait until a member works on something."""
    await poll(lambda: bool(pool.supervisors[name]._sent), f"{name} works")


async def test_a_life_that_ends_mid_answer_changes_no_token(near: Open, actors_config: TurnoutConfig):
    pool, calls = await near(), calls_of()
    wanted = await expected(actors_config, calls)
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls]
    for name in ("large", "small", "large"):
        restarts = pool.supervisors[name].restarts
        await at_work(pool, name)
        pool.line(name).cut.set()
        await poll(lambda name=name, restarts=restarts: pool.supervisors[name].restarts > restarts, f"{name} is back")
        await poll(lambda name=name: not len(pool.supervisors[name]._quarantine), "nobody is suspect any more", 60)
    assert same(await asyncio.gather(*tasks), wanted)
    assert [pool.supervisors[name].restarts for name in ("small", "large")] == [1, 2]
    assert [member.restarts for member in pool.stats().members] == [1, 2]


async def test_both_lives_may_end_at_once(near: Open, actors_config: TurnoutConfig):
    pool, calls = await near(), calls_of()
    wanted = await expected(actors_config, calls)
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls]
    await at_work(pool)
    for name in ("small", "large"):
        pool.line(name).cut.set()
    assert same(await asyncio.gather(*tasks), wanted)


async def test_calls_wait_for_a_member_that_is_away_and_may_give_up(near: Open):
    pool, back = await near(), asyncio.Event()
    pool.launchers["large"].plan = [back]
    pool.line().cut.set()
    await poll(lambda: pool.supervisors["large"].connection is None, "it is gone")
    waiting, given_up = (asyncio.create_task(answer(pool, call)) for call in calls_of(2, n=1))
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call_of("x", "plain", deadline_s=0.1, **SAMPLED))
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    given_up.cancel()
    assert not waiting.done()
    assert pool.stats().members[1].place == "", "it is nowhere at the moment"
    back.set()
    assert len((await waiting).ids) == 48
    pool.supervisors["large"].check()


async def test_a_silent_life_is_ended_and_replaced(near: Open, actors_config: TurnoutConfig):
    pool, calls = await near(silence_s=1.5), calls_of(3)
    wanted = await expected(actors_config, calls)
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls]
    await at_work(pool)
    line = pool.line()
    line.silent = True
    assert same(await asyncio.gather(*tasks), wanted)
    assert line.cut.is_set(), "it was ended, though it may live on"
    assert pool.supervisors["large"].restarts == 1


async def test_a_forward_that_never_returns_is_noticed_though_its_process_gives_signs_of_life(
    near: Open, actors_config: TurnoutConfig, caplog: pytest.LogCaptureFixture
):
    pool, calls = await near(silence_s=60.0, forward_timeout_s=2.0), calls_of(3)
    wanted, stuck = await expected(actors_config, calls), threading.Event()
    runner = pool.launchers["large"].host.model.batcher.runner
    run = runner.run

    def wedged(feeds: Any) -> Any:
        assert stuck.wait(60)
        return run(feeds)

    runner.run = wedged  # type: ignore[method-assign]
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls]
    try:
        await poll(lambda: pool.supervisors["large"].restarts == 1, "another life", 30.0)
    finally:
        stuck.set()
    assert "a forward has been running for" in caplog.text
    assert same(await asyncio.gather(*tasks), wanted)


async def test_who_was_asleep_itself_takes_nobody_for_silent(near: Open):
    pool = await near(silence_s=1.2)
    await poll(lambda: all(each.connection.load is not None for each in pool.supervisors.values()), "signs of life")
    threading.Event().wait(2.0)  # the loop stands still, as after SIGSTOP
    assert len((await answer(pool, call_of("after", "plain", **SAMPLED))).ids) == 48
    assert [each.restarts for each in pool.supervisors.values()] == [0, 0]


async def test_a_start_that_fails_is_tried_again(near: Open):
    pool = await near()
    pool.launchers["large"].plan = [TurnoutError(Code.UNAVAILABLE, "no room yet")]
    pool.line().cut.set()
    await poll(lambda: pool.supervisors["large"].restarts == 2, "the second start succeeded")
    assert len((await answer(pool, call_of("again", "plain", **SAMPLED))).ids) == 48


async def test_too_many_restarts_fail_every_call_and_the_check(near: Open):
    pool = await near(max_restarts=1)
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls_of(3)]
    await at_work(pool)
    pool.launchers["large"].plan = [TurnoutError(Code.UNAVAILABLE, "the node is gone")]
    pool.line().cut.set()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, Interrupted)
        assert "max_restarts" in ended.message
        assert "the node is gone" in ended.message
    with pytest.raises(Interrupted, match="large"):
        await answer(pool, call_of("new", "plain", **SAMPLED))
    with pytest.raises(Interrupted):
        pool.supervisors["large"].check()
    pool.supervisors["small"].check()


async def test_no_restarts_may_be_allowed(near: Open):
    pool = await near(max_restarts=0)
    pool.line().cut.set()
    await poll(lambda: pool.supervisors["large"].over is not None, "it is over")
    assert len(pool.launchers["large"].lines) == 1


async def test_a_start_that_takes_too_long_ends_the_waiting(near: Open):
    pool = await near(start_timeout_s=0.3)
    pool.launchers["large"].plan = [asyncio.Event()]
    task = asyncio.create_task(answer(pool, calls_of(1)[0]))
    await at_work(pool)
    pool.line().cut.set()
    with pytest.raises(Interrupted, match=r"0\.3 s"):
        await task


async def test_what_is_cancelled_while_its_member_is_away_leaves_nothing(near: Open):
    pool, back = await near(), asyncio.Event()
    pool.launchers["large"].plan = [back]
    tasks = [asyncio.create_task(answer(pool, call)) for call in calls_of(4)]
    await at_work(pool)
    pool.line().cut.set()
    await poll(lambda: pool.supervisors["large"].connection is None, "it is gone")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not pool.supervisors["large"]._calls
    back.set()
    await poll(lambda: pool.supervisors["large"].connection is not None, "it is back")


async def test_closing_fails_what_waits(near: Open):
    pool = await near()
    pool.launchers["large"].plan = [asyncio.Event()]
    task = asyncio.create_task(answer(pool, calls_of(1)[0]))
    await at_work(pool)
    pool.line().cut.set()
    await poll(lambda: pool.supervisors["large"].connection is None, "it is gone")
    await pool.close()
    with pytest.raises(TurnoutError) as caught:
        await task
    assert caught.value.code is Code.CANCELLED


async def test_exactly_the_poison_request_fails(near: Open, actors_config: TurnoutConfig):
    pool = await near(poisoned=True)
    innocent = calls_of(5, logit_bias={POISON: -100.0})
    wanted = await expected(actors_config, innocent)
    deadly = call_of([68, 69, POISON, 70], "plain", **SAMPLED)
    tasks = [asyncio.create_task(answer(pool, call)) for call in innocent]
    await at_work(pool)
    with pytest.raises(TurnoutError, match="processes in a row") as caught:
        await answer(pool, deadly)
    assert caught.value.code is Code.INTERNAL
    assert repr(deadly.request_id) in caught.value.message
    assert "pid 1000" in caught.value.message
    assert "pid 1001" in caught.value.message
    assert same(await asyncio.gather(*tasks), wanted)
    assert pool.supervisors["large"].restarts in (2, 3)  # 3 where it was the first to run alone, see `Quarantine`


async def test_poison_that_the_model_writes_itself_is_found_too(near: Open, actors_config: TurnoutConfig):
    pool = await near(poisoned=True)
    innocent = calls_of(4, logit_bias={POISON: -100.0})
    wanted = await expected(actors_config, innocent)
    deadly = call_of("write it", "plain", logit_bias={POISON: 6.0}, **SAMPLED)
    tasks = [asyncio.create_task(answer(pool, call)) for call in innocent]
    with pytest.raises(TurnoutError, match="processes in a row"):
        await answer(pool, deadly)
    assert same(await asyncio.gather(*tasks), wanted)


async def test_a_full_store_is_nobodys_fault_and_is_named_in_the_end(near: Open):
    """What was at work when it ended lives three times, where a guilty one would have been found out."""
    pool = await near(max_restarts=3)
    supervisor = pool.supervisors["large"]
    sampling = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    call = PendingCall(Decode(StopCondition(max_tokens=4000)), Sequence([1, 2, 3], sampling, 0))
    task = asyncio.create_task(supervisor.submit(call))
    for lives in range(4):
        await poll(lambda lives=lives: supervisor.restarts == lives and supervisor.connection is not None, "it lives")
        await at_work(pool)
        pool.line().end = lambda: OutOfDiskError("Local disk is full")
        pool.line().cut.set()
    with pytest.raises(Interrupted, match=r"Ray's object store on node .* is full.*--object-store-memory") as caught:
        await task
    assert "placement.max_restarts" in caught.value.message
    pool.members["large"].release(call.seq)


async def test_nobody_runs_beside_a_suspect_that_was_given_up_and_still_works(near: Open):
    pool = await near()
    supervisor, sampling = pool.supervisors["large"], SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    calls = [
        PendingCall(Decode(StopCondition(max_tokens=count)), Sequence([1, 2, index], sampling, 0))
        for index, count in enumerate((4000, 3))
    ]
    given_up, waiting = (asyncio.create_task(supervisor.submit(call)) for call in calls)
    await poll(lambda: len(supervisor._sent) == 2, "both are at work")
    supervisor._quarantine.died(calls, "before")
    pool.line().cut.set()
    await poll(lambda: supervisor.restarts == 1 and bool(pool.launchers["large"].host._tasks), "one works again, alone")
    connection = supervisor.connection
    assert connection.in_flight == calls[:1]
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert connection.in_flight == calls[:1], "it ends there later"
    assert calls[1] not in supervisor._sent
    assert len((await waiting).segment.tokens) == 3
    for call in calls:
        pool.members["large"].release(call.seq)
