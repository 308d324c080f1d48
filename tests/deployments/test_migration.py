"""Running calls from one replica to another: caches lie in a store meanwhile, and clients notice nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
from ray import serve

from deployments.app import RunningServer
from deployments.build_info import this_program
from deployments.migration import NAMESPACE, BoundedStore, Handoff, HandoffHandle, HandoffStore
from deployments.pool_deployment import ServedPool, load_engine
from deployments.remote import RemoteBackend
from deployments.version_check import Origin
from tests.deployments.conftest import poll
from tests.engine.harness import call_of, pair_config
from tests.pool.resuming import Client
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.calls import GenerateCall
from turnout.config import TurnoutConfig
from turnout.errors import Interrupted
from turnout.moved_calls import Moved, MovedCache

PROMPT = [*b"ab ab. ab ab, ab 7.5 ab ab"] * 4
START_S = 180.0  # for processes that load torch, on a busy machine
ANSWER = {"temperature": 0.9, "seed": 5, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TurnoutConfig:
    """A pool over random weights that every process loads anew."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("small", "large")):
        random_model(llama_config(), seed, 0.2).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    made = pair_config(folder, block_size=8, token_budget=48)
    engine = made.engine.model_copy(update={"threads": 1})
    return made.model_copy(update={"engine": engine})


def test_a_shelf_keeps_bytes_for_a_time_and_up_to_a_number() -> None:
    shelf = BoundedStore(most_bytes=10, kept_s=5.0)
    assert shelf.put("a", "A", 6, now=0.0)
    assert not shelf.put("b", "B", 5, now=1.0)
    assert shelf.put("c", "C", 4, now=2.0)
    assert shelf.nbytes == 10
    assert shelf.take("a", now=3.0) == "A"
    assert shelf.take("a", now=3.0) is None
    assert shelf.take("c", now=7.5) is None
    assert shelf.put("b", "B", 10, now=8.0)
    assert shelf.nbytes == 10


class Replica:
    """A replica's part in a move, as an actor that tests can end."""

    def __init__(self, config: TurnoutConfig) -> None:
        self._pool: Any = load_engine("pair", config)
        self._handoff = Handoff(self._pool, START_S)

    async def ready(self) -> str:
        """The name of its store."""
        await self._handoff.hand_over("nobody")
        return self._handoff._name

    async def answer(self, call: GenerateCall, client: Client, leave_after: int | None = None) -> tuple[Client, Any]:
        """The client with what came, and what the call ended with; hands it over after so many chunks."""
        chunks = 0
        try:
            async for event in self._pool.generate(await self._handoff.incoming(call)):
                client.take(event)
                chunks += 1
                if chunks == leave_after:
                    assert await self._handoff.hand_over(call.request_id) == 1
        except Interrupted as error:
            return client, await self._handoff.outgoing(error)
        return client, None


@pytest.mark.cluster
async def test_a_cache_outlives_its_replica_and_a_lost_one_is_computed(
    server: RunningServer, config: TurnoutConfig
) -> None:
    """From a replica in a process of its own, which is killed, to one in this process."""
    first = ray.remote(Replica).options(num_cpus=0).remote(config)
    second = Replica(config)
    depots = await asyncio.wait_for(asyncio.gather(first.ready.remote(), second.ready()), START_S)
    call = call_of(PROMPT, "plain", **ANSWER)
    whole, _ = await second.answer(call, Client.of(call))
    moves = []
    for _ in range(2):
        client, left = await first.answer.remote(call, Client.of(call), 4)
        assert isinstance(left, Interrupted)
        assert left.moved is not None
        assert 0 < len(client.ids[0]) < 300
        assert all(isinstance(cache.kv, HandoffHandle) for cache in left.moved.caches)
        assert sum(cache.nbytes for cache in left.moved.caches) > len(PROMPT) * 100
        moves.append((client, left.moved))
    ray.kill(first)
    (here, kept), (there, lost) = moves
    begun = len(PROMPT) + len(here.ids[0])
    count = min(len(kept.caches[0].ids), begun - 1) // 8 * 8  # full blocks; the last token is always computed
    done, left = await second.answer(replace(here.rest_of(call), moved=kept), here)
    assert (left, done.ids, done.texts) == (None, whole.ids, whole.texts)
    assert f"moved here with the cache of {count} tokens" in done.usage.notes
    ray.kill(ray.get_actor(lost.caches[0].kv.store, NAMESPACE))
    done, left = await second.answer(replace(there.rest_of(call), moved=lost), there)
    assert (left, done.ids, done.texts) == (None, whole.ids, whole.texts)
    assert "moved here with the cache of 0 tokens" in done.usage.notes
    ray.kill(ray.get_actor(depots[1], NAMESPACE))
    replaced = await asyncio.wait_for(second.ready(), START_S)
    assert replaced != depots[1]
    assert _runs(replaced)
    await second._pool.close()


