"""The real engine with the demo models, through Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.app import RunningServer
from pool.local_pool import LocalPool
from tests.demo_pair.conftest import assert_same_ids
from tests.deployments.conftest import assert_freed, served_config, stats
from turnout.calls import Chunk, GenerateCall
from turnout.client import AsyncClient, Client
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

PROMPT = "Question: what is 3 + 4?\nAnswer:"


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.grpc_address) as opened:
        yield opened


def test_a_stream_is_the_whole_answer_in_parts(client: Client) -> None:
    options: dict[str, Any] = {"model": "real", "max_tokens": 24, "seed": 5, "ignore_eos": True}
    whole = client.generate(PROMPT, **options)
    with client.stream(PROMPT, **options) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token.id for chunk in chunks for token in chunk.tokens] == [token.id for token in whole.tokens]
    assert {token.source for token in whole.tokens} <= {"real-small", "real-large"}
    assert whole.usage.method == "entropy_adaptive"
    assert whole.usage.completion_tokens == len(whole.tokens) == 24
    assert stream.usage is not None
    assert stream.usage.seed == whole.usage.seed == 5


BRIEFLY: dict[str, dict[str, Any]] = {"cold": {"steps": 2, "chains": 1, "length": 4}}  # it takes minutes by default


def test_each_method_and_member_answers(client: Client) -> None:
    options: dict[str, Any] = {"model": "real", "max_tokens": 4, "ignore_eos": True}
    for method in client.methods():
        result = client.generate(PROMPT, method=method.name, params=BRIEFLY.get(method.name, {}), **options)
        assert result.usage.method == method.name
    alone = client.generate(PROMPT, model="real-small", max_tokens=4, ignore_eos=True)
    assert {token.source for token in alone.tokens} == {"real-small"}


def test_scores_equal_the_log_probabilities_of_generation(client: Client) -> None:
    written = client.generate(PROMPT, model="real-large", max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
    ids = [token.id for token in written.tokens]
    [scored] = client.score(PROMPT, [ids], model="real-large")
    assert [token.id for token in scored.tokens] == ids
    assert [t.logprob for t in scored.tokens] == pytest.approx([t.logprob for t in written.tokens], abs=1e-3)


# (method, parameters, sampling) of sixteen requests that share batches: mixed methods, lengths and temperatures.
MIXED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (method, params, {"seed": place, "temperature": 0.4 + place / 20, "max_tokens": 12 + 3 * place})
    for place, (method, params) in enumerate(
        [
            ("plain", {"model": "large"}),
            ("plain", {"model": "small"}),
            ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 3}),
            ("speculative", {"verifier": "rejection"}),
            ("entropy_adaptive", {"threshold": 0.3, "window": 2, "min_stay": 3}),
            ("entropy_adaptive", {"threshold": 0.3, "window": 1, "min_stay": 2, "effect": "current"}),
            ("sentence_lead", {"lead_tokens": 3}),
            ("random_switch", {"share": 0.5, "mean_run": 6.0, "min_stay": 2}),
        ]
        * 2
    )
]


async def test_a_seed_gives_the_same_tokens_alone_in_a_mixed_batch_and_in_process(server: RunningServer) -> None:
    def ask(client: AsyncClient, place: int) -> Any:
        method, params, sampling = MIXED[place]
        prompt = f"{PROMPT} {place}"
        return client.generate(prompt, model="real", method=method, params=params, ignore_eos=True, **sampling)

    async with AsyncClient(server.grpc_address) as client:
        alone = [[t.id for t in (await ask(client, place)).tokens] for place in range(len(MIXED))]
        together = await asyncio.gather(*(ask(client, place) for place in range(len(MIXED))))
    local = LocalPool.load("real", served_config())
    try:
        for place, (method, params, sampling) in enumerate(MIXED):
            if params.get("verifier") == "match":
                method, params = "plain", {"model": "large"}  # speculation must not be seen in the tokens
            chosen = SamplingParams(ignore_eos=True, **sampling)
            call = GenerateCall("t", "real", chosen, prompt=f"{PROMPT} {place}", method=method, params=params)
            chunks = [event async for event in local.generate(call) if isinstance(event, Chunk)]
            expected = [token for chunk in chunks for token in chunk.tokens]
            ids = [token.id for token in expected]
            for got in (alone[place], [token.id for token in together[place].tokens]):
                if params.get("verifier") == "rejection":
                    assert got == ids  # no one score decides its tokens, so no tie is excused
                else:
                    roles = [token.source.removeprefix("real-") for token in expected]
                    assert_same_ids(local.tokenizer.encode(f"{PROMPT} {place}"), ids, got, roles.__getitem__, chosen)
    finally:
        await local.close()


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"prompt": (10**6,)}, Code.OUT_OF_RANGE, "prompt_ids"),
        ({"prompt": (-1,)}, Code.OUT_OF_RANGE, "prompt_ids"),
        ({"prompt": "word " * 5000}, Code.OUT_OF_RANGE, "prompt"),
        ({"prompt": "x", "method": "nope"}, Code.NOT_FOUND, "method"),
        ({"prompt": "x", "params": {"nope": 1}}, Code.INVALID_ARGUMENT, "params.nope"),
        ({"prompt": "x", "stop_token_ids": [10**6]}, Code.OUT_OF_RANGE, "sampling.stop_token_ids"),
        ({"prompt": "x", "logit_bias": {10**6: 1.0}}, Code.OUT_OF_RANGE, "sampling.logit_bias"),
    ],
)
def test_what_only_the_model_can_refuse(client: Client, options: dict[str, Any], code: Code, field: str) -> None:
    for attempt in (
        lambda: client.generate(model="real", **options),
        lambda: next(client.stream(model="real", **options)),
    ):
        with pytest.raises(TurnoutError) as refusal:
            attempt()
        assert (refusal.value.code, refusal.value.field) == (code, field)


def test_leaving_streams_leaves_no_block_behind(client: Client, server: RunningServer) -> None:
    streams = [client.stream(f"{PROMPT} {i}", model="real", max_tokens=1000, ignore_eos=True) for i in range(4)]
    for stream in streams:
        next(stream)
    assert stats(server, "real").requests > 0
    for stream in streams:
        stream.close()
    assert_freed(server, "real")
    assert stats(server, "real").sequences == 0
    assert client.generate(PROMPT, model="real", max_tokens=2).usage.completion_tokens > 0
