"""What is counted as delivered, who is suspect, and who is not tried again; without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray import ActorID
from ray.exceptions import ActorUnavailableError

from deployments.backend import Batch
from deployments.remote import RemoteBackend
from deployments.retry import FEW, MAX_LOSSES, Attempts, LostError, Replay, SerialGate
from tests.deployments.scripted_pool import ScriptedPool, expected, scripted_config, usage_of
from tests.deployments.served_pool import call, read, read_one
from turnout.calls import Chunk, Decided, Delivered, Failure, GenerateCall, Regained, TokenOut, Usage
from turnout.config import StickyConfig
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.moved_calls import Moved
from turnout.types import FinishReason, RouteLimits, SharingPolicy, TokenKind

GONE = ActorUnavailableError("gone", ActorID.from_random().binary())
Script = Callable[[GenerateCall], AsyncIterator[Batch]]


class Response:
    def __init__(self, batches: AsyncIterator[Batch]) -> None:
        self._batches = batches

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._batches

    def cancel(self) -> None:
        pass


class Handle:
    """A deployment that answers each attempt by the next script; remembers the calls."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[GenerateCall] = []
        self.stream = self
        self.complete = self
        self._router: Any = None

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, asked: GenerateCall) -> Any:
        self.calls.append(asked)
        return Response(self.scripts.pop(0)(asked))


def chunk(text: str, index: int = 0, finish: FinishReason | None = None) -> Chunk:
    tokens = tuple(TokenOut(ord(letter), letter, "m", TokenKind.DECODED) for letter in text)
    return Chunk(index, text, tokens, finish)


def breaks_after(*batches: Batch, error: BaseException = GONE) -> Script:
    async def script(asked: GenerateCall) -> AsyncIterator[Batch]:
        for batch in batches:
            yield batch
        raise error

    return script


def fails_with(*batches: Batch, error: TurnoutError) -> Script:
    async def script(asked: GenerateCall) -> AsyncIterator[Batch]:
        for batch in batches:
            yield batch
        yield (Failure(error),)

    return script


async def answers(asked: GenerateCall) -> AsyncIterator[Batch]:
    pool = ScriptedPool("p", scripted_config(Path()))
    async for event in pool.generate(asked):
        yield (event,)


def decides(arm: str) -> Script:
    """A replica that decides in its own way about what comes without a decision."""
    decision = {"method": "plain", "params": {}, "policy": "test", "version": "0", "arm": arm}

    async def script(asked: GenerateCall) -> AsyncIterator[Batch]:
        async for batch in answers(replace(asked, decided=asked.decided or decision)):
            yield batch

    return script


def backend(*scripts: Script, routed: bool = False, sticky: StickyConfig | None = None) -> tuple[RemoteBackend, Handle]:
    handle = Handle(*scripts)
    return RemoteBackend("p", handle, routed=routed, sticky=sticky), handle


def first_tokens(count: int, seed: int = 5, salt: str = "") -> Chunk:
    return chunk("".join(map(chr, expected(seed, count, salt=salt))))


async def test_a_lost_replicas_answer_goes_on_where_it_was() -> None:
    remote, handle = backend(breaks_after((first_tokens(3),)), answers)
    sharing = SharingPolicy(policy="group", group="team")
    got = await read_one(remote, replace(call("step=0", max_tokens=6), sharing=sharing))
    assert [asked.sharing for asked in handle.calls] == [sharing, sharing]
    assert got.ids == expected(5, 6)
    assert got.text == "".join(map(chr, got.ids))
    assert handle.calls[0].delivered == ()
    assert handle.calls[1].delivered == (Delivered(tuple(expected(5, 3)), 3),)
    assert handle.calls[1].sampling.seed == handle.calls[0].sampling.seed
    left_s = handle.calls[1].deadline_s
    assert left_s is not None
    assert left_s < 60
    assert got.usage is not None
    assert "lost once" in got.usage.notes[-1]


