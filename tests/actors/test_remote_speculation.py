"""Speculation between two actors: drafts by reference, parts that live beside a model, and what is lost on the way."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from actors.pickling import TensorHandle
from actors.transport import GroupBroken
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.fixed import FixedLength
from decoding.model import ReadSpec, StopCondition
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from decoding.verifiers.rejection import RejectionVerifier
from pool.local_pool import LocalPool
from tests.actors.hosts import DirectChannel, RemotePool, poll
from tests.engine.harness import ask
from turnout.errors import Interrupted
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLED = SamplingParams(temperature=0.9, max_tokens=200, ignore_eos=True)
ROOM = DraftBudget(4, 4)


class Pupil(Drafter):
    """Learns slowly, or not at all."""

    changing = ("seen",)

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.fails = fails

    async def propose(self, model: Any, seq: Sequence, room: DraftBudget, length: Any) -> DraftTree:
        return DraftTree.chain([1], model.name)

    def observe(self, model: Any, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        if self.fails:
            raise RuntimeError("it has a headache")
        self.seen.append(len(seq))
        self.known = draft.proposals


@pytest_asyncio.fixture(loop_scope="module")
async def remote(remote: RemotePool) -> AsyncIterator[RemotePool]:
    """The same, with nothing in its stores and no copies after the test."""
    yield remote
    await remote.settle()

    def empty() -> bool:
        gc.collect()  # errors that were caught hold what they were about
        return not any(len(host.store) or len(host._receiver) for host in remote.hosts.values())

    await poll(empty, "all tensors were dropped, all copies forgotten")


def sequence(length: int = 20) -> Sequence:
    return Sequence([7 * i % 250 for i in range(1, length + 1)], SAMPLED, seed=3)


def release(pool: RemotePool, seq: Sequence) -> None:
    for model in pool.members.values():
        model.release(seq)


async def test_proposals_go_from_actor_to_actor_and_never_here(remote: RemotePool) -> None:
    small, large, seq = remote.members["small"], remote.members["large"], sequence()
    drafter, before = ModelChainDrafter(None, Candidates.DRAWN), remote.board.num_sent
    tree = await small.propose(seq, drafter, ROOM, FixedLength())
    assert len(tree) == 4
    assert all(isinstance(each, TensorHandle) for each in tree.proposals)
    store = remote.hosts["small"].store
    assert len(store) == 4
    assert store.nbytes == sum(each.nbytes for each in tree.proposals)
    verdict = await large.verify(seq, tree, RejectionVerifier())
    assert remote.board.num_sent == before + 4
    assert all(row.probs is None for row in verdict.rows), "only the verifier wanted them"
    release(remote, seq)


async def give_up(model: Any, seq: Sequence, turns: int) -> bool:
    """Ask for a draft and cancel after some turns of the event loop: true where it was there before.

    What came of it is this function's alone: its tensors can be dropped from the return on.
    """
    asked = asyncio.ensure_future(model.propose(seq, ModelChainDrafter(None, Candidates.DRAWN), ROOM, FixedLength()))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_there = asked.done()
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled() or len(asked.result()) == 4
    return was_there


async def test_a_cancelled_proposal_leaves_nothing_on_the_shelf(remote: RemotePool) -> None:
    """Cut off before it was sent, on its way, at work, on the way back, or when it is there."""
    small, seq = remote.members["small"], sequence()
    turns = 0
    while not await give_up(small, seq, turns):
        turns += 1 + turns // 8
    release(remote, seq)
    await remote.settle()
    store = remote.hosts["small"].store
    await poll(lambda: not len(store), "all were dropped")
    assert store.nbytes == 0


async def test_without_a_group_the_call_fails_and_can_be_made_again(remote: RemotePool) -> None:
    """What travelled with the call that failed is there all the same."""
    small, large, seq = remote.members["small"], remote.members["large"], sequence()
    tree = await small.propose(seq, ModelChainDrafter(None, Candidates.DRAWN), ROOM, FixedLength())
    generation, remote.exchange._generation = remote.exchange._generation, lambda: None
    verifier = RejectionVerifier()
    with pytest.raises(GroupBroken, match="in no group"):
        await large.verify(seq, tree, verifier)
    remote.exchange._generation = lambda: 2  # the actor is in another one than the message says
    with pytest.raises(GroupBroken, match="another generation"):
        await large.verify(seq, tree, verifier)
    remote.exchange._generation = generation
    verdict = await large.verify(seq, tree, verifier)
    assert verdict.tokens
    release(remote, seq)


async def test_proposals_of_an_ended_life_are_never_used(remote: RemotePool) -> None:
    small, large, seq = remote.members["small"], remote.members["large"], sequence()
    tree = await small.propose(seq, ModelChainDrafter(None, Candidates.DRAWN), ROOM, FixedLength())
    connection = remote.exchange.connections.pop((0, 0))
    with pytest.raises(Interrupted, match="made again"):
        await large.verify(seq, tree, RejectionVerifier())
    remote.exchange.connections[0, 0] = connection
    release(remote, seq)


async def test_what_the_shelf_has_no_more_is_an_interruption(remote: RemotePool) -> None:
    """Planted: an actor loses what it was to keep."""
    small, large, seq = remote.members["small"], remote.members["large"], sequence()
    tree = await small.propose(seq, ModelChainDrafter(None, Candidates.DRAWN), ROOM, FixedLength())
    remote.hosts["small"].store.clear()
    with pytest.raises(Interrupted):
        await large.verify(seq, tree, RejectionVerifier())
    release(remote, seq)


async def test_a_lesson_comes_back_with_the_next_draft(remote: RemotePool) -> None:
    large, seq, pupil = remote.members["large"], sequence(), Pupil()
    for _ in range(3):
        tree = await large.propose(seq, pupil, ROOM, FixedLength())
        verdict = await large.verify(seq, tree, MatchVerifier())
        seq.extend(verdict.tokens, {"large": 1})
        large.observe(seq, pupil, tree, verdict)
    length = len(seq)
    await large.propose(seq, pupil, ROOM, FixedLength())
    assert len(pupil.seen) == 3
    assert pupil.seen[-1] == length
    release(remote, seq)


async def test_a_lesson_with_tensors_of_another_actor_is_over_before_the_next_draft(remote: RemotePool) -> None:
    small, large, seq, pupil = remote.members["small"], remote.members["large"], sequence(), Pupil()
    drawn = await small.propose(seq, ModelChainDrafter(None, Candidates.DRAWN), ROOM, FixedLength())
    verdict = await large.verify(seq, DraftTree.chain([1, 2], "small"), MatchVerifier())
    seq.extend(verdict.tokens, {"large": 1, "small": 1})
    large.observe(seq, pupil, drawn, verdict)
    await large.propose(seq, pupil, ROOM, FixedLength())
    assert pupil.seen == [len(seq)]
    release(remote, seq)


async def test_a_lesson_that_fails_fails_the_next_operation(remote: RemotePool) -> None:
    large, seq, pupil = remote.members["large"], sequence(), Pupil(fails=True)
    tree = await large.propose(seq, pupil, ROOM, FixedLength())
    verdict = await large.verify(seq, tree, MatchVerifier())
    large.observe(seq, pupil, tree, verdict)
    with pytest.raises(RuntimeError, match="headache"):
        await large.decode(seq, StopCondition(max_tokens=1))
    await large.decode(seq, StopCondition(max_tokens=1))
    release(remote, seq)


async def test_what_was_read_never_travels_back(remote: RemotePool) -> None:
    large, seq, pupil = remote.members["large"], sequence(), Pupil()
    want = ReadSpec(draw=None, hidden=frozenset({-1, 0, 1, 2}), logits=True)
    tree = await large.propose(seq, pupil, ROOM, FixedLength())
    verdict = await large.verify(seq, tree, MatchVerifier(), want)
    line = remote.lines["large"]
    before = len(line.posts)
    large.observe(seq, pupil, tree, verdict)
    await poll(lambda: len(line.posts) > before, "the lesson went out")
    assert len(line.posts[-1]) < 300
    release(remote, seq)


@pytest.mark.parametrize("drafter", ["model_chain", "medusa", "copyspec"])
async def test_an_answer_goes_on_when_the_target_begins_anew(
    pools: tuple[LocalPool, RemotePool], remote: RemotePool, drafter: str
) -> None:
    """Its drafters begin as they were born; the text is the same."""
    params = {"drafter": drafter, "length": "fixed", "verifier": "match"}
    expected = await ask(pools[0], [5, 6, 7] * 4, "speculative", params, max_tokens=60, ignore_eos=True)
    going = asyncio.ensure_future(
        ask(remote, [5, 6, 7] * 4, "speculative", params, max_tokens=60, ignore_eos=True)  # type: ignore[arg-type]
    )
    host, supervisor = remote.hosts["large"], remote.supervisors["large"]
    await poll(lambda: any(m.seq.generated for m in host._replicas._replicas.values()), "it writes")
    old = supervisor.connection
    assert old is not None
    # The same process as a new one: it knows nothing.
    old._reader.cancel()
    await old.lost.wait()
    for _, task in list(host._tasks.values()):
        task.cancel()
    await asyncio.gather(*(task for _, task in list(host._tasks.values())), return_exceptions=True)
    host._replicas.clear()
    host._receiver.__init__()  # type: ignore[misc]
    host._out.clear()
    host._held.clear()
    host._next_post = 0
    host.store.clear()
    supervisor.end()
    line = remote.lines["large"] = DirectChannel(host)
    host.store.life = supervisor.restarts
    supervisor.open(line)
    reply = await going
    assert reply.ids == expected.ids


async def test_what_was_learned_of_a_tenant_is_forgotten_beside_the_models_too(
    pools: tuple[LocalPool, RemotePool],
) -> None:
    for pool in pools:

        async def drafts(tenant: str, pool: Any = pool) -> tuple[int, int, int]:
            options = {"tenant": tenant, "max_tokens": 40, "ignore_eos": True, "temperature": 0.0}
            reply = await ask(
                pool, [5, 6, 7], "speculative", {"drafter": "token_recycling", "length": "fixed"}, **options
            )
            meter = reply.usage.speculation
            return meter.rounds, meter.draft_tokens, meter.accepted_tokens

        new, learned = [await drafts("former") for _ in range(2)]
        assert new != learned
        assert await drafts("other") == new
        pool.forget("former")
        assert await drafts("former") == new
        assert await drafts("other") == learned
