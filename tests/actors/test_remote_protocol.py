"""The wire between a coordinator and an actor: order, cancellation, several operations at once, and planted faults."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from actors.connection import ConnectionGroup
from actors.protocol import ReplyKind, RequestKind
from decoding.model import ReadSpec, StopCondition
from decoding.sequence import Sequence
from pool.local_pool import LocalPool
from tests.actors.hosts import DirectChannel, RemotePool, poll
from turnout.errors import Code, TurnoutError
from turnout.types import FinishReason, SamplingParams, Token

# One loop for all: the models' locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def sequence(length: int = 20, sampling: SamplingParams = LONG) -> Sequence:
    return Sequence([7 * i % 250 for i in range(1, length + 1)], sampling, seed=3)


async def posted(line: DirectChannel) -> None:
    """Wait for another post."""
    before = len(line.posts)
    await poll(lambda: len(line.posts) > before, "a post went out")


async def tokens_of(model: Any, seq: Sequence, *stretches: int) -> list[int]:
    for count in stretches:
        await model.decode(seq, StopCondition(max_tokens=count))
    tokens = list(seq.tokens)
    model.release(seq)
    return tokens


def meddled(line: DirectChannel, change: Callable[[list[Any]], list[Any]]) -> None:
    """Let every post be changed on its way."""
    line.meddle = lambda number, blob: [(number, pickle.dumps(change(pickle.loads(blob))))]


@pytest.mark.parametrize("spared", [False, True])
async def test_posts_are_applied_in_the_order_of_their_numbers(
    fragile: RemotePool, local: LocalPool, spared: bool
) -> None:
    """Every second post is held back until the next one is out. Planted: a host that ignores numbers is caught."""
    model, line = fragile.members["large"], fragile.lines["large"]
    held: list[tuple[int, bytes]] = []

    def swap(number: int, blob: bytes) -> list[tuple[int, bytes]]:
        if not held:
            held.append((number, blob))
            return []
        return [(number, blob), held.pop()]

    seqs = [sequence(9 + index) for index in range(4)]
    expected = [await tokens_of(local.engines["large"], sequence(9 + index), 5, 5) for index in range(4)]
    line.meddle = swap
    if spared:  # the planted fault: posts are taken as they come
        host, real = line.host, line.host.post

        async def careless(number: int, blob: bytes) -> None:
            await real(host._next_post, blob)

        host.post = careless  # type: ignore[method-assign]
    forks = []
    tasks = []
    for seq in seqs:
        tasks.append(asyncio.ensure_future(model.decode(seq, StopCondition(max_tokens=5))))
        await posted(line)
    if held:
        # The last one has no follower: a post of nothing is one.
        fragile.supervisors["large"].connection.say((RequestKind.FORGET, []))  # type: ignore[union-attr]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for seq in seqs:
        forks.append(model.fork(seq))
        await posted(line)
        tasks.append(asyncio.ensure_future(model.decode(forks[-1], StopCondition(max_tokens=5))))
        await posted(line)
        model.release(seq)
        await posted(line)
    if held:
        fragile.supervisors["large"].connection.say((RequestKind.FORGET, []))  # type: ignore[union-attr]
    done += await asyncio.gather(*tasks[4:], return_exceptions=True)
    line.meddle = lambda number, blob: [(number, blob), *([held.pop()] if held else [])]
    for fork in forks:
        model.release(fork)
    right = not any(isinstance(each, BaseException) for each in done) and [f.tokens for f in forks] == expected
    if not spared:
        assert right
    else:
        assert not right


async def test_a_lost_update_is_an_error_and_no_wrong_token(remote: RemotePool) -> None:
    """Planted: one message on its way loses the tokens that the replica lacks."""
    model, seq = remote.members["large"], sequence()
    await model.decode(seq, StopCondition(max_tokens=4))
    seq.append(Token(65, "elsewhere"))

    def forget(messages: list[Any]) -> list[Any]:
        return [(*m[:2], m[2][:2], *m[3:]) if m[0] == RequestKind.CALL else m for m in messages]

    meddled(remote.lines["large"], forget)
    await model.decode(seq, StopCondition(max_tokens=1))  # nothing tells that the token is missing yet
    meddled(remote.lines["large"], lambda messages: messages)
    with pytest.raises(TurnoutError, match="out of step") as caught:
        await model.decode(seq, StopCondition(max_tokens=4))
    assert caught.value.code is Code.INTERNAL
    model.release(seq)


async def test_a_mirror_one_token_short_is_an_error(remote: RemotePool) -> None:
    """Planted: the actor loses a token of a replica between two operations."""
    model, seq = remote.members["large"], sequence()
    await model.decode(seq, StopCondition(max_tokens=4))
    [replica] = remote.hosts["large"]._replicas._replicas.values()
    replica.seq.tokens.pop()
    with pytest.raises(TurnoutError, match="it has 23 tokens"):
        await model.decode(seq, StopCondition(max_tokens=4))
    model.release(seq)


async def test_a_reply_for_another_place_is_an_error(remote: RemotePool) -> None:
    """Planted: somebody appends to a sequence while a model decodes it."""
    model, seq = remote.members["large"], sequence()
    task = asyncio.ensure_future(model.decode(seq, StopCondition(max_tokens=4)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    seq.append(Token(65, "elsewhere"))
    with pytest.raises(TurnoutError, match="the answer is elsewhere"):
        await task
    model.release(seq)


async def test_what_is_said_in_one_turn_goes_out_in_one_post(remote: RemotePool) -> None:
    model, line = remote.members["large"], remote.lines["large"]
    seqs, before = [sequence(8 + index) for index in range(6)], len(line.posts)
    await asyncio.gather(*(model.decode(seq, StopCondition(max_tokens=1)) for seq in seqs))
    assert len(line.posts) == before + 1
    twins = [model.fork(seq) for seq in seqs]
    for seq in (*seqs, *twins):
        model.release(seq)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(line.posts) == before + 2
    kinds = [message[0] for message in pickle.loads(line.posts[-1])]
    assert kinds == [RequestKind.FORK] * 6 + [RequestKind.RELEASE] * 12


async def test_a_fork_is_of_the_sequence_as_it_then_was(remote: RemotePool, local: LocalPool) -> None:
    expected = await tokens_of(local.engines["large"], sequence(), 12)
    model, seq = remote.members["large"], sequence()
    await model.decode(seq, StopCondition(max_tokens=4))
    twin = model.fork(seq)
    going = asyncio.ensure_future(model.decode(seq, StopCondition(max_tokens=4)))
    await asyncio.sleep(0)
    early = model.fork(seq)  # the replica may be ahead of it
    await going
    assert len(seq) == 28
    assert len(twin) == len(early) == 24
    model.release(seq)
    await asyncio.gather(*(model.decode(each, StopCondition(max_tokens=8)) for each in (twin, early)))
    assert twin.tokens == early.tokens == expected
    assert twin.meter.models["large"].prompt_tokens == 0, "it shares the cache"
    for each in (twin, early):
        model.release(each)


async def test_reading_in_the_background_beside_decoding(remote: RemotePool, local: LocalPool) -> None:
    expected = await tokens_of(local.engines["large"], sequence(60), 30)
    model, seq = remote.members["large"], sequence(60)
    await asyncio.gather(
        model.prefill_ahead(seq), model.decode(seq, StopCondition(max_tokens=10)), model.prefill_ahead(seq)
    )
    await asyncio.gather(
        model.extend(seq, (1, 2), ReadSpec()), model.decode(seq, StopCondition(max_tokens=20)), model.prefill_ahead(seq)
    )
    assert seq.tokens == expected
    meter = seq.meter.models["large"]
    assert meter.prompt_tokens + meter.cached_tokens == 60
    model.release(seq)


async def test_a_cancelled_operation_ends_there_and_the_sequence_goes_on(remote: RemotePool, local: LocalPool) -> None:
    expected = await tokens_of(local.engines["large"], sequence(), 30)
    model, seq, host = remote.members["large"], sequence(), remote.hosts["large"]
    await model.decode(seq, StopCondition(max_tokens=3))
    task = asyncio.ensure_future(model.decode(seq, StopCondition(max_tokens=150)))
    replica = next(iter(host._replicas._replicas.values()))
    await poll(lambda: len(replica.seq) > 40, "some tokens were written there")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(seq) == 23
    await model.decode(seq, StopCondition(max_tokens=27))
    assert seq.tokens == expected
    assert host.model.stats().sequences == 1
    assert len(replica.seq) == len(seq)
    assert seq.meter.models["large"].forwards > 30, "what the cancelled one cost is counted"
    model.release(seq)


async def test_a_sequence_is_released_while_operations_run(remote: RemotePool) -> None:
    model, seq, host = remote.members["large"], sequence(), remote.hosts["large"]
    decode = asyncio.ensure_future(model.decode(seq))
    absorb = asyncio.ensure_future(model.prefill_ahead(seq))
    await poll(lambda: host.model.stats().sequences == 1, "it is under way")
    model.release(seq)
    with pytest.raises(TurnoutError) as caught:
        await decode
    assert caught.value.code is Code.CANCELLED
    await asyncio.gather(absorb, return_exceptions=True)


async def test_everything_said_before_a_life_ends_is_asked_of_the_next(fragile: RemotePool, local: LocalPool) -> None:
    """The new life starts from the sequence alone; the answer is the same, and work lost is counted as it was done."""
    expected = await tokens_of(local.engines["large"], sequence(), 60)
    model, seq, supervisor = fragile.members["large"], sequence(), fragile.supervisors["large"]
    host = fragile.hosts["large"]
    await model.decode(seq, StopCondition(max_tokens=10))
    task = asyncio.ensure_future(model.decode(seq, StopCondition(max_tokens=50)))
    replica = next(iter(host._replicas._replicas.values()))
    await poll(lambda: len(replica.seq) > 40, "it is under way")
    old = supervisor.connection
    fragile.lines["large"].cut.set()
    assert old is not None
    await old.lost.wait()
    await host.stop()
    again = type(host)(host.spec)
    card = await asyncio.to_thread(lambda: (again.load(), again.begin(261))[1])
    fragile.hosts["large"], supervisor.card = again, card
    line = fragile.lines["large"] = DirectChannel(again)
    supervisor.open(line)
    await task
    assert seq.tokens == expected
    assert seq.meter.models["large"].generated_tokens == 60
    model.release(seq)


async def test_an_error_there_is_the_same_error_here(remote: RemotePool) -> None:
    model = remote.members["large"]
    seq = Sequence([1, 2, 3], SamplingParams(max_tokens=10**6, ignore_eos=True), 0)
    with pytest.raises(TurnoutError) as caught:
        await model.extend(seq, tuple([1] * 200_000))
    assert caught.value.code is Code.OUT_OF_RANGE
    model.release(seq)


async def test_embeddings_are_next_to_the_model(remote: RemotePool) -> None:
    with pytest.raises(TurnoutError, match="next to the model"):
        remote.members["large"].embed([1])


async def test_rows_with_tensors_come_whole(remote: RemotePool, local: LocalPool) -> None:
    want = ReadSpec(probs=True, logits=True, hidden=frozenset({-1, 2}), before=frozenset({1}), entropy=True, top=3)
    rows = []
    for model in (local.engines["large"], remote.members["large"]):
        seq = sequence()
        rows.append(await model.extend(seq, (5, 6), want, every=True))
        model.release(seq)
    for mine, theirs in zip(*rows, strict=True):
        assert mine.token == theirs.token
        assert mine.top == theirs.top
        assert mine.logits is not None
        assert mine.logits.equal(theirs.logits)
        assert mine.probs.equal(theirs.probs)
        assert mine.hidden.keys() == theirs.hidden.keys()
        assert all(mine.hidden[layer].equal(theirs.hidden[layer]) for layer in mine.hidden)
        assert all(mine.before[layer].equal(theirs.before[layer]) for layer in mine.before)


async def test_finish_and_reopening_travel(remote: RemotePool, local: LocalPool) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(65,))
    seq = Sequence([1, 2, 3], sampling, 0)
    model = remote.members["large"]
    await model.decode(seq, StopCondition(max_tokens=2))
    seq.append(Token(65, "elsewhere"))
    assert seq.finish_reason is FinishReason.STOP
    assert (await model.decode(seq)).stopped_by == "finish"
    seq.reopen()
    segment = await model.decode(seq, StopCondition(max_tokens=2))
    assert len(segment.tokens) == 2
    model.release(seq)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_post_that_never_comes_is_noticed(
    fragile: RemotePool, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Also where later ones keep coming."""
    monkeypatch.setattr("actors.model_worker.GAP_S", 0.05)
    monkeypatch.setattr("actors.model_worker.HEARTBEAT_S", 0.05)
    model, line, seq = fragile.members["large"], fragile.lines["large"], sequence()
    line.meddle = lambda number, blob: []
    going = asyncio.ensure_future(model.prefill_ahead(seq))
    await posted(line)
    line.meddle = lambda number, blob: [(number, blob)]
    model.release(seq)
    connection = fragile.supervisors["large"].connection
    assert connection is not None
    async with asyncio.timeout(30):
        while busy and not connection.lost.is_set():
            connection.say((RequestKind.FORGET, []))
            await asyncio.sleep(0.005)
        await connection.lost.wait()
    assert "never came" in str(connection.reason)
    assert not going.done(), "another life may answer it"
    going.cancel()
    connection._sent.clear()


async def test_kinds_keep_their_numbers() -> None:
    """They go over the wire."""
    assert (ReplyKind.DONE, ReplyKind.FAILED, ReplyKind.ALIVE) == (0, 1, 2)
    assert ConnectionGroup().connections == {}
