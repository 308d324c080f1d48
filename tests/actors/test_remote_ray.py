"""Models in real actors: two processes beside this one, tensors between them, and what a hop costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import ray

from actors.connection import ActorConnection, ConnectionGroup, RayChannel
from actors.model_actor import ModelActor
from actors.remote import RemoteModel
from pool.local_pool import LocalPool
from tests.actors.hosts import OneIncarnation, RemotePool, open_local, poll, spec_of
from tests.actors.test_remote_methods import OTHERS, SAMPLED, assert_said, replies, told
from tests.constrained import random_schema
from tests.engine.harness import ask_all, call_of, random_prompts
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

CASES: list[Any] = [
    ("plain", {}),
    ("speculative", {"length": "fixed"}),
    ("speculative", {"length": "fixed", "verifier": "rejection"}),
    ("speculative", {"drafter": "medusa", "length": "fixed"}),
    ("speculative", {"drafter": "lookahead", "length": "fixed"}),
    OTHERS[2],
    ("best_of", {}),
    ("pearl", {"draft_length": 3, "verifier": "rejection"}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools(actors_config: TurnoutConfig, ray_cluster: None) -> AsyncIterator[tuple[LocalPool, RemotePool]]:
    names = ["small", "large"]
    actor = ray.remote(ModelActor)
    handles = {name: actor.options(num_cpus=0).remote() for name in names}
    places = await asyncio.gather(*(handle.place.remote() for handle in handles.values()))
    cards = await asyncio.gather(
        *(handles[name].load.remote(spec_of(name, actors_config, owner)) for owner, name in enumerate(names))
    )
    assert [card.pid for card in cards] == [pid for _, _, pid in places]
    vocab_size = min(card.vocab_size for card in cards)
    cards = await asyncio.gather(*(handle.begin.remote(vocab_size) for handle in handles.values()))
    address, port = await handles["small"].listen.remote()
    joins = [handle.join.remote(1, rank, 2, address, port, 30.0) for rank, handle in enumerate(handles.values())]
    await asyncio.gather(*joins)
    exchange = ConnectionGroup(lambda: 1)
    supervisors = {
        name: OneIncarnation(card, exchange, owner) for owner, (name, card) in enumerate(zip(names, cards, strict=True))
    }
    for name, supervisor in supervisors.items():
        supervisor.open(RayChannel(handles[name]))  # type: ignore[arg-type]
    remote = RemotePool("pair", actors_config, {name: RemoteModel(name, supervisors[name]) for name in names})
    remote.exchange, remote.supervisors, remote.hosts, remote.lines = exchange, supervisors, {}, {}
    local = open_local(actors_config)
    yield local, remote
    await remote.close()
    await asyncio.gather(*(handle.stop.remote() for handle in handles.values()))
    for handle in handles.values():
        ray.kill(handle)
    await local.close()


def connection_of(pool: RemotePool, name: str) -> ActorConnection:
    connection = pool.supervisors[name].connection
    assert connection is not None
    return connection


async def assert_idle(pool: RemotePool) -> None:
    """The actors tell that nothing is left."""
    for name in pool.supervisors:
        connection = connection_of(pool, name)
        assert connection.num_sequences == 0

        def idle(connection: ActorConnection = connection) -> bool:
            load = connection.load
            assert load is not None
            return load.stats.used_blocks == load.stats.sequences == load.stored == load.in_flight == 0

        await poll(idle, f"{name} is idle")


@pytest.mark.parametrize(("method", "params"), CASES)
async def test_a_method_does_the_same_in_actors(
    pools: tuple[LocalPool, RemotePool], method: str, params: dict[str, Any]
) -> None:
    expected, got = [await replies(pool, (method, params)) for pool in pools]
    assert [told(each) for each in got] == [told(each) for each in expected]
    await assert_idle(pools[1])


@pytest.mark.smoke
async def test_many_at_once(pools: tuple[LocalPool, RemotePool]) -> None:
    calls = [
        call_of(prompt, method, params, max_tokens=24, seed=seed, **(SAMPLED if seed % 2 else {}))
        for seed, prompt in enumerate(random_prompts(3, 30, seed=9))
        for method, params in CASES
    ]
    expected, got = [await ask_all(pool, calls) for pool in pools]  # type: ignore[arg-type]
    assert_said(got, expected)
    await assert_idle(pools[1])


async def test_structures_hold_in_actors(pools: tuple[LocalPool, RemotePool]) -> None:
    """What a schema asks for is compiled in each process anew."""
    draw = random.Random(7)
    calls = [
        call_of(
            "x:",
            *CASES[place % 2],
            max_tokens=60,
            temperature=0.9,
            seed=place,
            n=1 + place % 3 // 2,
            structure=Structure.model_validate({"json_schema": random_schema(draw)}),
        )
        for place in range(20)
    ]
    expected, got = [await ask_all(pool, calls) for pool in pools]  # type: ignore[arg-type]
    assert [(reply.texts, reply.reasons) for reply in got] == [(reply.texts, reply.reasons) for reply in expected]
    assert sum(reason is FinishReason.STOP for reply in got for reason in reply.reasons) >= 10
    await assert_idle(pools[1])


async def test_the_actors_are_told_of(pools: tuple[LocalPool, RemotePool]) -> None:
    local, remote = pools
    for mine, theirs in zip(local.stats().members, remote.stats().members, strict=True):
        assert (mine.model, mine.total_blocks) == (theirs.model, theirs.total_blocks)
        assert "pid" in theirs.place
    assert [each.architecture for each in remote.models()] == [each.architecture for each in local.models()]
    assert remote.max_length == local.max_length
    assert remote.members["large"].digest == local.members["large"].digest
    assert remote.members["large"].forward_seconds(1, 100, 1) > 0.0


async def test_an_error_there_names_what_is_wrong(pools: tuple[LocalPool, RemotePool]) -> None:
    _, remote = pools
    from decoding.sequence import Sequence
    from turnout.types import SamplingParams

    model, seq = remote.members["large"], Sequence([1, 2], SamplingParams(), 0)
    with pytest.raises(TurnoutError, match="does not fit the KV cache of large"):
        await model.extend(seq, tuple([1] * 200_000))
    model.release(seq)


async def test_death_leaves_calls_open(actors_config: TurnoutConfig, ray_cluster: None) -> None:
    """A process that is killed: the connection is lost at once, and its calls wait for another life."""
    import os
    import signal

    from decoding.sequence import Sequence
    from turnout.types import SamplingParams

    handle = ray.remote(ModelActor).options(num_cpus=0).remote()
    card = await handle.load.remote(spec_of("small", actors_config, 0))
    card = await handle.begin.remote(card.vocab_size)
    supervisor = OneIncarnation(card, ConnectionGroup(), 0)
    connection = supervisor.open(RayChannel(handle))  # type: ignore[arg-type]
    model = RemoteModel("small", supervisor)
    seq = Sequence([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True), 0)
    going = asyncio.ensure_future(model.decode(seq))
    await poll(lambda: connection.load is not None, "it lives", 30.0)
    os.kill(card.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        await connection.lost.wait()
    assert connection.reason is not None
    assert not going.done()
    assert len(connection.in_flight) == 1
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    assert len(seq) == 3
