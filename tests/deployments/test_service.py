from __future__ import annotations

import math
from contextlib import aclosing
from typing import Any

import pytest

import deployments.service
from deployments.backend import Batch
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.reading import MAX_COMPLETIONS
from deployments.request_fields import parse_sampling
from deployments.service import GenerationService
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import InProcessBackend, make_service
from turnout.calls import ChatMessage, Chunk, GenerateCall, ScoreCall, Usage
from turnout.config import parse_config
from turnout.errors import Code, TurnoutError
from turnout.message_size import units
from turnout.types import SamplingParams


def call(prompt: Any = "hello", **changes: Any) -> GenerateCall:
    values: dict[str, Any] = {"request_id": "r1", "model": "demo", "sampling": SamplingParams(max_tokens=6)}
    return GenerateCall(prompt=prompt, **{**values, **changes})


async def test_an_answer_is_the_streams_chunks_joined() -> None:
    service = make_service()
    answer = await service.generate(call())
    streamed = [batch async for batch in service.stream(call())]
    assert answer.choices[0].text == "abcdef"
    assert "".join(chunk.text for batch in streamed for chunk in batch if not isinstance(chunk, Usage)) == "abcdef"
    assert isinstance(streamed[-1][-1], Usage)


async def test_the_first_token_does_not_wait_for_the_second() -> None:
    async with aclosing(make_service().stream(call("slow"))) as batches:
        first = await anext(batches)
    assert [chunk.text for chunk in first] == ["a"]


async def test_choices_come_back_in_order() -> None:
    answer = await make_service().generate(call(sampling=SamplingParams(max_tokens=3, n=3)))
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "abc"), (1, "abc"), (2, "abc")]


async def test_an_answer_that_may_be_too_much_for_one_message_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    most = units(4 * 20, 5) - 1
    asked = []

    async def complete(self: InProcessBackend, call: GenerateCall) -> Batch:
        asked.append(call.sampling.n)
        answer = await complete_all(self, call)
        if sum(units(len(chunk.tokens), 5) for chunk in answer if isinstance(chunk, Chunk)) > most:
            raise RuntimeError("a message of more than 64 MiB")  # as gRPC says between replicas, when all is done
        return answer

    complete_all = InProcessBackend.complete
    monkeypatch.setattr(InProcessBackend, "complete", complete)
    monkeypatch.setattr(deployments.service, "MOST_UNITS", most)
    service = make_service()
    for n in (3, 4):
        answer = await service.generate(call("fast", sampling=SamplingParams(max_tokens=20, n=n, logprobs=5)))
        assert [len(choice.tokens) for choice in answer.choices] == [20] * n
    assert asked == [3], "small ones come at once"


async def test_only_so_many_completions_are_scored_at_once() -> None:
    service = make_service()
    assert len(await service.score(ScoreCall("r", "demo", "a", ("b",) * MAX_COMPLETIONS))) == MAX_COMPLETIONS
    with pytest.raises(TurnoutError, match=f"completions: at most {MAX_COMPLETIONS} at once") as refused:
        await service.score(ScoreCall("r", "demo", "a", ("b",) * (MAX_COMPLETIONS + 1)))
    assert refused.value.code is Code.INVALID_ARGUMENT


async def test_a_model_of_any_role_is_listed_and_answers() -> None:
    config = parse_config(
        {
            "models": {name: {"path": "none"} for name in ("small", "large", "judge")},
            "pools": {"demo": {"small": "small", "large": "large", "models": {"judge": "judge"}}},
        }
    )
    backend = InProcessBackend(PoolReplica("demo", config, load_fake_pool))
    service = GenerationService(config, {"demo": backend}, Metrics())
    listed = await service.models_for(service.callers.of(None))
    assert [model.name for model in listed] == ["demo", "small", "large", "judge"]
    assert (await service.generate(call(model="judge"))).usage.completion_tokens == 6


async def test_an_empty_model_means_the_only_pool() -> None:
    assert (await make_service().generate(call(model=""))).usage.completion_tokens == 6


REFUSED = [
    ({"model": "nope"}, Code.NOT_FOUND, "model", "demo, large, small"),
    ({"prompt": ""}, Code.INVALID_ARGUMENT, "prompt", "empty"),
    ({"prompt": ()}, Code.INVALID_ARGUMENT, "prompt", "empty"),
    ({"prompt": None}, Code.INVALID_ARGUMENT, "prompt", "needed"),
    ({"prompt": None, "messages": ()}, Code.INVALID_ARGUMENT, "messages", "empty"),
    (
        {"prompt": None, "messages": (ChatMessage("user", "a"), ChatMessage("robot", "b"))},
        Code.INVALID_ARGUMENT,
        "messages.1.role",
        "system, user, assistant",
    ),
    ({"prompt": (1, 300)}, Code.OUT_OF_RANGE, "prompt", "0 to 255"),
    ({"prompt": (-1,)}, Code.OUT_OF_RANGE, "prompt", "0 to 255"),
    ({"prompt": "x" * 5000}, Code.OUT_OF_RANGE, "prompt", "4096"),
    ({"method": "nope"}, Code.NOT_FOUND, "method", "entropy_adaptive, plain"),
    ({"params": {"nope": 1}}, Code.INVALID_ARGUMENT, "params.nope", "threshold, window"),
    ({"deadline_s": 0.0}, Code.INVALID_ARGUMENT, "deadline_s", "positive"),
    ({"deadline_s": -1.0}, Code.INVALID_ARGUMENT, "deadline_s", "positive"),
    ({"deadline_s": math.nan}, Code.INVALID_ARGUMENT, "deadline_s", "positive"),
    ({"deadline_s": math.inf}, Code.INVALID_ARGUMENT, "deadline_s", "positive"),
]


