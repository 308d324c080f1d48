"""Prefill actors behind the wire: the answers of one process, with KV that went from actor to actor."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from actors.connection import ConnectionGroup, RayChannel
from actors.disaggregated_prefill import DisaggregatedModel
from actors.group import join
from actors.model_actor import ModelActor
from actors.model_worker import ModelWorker
from actors.remote import RemoteModel
from decoding.sequence import Sequence
from pool.local_pool import LocalPool
from tests.actors.hosts import DirectChannel, OneIncarnation, RemotePool, fix_times, open_local, poll, spec_of
from tests.engine.harness import Reply, ask
from turnout.config import TurnoutConfig
from turnout.types import SamplingParams

pytestmark = pytest.mark.usefixtures("waits_for_kv")

LEAST = 24
PROMPT = [7 * i % 250 for i in range(1, 90)]
OTHER = [11 * i % 250 for i in range(1, 90)]
METHODS: list[tuple[str, dict[str, Any], float]] = [
    ("plain", {}, 0.0),
    ("plain", {}, 1.0),
    ("speculative", {"verifier": "rejection"}, 1.0),
    ("entropy_adaptive", {"threshold": 1.0}, 0.0),
    ("best_of", {}, 1.0),
]


@pytest.fixture
async def alone(actors_config: TurnoutConfig) -> AsyncIterator[LocalPool]:
    """The pool in one piece, to compare with."""
    pool = open_local(actors_config)
    yield pool
    await pool.close()


@pytest.fixture
async def split(own_remote: RemotePool, actors_config: TurnoutConfig) -> AsyncIterator[RemotePool]:
    """The pool in this process, its large model with one more copy that prefills."""
    host = ModelWorker(spec_of("large", actors_config, owner=2))
    card = host.load()
    card = host.begin(card.vocab_size)
    fix_times(host.model)
    host.transport = host._endpoint._transport = type(own_remote.hosts["large"].transport)(own_remote.board, 2)  # type: ignore
    supervisor = OneIncarnation(card, own_remote.exchange, 2)
    supervisor.open(DirectChannel(host))
    large = DisaggregatedModel(own_remote.members["large"], (RemoteModel("large", supervisor),), LEAST)  # type: ignore[arg-type]
    own_remote.members = {**own_remote.members, "large": large}
    own_remote.model_pool.models["large"] = large
    own_remote.hosts["prefill"] = host
    own_remote.supervisors["prefill"] = supervisor
    yield own_remote
    await poll(lambda: len(host.store) == 0, "the prefill actor's store is empty")
    await own_remote.settle()


def told(reply: Reply) -> list[list[tuple[int, str, str]]]:
    """Tokens and who wrote them; numbers read beside them depend on how a prompt was cut."""
    return [[(token.id, token.source, str(token.kind)) for token in answer] for answer in reply.answers]


@pytest.mark.parametrize(("method", "params", "temperature"), METHODS, ids=str)
async def test_answers_are_those_of_one_process(
    split: RemotePool, alone: LocalPool, method: str, params: dict[str, Any], temperature: float
) -> None:
    options = {"temperature": temperature, "max_tokens": 24}
    there = await ask(split, PROMPT, method, params, **options)  # type: ignore[arg-type]
    here = await ask(alone, PROMPT, method, params, **options)
    assert told(there) == told(here)
    assert there.reasons == here.reasons
    mover = split.members["large"].mover
    assert mover.moved == 1
    assert mover.failed == 0
    assert split.hosts["large"].model.stats().used_blocks == 0


async def test_kv_does_not_pass_through_the_coordinator(split: RemotePool) -> None:
    seq = Sequence(PROMPT, SamplingParams(max_tokens=1, temperature=0.0), 1)
    await split.members["large"].decode(seq)
    heard = [each.connection.bytes_heard for each in split.supervisors.values() if each.connection is not None]
    assert split.board.num_sent == 1
    assert sum(heard) < 20_000  # signs of life included; the KV of this prompt is several times as much
    split.members["large"].release(seq)


async def test_a_shelf_that_lost_the_kv_does_no_harm(split: RemotePool, alone: LocalPool) -> None:
    """Planted: the prefill actor drops what it was told to keep."""
    store = split.hosts["prefill"].store
    put = store.put

    def careless(tensor: Any) -> int:
        number = put(tensor)
        store.drop([number])
        return number

    store.put = careless  # type: ignore[method-assign]
    there = await ask(split, PROMPT)  # type: ignore[arg-type]
    assert told(there) == told(await ask(alone, PROMPT))
    assert split.members["large"].mover.failed == 1


@asynccontextmanager
async def three_actors(config: TurnoutConfig) -> AsyncIterator[tuple[DisaggregatedModel, list[Any], list[int]]]:
    """The large model in three Ray actors, the last two of which prefill."""
    import ray

    actors = [ray.remote(num_cpus=0)(ModelActor).remote() for _ in range(3)]
    try:
        cards = await asyncio.gather(
            *(a.load.remote(replace(spec_of("large", config, owner), threads=1)) for owner, a in enumerate(actors))
        )
        cards = await asyncio.gather(*(a.begin.remote(cards[0].vocab_size) for a in actors))
        await join(actors, ["decode", "prefill 1", "prefill 2"], 1, 30.0)
        exchange = ConnectionGroup(lambda: 1)
        lives = [OneIncarnation(card, exchange, owner) for owner, card in enumerate(cards)]
        for life, actor in zip(lives, actors, strict=True):
            life.open(RayChannel(actor))
        models = [RemoteModel("large", life) for life in lives]
        yield DisaggregatedModel(models[0], models[1:], LEAST), actors, [card.pid for card in cards]  # type: ignore
        for life in lives:
            await life.close()
    finally:
        for actor in actors:
            ray.kill(actor)


@pytest.mark.usefixtures("ray_cluster")
async def test_prompts_go_between_real_actors_and_one_that_is_killed_is_done_without(
    actors_config: TurnoutConfig, alone: LocalPool
) -> None:
    async def decoded(model: Any, prompt: list[int]) -> list[int]:
        seq = Sequence(prompt, SamplingParams(temperature=1.0, max_tokens=16), 5)
        await model.decode(seq)
        model.release(seq)
        return seq.tokens

    async with three_actors(actors_config) as (model, _, pids):
        connections = [each.supervisor.connection for each in (model.inner, *model.prefills)]
        assert await decoded(model, PROMPT) == await decoded(alone.engines["large"], PROMPT)
        assert (model.mover.moved, model.mover.failed) == (1, 0)
        os.kill(pids[1], signal.SIGSTOP)  # it holds the next prompt and never answers
        seq = asyncio.ensure_future(decoded(model, OTHER))
        await poll(lambda: model.mover._given[0] > 0, "the prompt is with the one that stands still")
        begun = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        assert await asyncio.wait_for(seq, 60) == await decoded(alone.engines["large"], OTHER)
        assert time.monotonic() - begun < 30.0
        assert (model.mover.moved, model.mover.failed) == (1, 1)
        model.prefills[0].supervisor.end()  # its supervisor would do so
        assert await decoded(model, OTHER[::-1]) == await decoded(alone.engines["large"], OTHER[::-1])
        await poll(lambda: all(m.load.stored == 0 for m in (connections[0], connections[2])), "stores are empty")