async def test_what_was_delivered_is_counted_by_answer_and_nothing_is_sent_twice() -> None:
    ended = chunk("", 1, FinishReason.STOP)
    second = [ended, chunk("xy", 0), chunk("", 0, FinishReason.STOP)]

    async def rest(asked: GenerateCall) -> AsyncIterator[Batch]:
        yield tuple(second)
        async for batch in answers(replace(asked, sampling=asked.sampling.model_copy(update={"n": 0}), delivered=())):
            yield batch

    remote, handle = backend(breaks_after((chunk("ab", 0), chunk("c", 1)), (ended,)), rest)
    got = await read(remote, call("step=0", n=2))
    assert handle.calls[1].delivered == (
        Delivered((97, 98), 2),
        Delivered((99,), 1, finished=True),
    )
    assert (got[0].text, got[1].text) == ("abxy", "c")
    assert got[0].reasons == got[1].reasons == ["stop"]


async def test_a_stream_that_ends_without_a_usage_is_a_loss() -> None:
    async def stops(asked: GenerateCall) -> AsyncIterator[Batch]:
        yield (first_tokens(2),)

    remote, handle = backend(stops, answers)
    assert (await read_one(remote, call("step=0", max_tokens=4))).ids == expected(5, 4)
    assert len(handle.calls) == 2


async def test_a_call_that_ends_two_replicas_in_a_row_is_not_tried_a_third_time() -> None:
    remote, handle = backend(breaks_after((first_tokens(2),)), breaks_after(), breaks_after(), answers)
    with pytest.raises(TurnoutError) as failure:
        await read_one(remote, call("step=0", "poison"))
    assert failure.value.code is Code.INTERNAL
    assert "'poison'" in failure.value.message
    assert "not tried again" in failure.value.message
    # The first one got somewhere, so it does not count as one of the two.
    assert len(handle.calls) == 3 - 1


async def test_what_is_made_again_does_not_keep_the_other_suspects_waiting() -> None:
    both = asyncio.Barrier(2)

    async def makes_again(asked: GenerateCall) -> AsyncIterator[Batch]:
        yield (Regained(),)
        await asyncio.wait_for(both.wait(), 30.0)  # the other one as well, before either has anything new
        async for batch in answers(asked):
            yield batch

    remote, _ = backend(*[breaks_after((first_tokens(3),))] * 2, *[makes_again] * 2)
    got = await asyncio.gather(*(read_one(remote, call("step=0", f"r{i}", max_tokens=6)) for i in range(2)))
    assert [each.ids for each in got] == [expected(5, 6)] * 2
    assert not any(isinstance(event, Regained) for event in Replay(call("x"), "p").take((Regained(),)))


async def test_two_losses_while_others_ran_beside_it_are_no_guilt() -> None:
    again = breaks_after((Regained(),))
    remote, _ = backend(breaks_after((first_tokens(3),)), again, answers)
    assert (await read_one(remote, call("step=0", max_tokens=6))).ids == expected(5, 6)


async def test_a_poison_that_is_made_again_up_to_where_it_ends_the_process_is_found_when_it_runs_apart() -> None:
    again = breaks_after((Regained(),))
    remote, handle = backend(breaks_after((first_tokens(3),)), again, again, again)
    with pytest.raises(TurnoutError, match="not tried again"):
        await read_one(remote, call("step=0"))
    assert len(handle.calls) == 3
    gate, poison, other = SerialGate(), Attempts("a", "p"), Attempts("b", "p")
    for each in (poison, poison, other):
        each.lost(LostError("p"), apart=False)
    async with gate.turn(poison):
        poison.regained()
        assert not poison.gets_on  # apart until something new comes
        poison.went_on(1)
        assert poison.gets_on


async def test_a_long_call_outlives_losses_between_which_it_gets_far() -> None:
    parts = [breaks_after((chunk("a" * FEW),)) for _ in range(2 * MAX_LOSSES)]

    async def rest(asked: GenerateCall) -> AsyncIterator[Batch]:
        async for batch in answers(replace(asked, delivered=())):
            yield batch

    remote, _ = backend(*parts, rest)
    assert len((await read_one(remote, call("step=0", max_tokens=2))).ids) == 2 * MAX_LOSSES * FEW + 2


