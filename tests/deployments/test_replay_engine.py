"""The real engine in two replicas, one of which is killed: every method's answer is that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.pool_deployment import load_engine
from pool.text import TextTokenizer
from tests.demo_pair.conftest import assert_same_ids
from tests.deployments.served_pool import Got, ServedPool, kill, pid_of, read_one, served_pool, until
from turnout.calls import GenerateCall
from turnout.config import model_path, parse_config
from turnout.types import SamplingParams

PROMPT = "Question: what is 3 + 4?\nAnswer:"
METHODS: list[tuple[str | None, dict[str, Any]]] = [
    ("plain", {"model": "large"}),
    ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 3}),
    ("speculative", {"verifier": "rejection"}),
    ("entropy_adaptive", {"threshold": 0.3, "window": 2, "min_stay": 3}),
    ("random_switch", {"share": 0.5, "mean_run": 6.0, "min_stay": 2}),
    (None, {}),  # routed
]
ARMS = {
    "large": {"share": 0.5, "method": {"name": "plain", "params": {"model": "large"}}},
    "both": {"share": 0.5, "method": {"name": "entropy_adaptive", "params": {"threshold": 0.3}}},
}


@pytest.fixture(scope="module")
def pool(cluster: object) -> Iterator[ServedPool]:
    config = parse_config(
        {
            "models": {
                "small": {"path": "demo:small", "dtype": "float32", "kv_memory_bytes": 16 << 20},
                "large": {"path": "demo:large", "dtype": "float32", "kv_memory_bytes": 64 << 20},
            },
            "pools": {
                "p": {
                    "small": "small",
                    "large": "large",
                    "replicas": 2,
                    "routing": {"policy": {"name": "split", "params": {"arms": ARMS}}},
                }
            },
            "engine": {"threads": 1},
            "server": {"shutdown_grace_s": 1},
        }
    )
    with served_pool("engine", config, load_engine, routed=True) as served:
        asyncio.run(served.wait_for_replicas(2))
        yield served


def asked(place: int) -> GenerateCall:
    method, params = METHODS[place]
    sampling = SamplingParams(max_tokens=200, seed=place + 1, temperature=0.8, ignore_eos=True)
    return GenerateCall(
        f"r{place}", "p", sampling, prompt=f"{PROMPT} {place}", method=method, params=params, deadline_s=200.0
    )


async def test_tokens_are_those_of_an_undisturbed_run(pool: ServedPool) -> None:
    undisturbed = [await read_one(pool.backend, asked(place)) for place in range(len(METHODS))]
    seen = [0] * len(METHODS)

    async def ask(place: int) -> Got:
        async def after(got: Got) -> None:
            seen[place] = len(got.tokens)

        return await read_one(pool.backend, asked(place), after)

    tasks = [asyncio.create_task(ask(place)) for place in range(len(METHODS))]

    async def all_write() -> bool:
        return min(seen) >= 4

    await until(all_write, "every call has tokens")
    busiest = max(await pool.stats(), key=lambda each: each.requests)
    assert busiest.requests
    kill(pid_of(busiest.place))
    answers = await asyncio.gather(*tasks)
    tokenizer = TextTokenizer(model_path(pool.config.models["large"]))
    went_on = 0
    for place, (before, got) in enumerate(zip(undisturbed, answers, strict=True)):
        assert got.usage is not None
        assert before.usage is not None
        went_on += any("lost once" in note for note in got.usage.notes)
        assert got.reasons == before.reasons == ["length"]
        assert got.usage.completion_tokens == len(got.ids) == 200
        assert got.usage.method == before.usage.method
        roles = [token.source for token in before.tokens]
        prompt = tokenizer.encode(f"{PROMPT} {place}")
        assert_same_ids(prompt, before.ids, got.ids, roles.__getitem__, asked(place).sampling)
        if got.ids == before.ids:
            assert got.text == before.text
            assert [token.source for token in got.tokens] == roles
    assert went_on >= 1