def test_a_depot_gives_back_what_it_got_once_and_ends_by_itself(server: RunningServer) -> None:
    name, brief = "store-of-a-test", "store-of-a-moment"
    options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    store = ray.remote(HandoffStore).options(name=name, **options).remote(1 << 20, 60.0)
    ray.remote(HandoffStore).options(name=brief, **options).remote(1 << 20, 0.2)
    ray.get(store.ready.remote(), timeout=START_S)

    async def there_and_back(kv: torch.Tensor) -> tuple[MovedCache, MovedCache | None, MovedCache | None]:
        mover = Handoff(None)
        mover._store, mover._name = store, name
        cache = MovedCache(0, "large", "d", 0, tuple(range(kv.shape[1])), kv.nbytes, kv)
        left = await mover.outgoing(Interrupted("moved", Moved((cache,))))
        assert isinstance(left, Interrupted)
        call = replace(call_of(PROMPT, "plain"), moved=left.moved)
        once, again = await mover.incoming(call), await mover.incoming(call)
        return cache, _only(once), _only(again)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kv = torch.randn(2, 9, 2, 3, 4).to(dtype)[:, 2:7]
        sent, came, again = asyncio.run(there_and_back(kv))
        assert came is not None
        assert came.kv.dtype == dtype
        assert torch.equal(came.kv, kv)
        assert came == replace(sent, kv=came.kv)
        assert again is None
    _, refused, _ = asyncio.run(there_and_back(torch.zeros(2, 90_000, 2, 1, 1)))
    assert refused is None
    ray.kill(store)
    poll(lambda: not _runs(brief), "the store has ended", 60.0)


def _only(call: GenerateCall) -> MovedCache | None:
    assert call.moved is not None
    return call.moved.caches[0] if call.moved.caches else None


def _runs(name: str) -> bool:
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


@asynccontextmanager
async def served(config: TurnoutConfig) -> AsyncIterator[tuple[RemoteBackend, Any]]:
    """Two replicas behind Serve, and what asks all of them."""
    deployment = serve.deployment(
        ServedPool, name="pool-pair", num_replicas=2, max_ongoing_requests=32, ray_actor_options={"num_cpus": 0}
    )
    app = deployment.bind("pair", config, load_engine, Origin("of this test", this_program()))
    handle = await asyncio.to_thread(serve.run, app, name="moving", route_prefix=None)
    try:
        yield RemoteBackend("pair", handle), handle
    finally:
        await asyncio.to_thread(serve.delete, "moving")


@pytest.mark.cluster
async def test_streams_move_between_served_replicas(server: RunningServer, config: TurnoutConfig) -> None:
    async with served(config) as (backend, handle):

        async def hand_over(*arguments: Any) -> int:
            return sum(await handle.broadcast("hand_over", *arguments).results_async(timeout_s=60))

        async def stream(call: GenerateCall, moves: int) -> Client:
            client = Client.of(call)
            async for batch in backend.stream(call):
                for event in batch:
                    client.take(event)
                if moves:
                    moves -= await hand_over(call.request_id)
            return client

        await hand_over("nobody")  # from now on both have a store
        calls = [
            call_of(PROMPT, "plain", **ANSWER),
            call_of(PROMPT, "speculative", {"length": "fixed", "draft_length": 3}, **ANSWER),
            call_of(PROMPT, "plain", n=2, **ANSWER),
        ]
        for call in calls:
            whole = await stream(call, moves=0)
            moved = await stream(call, moves=2)
            assert moved.ids == whole.ids
            assert moved.texts == whole.texts
            assert moved.usage is not None
            assert moved.usage.completion_tokens == 300 * call.sampling.n
            assert any(note.startswith("moved here with the cache of ") for note in moved.usage.notes)
            generated = sum(meter.generated_tokens for meter in moved.usage.models.values())
            assert generated == 300 * call.sampling.n