async def test_a_loss_after_the_last_word_is_none() -> None:
    async def answers_and_breaks(asked: GenerateCall) -> AsyncIterator[Batch]:
        async for batch in answers(asked):
            yield batch
        raise GONE

    remote, _ = backend(answers_and_breaks)
    got = await read_one(remote, call("step=0", max_tokens=3))
    assert got.ids == expected(5, 3)
    assert got.usage is not None
    assert got.usage.notes == ()


async def test_only_a_stream_that_broke_is_a_loss() -> None:
    def unexpected(code: grpc.StatusCode) -> Script:
        return breaks_after(error=RuntimeError(f"Unexpected error ({code}): it is so."))

    remote, handle = backend(unexpected(grpc.StatusCode.UNAVAILABLE), answers)
    assert (await read_one(remote, call("step=0", max_tokens=3))).ids == expected(5, 3)
    remote, handle = backend(unexpected(grpc.StatusCode.RESOURCE_EXHAUSTED), answers)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):  # too large: it would be so again
        await read_one(remote, call("step=0"))
    assert len(handle.calls) == 1


async def test_who_is_to_blame_is_logged_with_the_places(caplog: pytest.LogCaptureFixture) -> None:
    remote, handle = backend(breaks_after(), breaks_after())
    places = {GONE.actor_id: "10.0.0.7 pid 11"}
    router = SimpleNamespace(retired=lambda actor_id: False, place=lambda actor_id: places[actor_id])
    handle._router = SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=router))
    with caplog.at_level("WARNING", "ray.serve"), pytest.raises(TurnoutError, match=r"on 10\.0\.0\.7 pid 11"):
        await read_one(remote, call("x", "bad"))
    assert "'bad'" in caplog.text
    assert "10.0.0.7 pid 11" in caplog.text


def test_a_batch_that_was_collected_says_nothing_of_the_first_token() -> None:
    now = 0.0
    replay = Replay(call("x"), "p", clock=lambda: now)
    now = 30.0
    replay.take((chunk("abc"),), collected=True)
    replay.lost(LostError("p"))
    now = 31.0
    replay.take((chunk("d"),))
    usage = replay.take((usage_of(call("x"), 0.5),))[0]
    assert isinstance(usage, Usage)
    assert (usage.ttft_s, usage.wall_s) == (31.0, 31.0)


async def test_losses_with_little_progress_between_them_end_too() -> None:
    parts = [breaks_after((chunk("a"),)) for _ in range(MAX_LOSSES)]
    remote, handle = backend(*parts, answers)
    with pytest.raises(TurnoutError) as failure:
        await read_one(remote, call("step=0"))
    assert failure.value.code is Code.INTERNAL
    assert len(handle.calls) == MAX_LOSSES


async def test_an_interrupted_or_moved_call_is_not_to_blame() -> None:
    moved = Moved()
    scripts = [fails_with(error=Interrupted("an actor ended")) for _ in range(3)]
    remote, handle = backend(*scripts, fails_with((first_tokens(1),), error=Interrupted("over", moved)), answers)
    got = await read_one(remote, call("step=0", max_tokens=3))
    assert got.ids == expected(5, 3)
    assert handle.calls[-1].moved is moved
    assert handle.calls[-2].moved is None


async def test_a_refusal_is_no_loss() -> None:
    remote, handle = backend(fails_with(error=TurnoutError(Code.OUT_OF_RANGE, "too long")), answers)
    with pytest.raises(TurnoutError, match="too long"):
        await read_one(remote, call("x"))
    assert len(handle.calls) == 1


async def test_a_call_that_was_let_in_waits_for_room() -> None:
    full = TurnoutError(Code.RESOURCE_EXHAUSTED, "no room")
    remote, handle = backend(breaks_after(), fails_with(error=full), fails_with(error=full), answers)
    assert (await read_one(remote, call("step=0", max_tokens=2))).ids == expected(5, 2)
    assert len(handle.calls) == 4
    remote, _ = backend(fails_with(error=full), answers)
    with pytest.raises(TurnoutError, match="no room"):
        await read_one(remote, call("step=0"))


