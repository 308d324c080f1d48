"""Usage records add up to what was served, whatever becomes of requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments import fan_out as answering
from deployments.access.callers import Caller
from deployments.backend import Batch
from deployments.metrics import INGRESS_STATES
from deployments.schemas import completion_job
from tests.deployments.access.kit import House, house
from tests.deployments.access.test_tenants_file import until
from tests.deployments.test_metrics import values
from turnout.calls import Begun, Chunk, GenerateCall, Regained, ScoreCall, TokenOut, Usage
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.errors import Code, TurnoutError
from turnout.types import FinishReason, SamplingParams, TokenKind


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path, {"acme": {}, "other": {}}) as made:
        yield made


def call(prompt: Any = "hello", tenant: str = "acme", **changes: Any) -> GenerateCall:
    values: dict[str, Any] = {"model": "demo", "sampling": SamplingParams(max_tokens=6), "tenant": tenant}
    return GenerateCall("r1", prompt=prompt, **{**values, **changes})


async def read(tenants: House, asked: GenerateCall, most: int = 10**9) -> Counter[str]:
    """Reads a stream, up to so many tokens; the tokens it got by the model that wrote them."""
    got: Counter[str] = Counter()
    async with aclosing(tenants.service.stream(asked)) as batches:
        async for batch in batches:
            assert not any(isinstance(event, Begun) for event in batch)
            for event in batch:
                if isinstance(event, Chunk):
                    got.update(token.source for token in event.tokens)
            if got.total() >= most:
                break
    return got


async def test_a_whole_answer_and_a_stream_are_recorded_alike(tenants: House) -> None:
    answer = await tenants.service.generate(call(sampling=SamplingParams(max_tokens=6, n=2), key_id="k"))
    await read(tenants, call(sampling=SamplingParams(max_tokens=6, n=2), key_id="k"))
    whole, streamed = tenants.records()
    assert whole.model_dump(exclude={"time", "cost"}) == streamed.model_dump(exclude={"time", "cost"})
    assert (whole.prompt_tokens, whole.completion_tokens) == (5, 12)
    assert whole.tokens_by_model == {"small": 6, "large": 6}
    assert (whole.tenant, whole.key_id, whole.model, whole.method) == ("acme", "k", "demo", "entropy_adaptive")
    assert (whole.outcome, whole.estimated) == ("OK", False)
    assert whole.cost.flops == answer.usage.cost.spent.flops
    assert whole.cost.paper == 0.75


async def test_what_is_under_way_is_told_until_it_is_over(tenants: House) -> None:
    service, late = tenants.service, TurnoutError(Code.RESOURCE_EXHAUSTED, "no room", None, 0.3)

    async def told() -> dict[str, float]:
        await service.exposition.text()
        found = values(service.metrics)
        assert found["turnout_ingress_tasks"][()] >= 1
        return {state: count for (state,), count in found["turnout_ingress_requests"].items()}

    nothing = dict.fromkeys(INGRESS_STATES, 0)
    assert await told() == nothing
    async with aclosing(service.stream(call("slow", sampling=SamplingParams(max_tokens=100)))) as batches:
        await anext(batches)
        await service._tarpit.hold("acme", late)
        waiting = asyncio.create_task(service._tarpit.hold("acme", late))
        with service.admission.reading(Caller("acme")):
            await asyncio.sleep(0)
            assert await told() == {"reading": 1, "running": 1, "refused": 1, "recording": 1}
            with pytest.raises(AssertionError, match="running"):
                tenants.assert_idle(0.0)
    await waiting
    tenants.assert_idle()
    assert await told() == nothing


def assert_counted(tenants: House) -> None:
    """The metrics have the tokens of every record, once, and those of whatever was cut short without a method."""
    records, found = tenants.records(), values(tenants.service.metrics)
    assert found["turnout_prompt_tokens_total"] == {("demo",): sum(each.prompt_tokens for each in records)}
    written = Counter[tuple[str, ...]]()
    for each in records:
        written[each.method or "", "demo"] += each.completion_tokens
    assert found["turnout_completion_tokens_total"] == dict(written)
    large = sum(each.tokens_by_model.get("large", 0) for each in records)
    assert sum(found["turnout_large_tokens_total"].values()) == large
    kinds = {kind: sum(getattr(each, f"{kind}_tokens") for each in records) for kind in ("prompt", "completion")}
    told = {kind: count for (kind, tenant), count in found["turnout_tenant_tokens_total"].items() if tenant == "acme"}
    assert {kind: told[kind] for kind in kinds} == kinds


async def test_a_stream_that_is_cut_short_is_recorded_with_what_was_sent(tenants: House) -> None:
    await read(tenants, call())
    got = await read(tenants, call("slow", sampling=SamplingParams(max_tokens=100)), most=2)
    _, cut = tenants.records()
    assert (cut.prompt_tokens, cut.completion_tokens, cut.outcome) == (4, got.total(), "CANCELLED")
    assert cut.tokens_by_model == dict(got)
    assert cut.estimated
    assert cut.cost.flops > 0
    assert_counted(tenants)


async def test_a_whole_answer_nobody_waits_for_is_nothing_served(tenants: House) -> None:
    task = asyncio.create_task(tenants.service.generate(call("wait")))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    [record] = tenants.records()
    assert (record.prompt_tokens, record.completion_tokens, record.outcome) == (0, 0, "CANCELLED")


async def test_a_whole_answer_that_is_cut_short_is_recorded_with_what_was_written(tenants: House) -> None:
    await read(tenants, call())
    with pytest.raises(TurnoutError) as late:
        await tenants.service.generate(call("slow", sampling=SamplingParams(max_tokens=100, n=2), deadline_s=4.0))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    _, cut = tenants.records()
    assert (cut.prompt_tokens, cut.outcome, cut.estimated) == (4, "DEADLINE_EXCEEDED", True)
    assert 4 <= cut.completion_tokens <= 40
    assert_counted(tenants)
    assert cut.cost.flops > 0
    assert 0 < cut.cost.wall_s <= 10


async def test_a_name_that_is_not_known_tells_of_the_tenants_own_pools_only(tenants: House) -> None:
    tenants.change("other", pools=["demo"])
    until(lambda: tenants.service.callers.limits("other").pools == ("demo",), 10)
    asked = call(model="nobody", tenant="other")
    for ask in (tenants.service.generate(asked), read(tenants, asked)):
        with pytest.raises(TurnoutError, match="demo") as refused:
            await ask
        assert "small-2" not in refused.value.message


async def test_errors_before_and_in_the_middle(tenants: House) -> None:
    with pytest.raises(TurnoutError):
        await tenants.service.generate(call("x" * 5000))  # too long for the model
    with pytest.raises(TurnoutError):
        await read(tenants, call("crash"))
    with pytest.raises(TurnoutError):
        await tenants.service.generate(call(model="nobody"))  # never let in
    refused, crashed = tenants.records()
    assert (refused.outcome, refused.prompt_tokens, refused.completion_tokens) == ("OUT_OF_RANGE", 0, 0)
    assert (crashed.outcome, crashed.prompt_tokens, crashed.completion_tokens) == ("INTERNAL", 5, 3)


async def test_several_prompts_and_echo_are_billed_by_prompt(tenants: House) -> None:
    body = {"model": "demo", "prompt": ["ab", "cde"], "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1}
    for how in ("whole", "stream"):
        job = completion_job(body)
        job = replace(job, calls=tuple(map(Caller("acme").attributed, job.calls)))
        if how == "whole":
            await answering.answer(tenants.service, job)
        else:
            async with aclosing(answering.stream(tenants.service, job)) as outputs:
                assert [output async for output in outputs]
    records = tenants.records()
    # What an echo scores is what its call has read already.
    assert sorted((each.kind, each.prompt_tokens, each.completion_tokens) for each in records) == [
        ("generate", 2, 4),
        ("generate", 2, 4),
        ("generate", 3, 4),
        ("generate", 3, 4),
    ]


async def test_scores_are_recorded_as_read(tenants: House) -> None:
    await tenants.service.score(ScoreCall("r", "demo", "ab", ("cd", (1, 2, 3)), "acme"))
    [record] = tenants.records()
    assert (record.kind, record.prompt_tokens, record.completion_tokens) == ("score", 7, 0)


async def test_what_we_ask_on_our_own_account_is_nobodys(tenants: House) -> None:
    await tenants.service.generate(call(billed=False))
    await read(tenants, call(billed=False))
    await tenants.service.score(ScoreCall("r", "demo", "ab", ("cd",), "acme", billed=False))
    assert tenants.records() == []


class Replayed:
    """A backend whose replica is lost on the way: the next one says again that it has begun, and goes on."""

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        yield (Begun(7), _chunk("a"), _chunk("b"))
        yield (Begun(7), Regained(), _chunk("c", FinishReason.LENGTH))
        cost = CostReport(Cost(0.5, 9.0, 1.0), Cost(1.0, 9.0, 1.0), 0.5)
        yield (Usage(7, 3, 0, {}, SpeculationMeter(), 0, cost, "plain", {}, 1, 0.1, 0.2),)


def _chunk(text: str, reason: FinishReason | None = None) -> Chunk:
    return Chunk(0, text, (TokenOut(1, text, "small", TokenKind.DECODED),), reason)


async def test_what_is_made_again_after_a_loss_is_billed_once(tenants: House) -> None:
    tenants.service._backends["demo"] = Replayed()
    assert (await read(tenants, call())).total() == 3
    [record] = tenants.records()
    assert (record.prompt_tokens, record.completion_tokens, record.outcome) == (7, 3, "OK")


async def test_a_storm_of_everything_adds_up(tenants: House) -> None:
    """Streams and whole answers of two tenants, many cut short at random: sums by tenant and model are exact."""
    dice = random.Random(3)
    served: dict[str, Counter[str]] = {"acme": Counter(), "other": Counter()}
    prompts: Counter[str] = Counter()

    async def one(number: int) -> None:
        tenant, prompt = dice.choice(["acme", "other"]), "x" * dice.randint(1, 9)
        asked = call(prompt, tenant, sampling=SamplingParams(max_tokens=dice.randint(1, 30), n=dice.randint(1, 3)))
        most = dice.choice([1, 5, 10**9])
        if number % 3:
            got = await read(tenants, asked, most)
        else:
            answer = await tenants.service.generate(asked)
            got = Counter(token.source for choice in answer.choices for token in choice.tokens)
        served[tenant].update(got)
        prompts[tenant] += len(prompt)

    await asyncio.gather(*(one(number) for number in range(60)))
    records = tenants.records()
    assert len(records) == 60
    for tenant, sources in served.items():
        mine = [each for each in records if each.tenant == tenant]
        assert sum(each.completion_tokens for each in mine) == sources.total()
        assert sum(each.prompt_tokens for each in mine) == prompts[tenant]
        by_model: Counter[str] = Counter()
        for each in mine:
            by_model.update(each.tokens_by_model)
        assert by_model == sources
    assert {each.outcome for each in records} == {"OK", "CANCELLED"}
    assert tenants.service.admission.left("acme", tenants.service.callers.limits("acme")) == {}