@pytest.mark.parametrize(("changes", "code", "field", "allowed"), REFUSED)
async def test_bad_input_is_refused_by_name(changes: dict[str, Any], code: Code, field: str, allowed: str) -> None:
    service = make_service()
    for attempt in (service.generate(call(**changes)), anext(service.stream(call(**changes)))):
        with pytest.raises(TurnoutError) as refusal:
            await attempt
        assert (refusal.value.code, refusal.value.field) == (code, field)
        assert refusal.value.message.startswith(f"{field}: ")
        assert allowed in refusal.value.message
    assert (await service.generate(call())).choices[0].text == "abcdef"


BAD_SAMPLING = [
    ({"temperature": -1.0}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": math.nan}, "temperature", "finite"),
    ({"top_p": 0.0}, "top_p", "greater than 0"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"logit_bias": {5: 1000.0}}, "logit_bias.5", "less than or equal to 100"),
    ({"stop": ("",)}, "stop.0", "at least 1 character"),
    ({"stop": ("x",) * 17}, "stop", "at most 16"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids.0", "greater than or equal to 0"),
    ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 65}, "n", "less than or equal to 64"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
]


@pytest.mark.parametrize(("values", "field", "allowed"), BAD_SAMPLING)
def test_bad_sampling_is_refused_by_name(values: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(TurnoutError) as refusal:
        parse_sampling(values, "sampling")
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert refusal.value.field is not None
    assert refusal.value.field.startswith(f"sampling.{field}")
    assert allowed in refusal.value.message


async def test_a_deadline_ends_the_call_and_frees_it() -> None:
    service = make_service()
    with pytest.raises(TurnoutError) as late:
        await service.generate(call("wait", deadline_s=0.05))
    assert (late.value.code, late.value.field) == (Code.DEADLINE_EXCEEDED, "deadline_s")
    with pytest.raises(TurnoutError) as late:
        async for _ in service.stream(call("slow", sampling=SamplingParams(max_tokens=100), deadline_s=0.3)):
            pass
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert (await service.stats())["demo"][0].requests == 0


async def test_the_servers_limit_bounds_a_longer_deadline() -> None:
    with pytest.raises(TurnoutError) as late:
        await make_service(request_timeout_s=0.05).generate(call("wait", deadline_s=100.0))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert "0.05 s" in late.value.message


async def test_our_faults_say_only_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service()
    with pytest.raises(TurnoutError) as fault:
        await service.generate(call("crash", request_id="abc"))
    assert fault.value.message == "internal error, request id abc"
    assert (await service.stats())["demo"][0].requests == 0


async def test_leaving_a_stream_frees_it() -> None:
    service = make_service()
    async with aclosing(service.stream(call("slow"))) as batches:
        await anext(batches)
        assert (await service.stats())["demo"][0].requests == 1
    assert (await service.stats())["demo"][0].requests == 0


async def test_outcomes_and_tokens_are_counted() -> None:
    service = make_service()
    await service.generate(call())
    async with aclosing(service.stream(call("slow"))) as batches:
        await anext(batches)
    with pytest.raises(TurnoutError):
        await service.generate(call(model="made-up"))
    text = service.metrics.render().decode()
    assert 'turnout_requests_total{model="demo",outcome="OK"} 1.0' in text
    assert 'turnout_requests_total{model="demo",outcome="CANCELLED"} 1.0' in text
    assert 'turnout_requests_total{model="",outcome="NOT_FOUND"} 1.0' in text
    assert 'turnout_generated_tokens_total{model="large"} 3.0' in text
    assert "made-up" not in text


async def test_scoring_checks_its_own_fields() -> None:
    service = make_service()
    scored = await service.score(ScoreCall("r", "demo", "ab", ("cd", (1, 2, 3))))
    assert [len(each.tokens) for each in scored] == [2, 3]
    for changes, field in (({"completions": ()}, "completions"), ({"top": 21}, "top"), ({"model": "x"}, "model")):
        values: dict[str, Any] = {"request_id": "r", "model": "demo", "prompt": "ab", "completions": ("c",)}
        with pytest.raises(TurnoutError) as refusal:
            await service.score(ScoreCall(**{**values, **changes}))
        assert refusal.value.field == field