async def test_a_routed_call_keeps_its_first_decision() -> None:
    decision = {"method": "plain", "params": {}, "policy": "test", "version": "0", "arm": "the first"}
    first = (Decided(decision), first_tokens(2, salt="the first"))
    remote, handle = backend(breaks_after(first), answers, routed=True)
    got = await read_one(remote, call("step=0", max_tokens=5))
    assert got.ids == expected(5, 5, salt="the first")
    assert handle.calls[0].include_decision
    assert handle.calls[1].decided == decision


async def test_a_session_takes_its_decision_along_to_whichever_replica_is_next() -> None:
    remote, handle = backend(*(decides(arm) for arm in "abcdefgh"), routed=True, sticky=StickyConfig())

    async def arm(request_id: str, **changes: Any) -> str:
        got = await read_one(remote, call("step=0", request_id, max_tokens=3, **changes))
        [found] = [each for each in "abcdefgh" if got.ids == expected(5, 3, salt=each)]
        return found

    assert [await arm(name, session="s") for name in ("r0", "r1")] == ["a", "a"]
    first, second = (each.decided for each in handle.calls)
    assert first is None
    assert second is not None
    assert (second["kept_from"], second["reason"]) == ("r0", "the session keeps what was decided for request r0: ")
    others: list[dict[str, Any]] = [
        {"session": "t"}, {"session": "s", "tenant": "u"}, {"session": "s", "limits": RouteLimits(quality=0.5)},
        {"session": "s", "method": "plain"}, {"session": "s", "model": "small"}, {},
    ]  # fmt: skip
    assert [await arm("r2", **changes) for changes in others] == list("cdefgh")
    assert [each.decided for each in handle.calls[2:]] == [None] * len(others)


async def everybody() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_suspects_go_one_at_a_time_and_others_pass() -> None:
    gate, running, most = SerialGate(), 0, 0
    released = asyncio.Event()

    async def run(attempts: Attempts) -> None:
        nonlocal running, most
        async with gate.turn(attempts):
            running += attempts.quarantined
            most = max(most, running)
            await released.wait()
            running -= attempts.quarantined

    suspects = [Attempts(f"s{i}", "p") for i in range(3)]
    for each in suspects:
        each.lost(LostError("a replica"))
    fresh = Attempts("f", "p")
    tasks = [asyncio.create_task(run(each)) for each in (*suspects, fresh)]
    await everybody()
    assert (running, sum(task.done() for task in tasks)) == (1, 0)
    released.set()
    await asyncio.gather(*tasks)
    assert most == 1


async def test_a_suspect_that_gets_on_lets_the_next_one_in() -> None:
    gate = SerialGate()
    first, second = Attempts("a", "p"), Attempts("b", "p")
    for each in (first, second):
        each.lost(LostError("a replica"))
    async with gate.turn(first) as turn:
        waiting = asyncio.create_task(gate.turn(second).__aenter__())
        await everybody()
        assert not waiting.done()
        turn.over()
        await asyncio.wait_for(waiting, 30.0)


def test_the_pauses_grow_while_nothing_comes() -> None:
    attempts = Attempts("r", "p")
    assert attempts.pause_s == 0
    pauses = []
    for _ in range(8):
        attempts.lost(LostError("p", blameless=True))
        pauses.append(attempts.pause_s)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    attempts.went_on()
    assert (attempts.pause_s, attempts.quarantined) == (0, False)


def test_the_time_left_counts_from_the_first_attempt() -> None:
    now = 100.0
    replay = Replay(call("x"), "p", clock=lambda: now)
    replay.lost(LostError("p"))
    now = 130.0
    assert replay.call.deadline_s == 30.0
    now = 200.0
    assert replay.call.deadline_s == 0.001
