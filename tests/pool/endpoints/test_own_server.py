"""A served pool of our own as an endpoint, next to a model that is computed here: the main use."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from uvicorn import Config
from uvicorn import Server as Uvicorn

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica, load_engine
from deployments.service import GenerationService
from pool.local_pool import LocalPool
from tests.deployments.in_process import InProcessBackend
from tests.pool.endpoints.scripted import answer, ask, text_of
from training.router_outcomes import Outcome, Outcomes
from training.router_targets import WhoIsRight
from training.router_training import Recipe, read_prompts, train_probe
from turnout.config import TurnoutConfig, parse_config
from turnout.errors import TurnoutError

QUESTION = "What is 2+3*4?"
GREEDY = {"temperature": 0.0, "max_tokens": 12}


class Own:
    """A demo server, and pools that ask it."""

    def __init__(self, url: str, direct: LocalPool) -> None:
        self.url = url
        self.direct = direct

    def config(self, **pool: Any) -> TurnoutConfig:
        endpoint = {"url": f"{self.url}/v1", "model": "demo-large", "dialect": "vllm"}
        models = {
            "here": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 16 << 20},
            "there": {"endpoint": endpoint, "price": {"output_usd_per_mtok": 1.0}},
        }
        return parse_config({"models": models, "pools": {"p": {"small": "here", "large": "there", **pool}}})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own():
    demo = TurnoutConfig.demo()
    models = {name: model.model_copy(update={"dtype": "float32"}) for name, model in demo.models.items()}
    demo = demo.model_copy(update={"models": models})
    replica = PoolReplica("demo", demo, load_engine)
    service = GenerationService(demo, {"demo": InProcessBackend(replica)}, Metrics())
    server = Uvicorn(Config(build_http(service), host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Own(f"http://127.0.0.1:{port}", replica._pool)
    server.should_exit = True
    with suppress(asyncio.CancelledError):
        await task
    await replica._pool.close()
    service.close()


@pytest_asyncio.fixture(loop_scope="module")
async def mixed(own):
    async with AsyncExitStack() as stack:

        def load(**pool: Any) -> Any:
            made = load_engine("p", own.config(**pool))
            stack.push_async_callback(made.close)
            return made

        yield load


@pytest.mark.asyncio(loop_scope="module")
async def test_a_mixed_pool_writes_what_its_models_write(own, mixed):
    pool = mixed()
    for name, alone in (("here", "demo-small"), ("there", "demo-large")):
        chunks, usage = await answer(pool, ask(QUESTION, model=name, sampling=GREEDY))
        expected, theirs = await answer(own.direct, ask(QUESTION, model=alone, sampling=GREEDY))
        assert text_of(chunks) == text_of(expected)
        assert usage.completion_tokens == theirs.completion_tokens
        assert usage.prompt_tokens == theirs.prompt_tokens
        assert usage.cost.spent.usd == pytest.approx(usage.completion_tokens / 1e6 if name == "there" else 0.0)
    for threshold, source in ((-1000.0, "here"), (1.0, "there")):
        chunks, usage = await answer(
            pool, ask(QUESTION, method="cascade", params={"threshold": threshold, "keep_cut": True}, sampling=GREEDY)
        )
        assert {token.source for chunk in chunks for token in chunk.tokens} == {source}
        assert usage.models["here"].written_tokens > 0
    assert [each.name for each in pool.models()] == ["p", "here", "there"]
    [stats] = pool.stats().endpoints
    assert stats.requests == {"ok": 2}
    with pytest.raises(TurnoutError, match="'there' \\(large\\) is an endpoint"):
        await answer(pool, ask(QUESTION, method="entropy_adaptive"))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_model_here_continues_where_the_endpoint_cannot_be_asked(own, mixed, monkeypatch):
    monkeypatch.setattr(own, "url", "http://127.0.0.1:9")
    pool = mixed(failover={})
    monkeypatch.setattr(pool.models_by_name["there"], "_pause", lambda seconds: asyncio.sleep(0))
    chunks, usage = await answer(pool, ask(QUESTION, sampling=GREEDY))
    expected, _ = await answer(own.direct, ask(QUESTION, model="demo-small", sampling=GREEDY))
    assert text_of(chunks) == text_of(expected)
    assert "here answered in place of there" in usage.notes[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_reads_the_state_of_the_model_that_is_here(own, tmp_path):
    """Long questions are for the endpoint; the answer's first token comes from the forward that the probe read."""
    texts = [f"{n}+1{'+1' * (n % 2 * 9)}=" for n in range(30)]
    outcomes = Outcomes.of([Outcome(text=each, correct_small=len(each) < 9, correct_large=True) for each in texts])

    def loaded(**pool):
        config = own.config(artifacts=str(tmp_path), **pool)
        endpoint = config.models["there"].endpoint.model_copy(update={"num_parameters": 1 << 30})
        there = config.models["there"].model_copy(update={"endpoint": endpoint})
        return load_engine("p", config.model_copy(update={"models": {**config.models, "there": there}}))

    plain = loaded()
    prompts = [row.encode(plain.model_pool.tokenizer) for row in outcomes.rows]
    inputs = await read_prompts(plain.model_pool, prompts, lambda *_: None)
    recipe = Recipe(16, epochs=40, learning_rate=1e-2)
    train_probe(plain.model_pool, outcomes, inputs, WhoIsRight(), recipe).artifact.save(tmp_path / "router.safetensors")
    await plain.close()
    pool = loaded(routing={"policy": {"name": "learned", "params": {"threshold": 0.5}}})
    for text in texts[:2]:
        call = replace(ask(sampling=GREEDY, explain=True), messages=None, prompt=text)
        _, usage = await answer(pool, call)
        assert "entropy_bits" in usage.route["features"]
        assert usage.route["params"]["model"] == ("small" if len(text) < 9 else "large")
        assert ("there" in usage.models) == (len(text) >= 9)
    await pool.close()
