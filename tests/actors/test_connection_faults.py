"""What a connection makes of operations that end badly: interrupted, cancelled, or never sent."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from actors.connection import ActorConnection
from actors.protocol import PendingCall, RequestKind
from decoding.model import StopCondition
from decoding.operations import Decode, PrefillAhead, ScoreContinuations
from decoding.sequence import Sequence
from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool, poll
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def sequence() -> Sequence:
    return Sequence([7 * i % 250 for i in range(1, 21)], LONG, seed=3)


def connection_of(pool: RemotePool) -> ActorConnection:
    connection = pool.supervisors["large"].connection
    assert connection is not None
    return connection


async def test_a_stretch_interrupted_after_some_tokens_is_made_again_whole(
    remote: RemotePool, pools: tuple[LocalPool, RemotePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one of the processes that a model is split over has ended."""
    expected, seq, host, connection = sequence(), sequence(), remote.hosts["large"], connection_of(remote)
    local = pools[0].engines["large"]
    await local.decode(expected, StopCondition(max_tokens=10))
    local.release(expected)
    real = host.model.do

    async def broken(replica: Sequence, op: Any) -> Any:
        await real(replica, Decode(StopCondition(max_tokens=4)))
        raise Interrupted("rank 1 has ended")

    call = PendingCall(Decode(StopCondition(max_tokens=10)), seq)
    with monkeypatch.context() as patch:
        patch.setattr(host.model, "do", broken)
        connection.send(call)
        with pytest.raises(Interrupted):
            await call.future
    assert len(seq) == 20, "what it wrote is written again"
    call.renew()
    connection.send(call)
    decoded = await call.future
    assert [token.id for token in decoded.segment.tokens] == expected.tokens[20:]
    assert seq.tokens == expected.tokens
    remote.members["large"].release(seq)


async def test_an_operation_cancelled_before_it_began_answers(fragile: RemotePool) -> None:
    """Planted: both messages are applied in one go."""
    line, connection, model, seq = fragile.lines["large"], connection_of(fragile), fragile.members["large"], sequence()
    held: list[tuple[int, bytes]] = []

    def hold(number: int, blob: bytes) -> list[tuple[int, bytes]]:
        kinds = {message[0] for message in pickle.loads(blob)}
        if RequestKind.CALL in kinds:
            held.append((number, blob))
            return []
        return [(number, blob), held.pop()] if RequestKind.CANCEL in kinds and held else [(number, blob)]

    line.meddle = hold
    task = asyncio.ensure_future(model.decode(seq, StopCondition(max_tokens=5)))
    await poll(lambda: bool(held), "the call is on its way")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await poll(lambda: not held, "both are there")
    line.meddle = lambda number, blob: [(number, blob)]
    await poll(lambda: not connection._sent, "it was answered")
    assert not connection._calls
    assert connection._known[seq].appending == 0
    await model.decode(seq, StopCondition(max_tokens=5))
    assert len(seq) == 25
    model.release(seq)


async def test_only_the_call_that_cannot_be_pickled_fails(remote: RemotePool) -> None:
    connection, model = connection_of(remote), remote.members["large"]
    sound, faulty = sequence(), sequence()
    bad = PendingCall(ScoreContinuations([(1, 2), lambda: None]), faulty)  # type: ignore[list-item]
    good = PendingCall(Decode(StopCondition(max_tokens=3)), sound)
    connection.send(bad)
    connection.send(good)
    with pytest.raises(TurnoutError, match="cannot be pickled") as caught:
        await bad.future
    assert caught.value.code is Code.INTERNAL
    assert len((await good.future).segment.tokens) == 3
    await model.decode(faulty, StopCondition(max_tokens=3))
    assert faulty.tokens == sound.tokens
    for seq in (sound, faulty):
        model.release(seq)


async def test_a_post_that_ray_does_not_take_fails_its_calls_and_blames_nobody(fragile: RemotePool) -> None:
    line, connection = fragile.lines["large"], connection_of(fragile)
    under_way = PendingCall(Decode(StopCondition(max_tokens=150)), sequence())
    connection.send(under_way)
    await poll(lambda: bool(line.host._tasks), "it is under way")

    def full(number: int, blob: bytes) -> list[tuple[int, bytes]]:
        raise MemoryError("the store is full")

    line.meddle = full
    late = PendingCall(PrefillAhead(), sequence())
    connection.send(late)
    with pytest.raises(TurnoutError, match=r"pid \d+ .*the store is full.*object store") as caught:
        await late.future
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    await connection.lost.wait()
    assert connection.blameless
    assert connection.in_flight == [under_way], "another life answers it"
