"""OpenTelemetry's conventions for generative AI, and the gauges of the Gateway API's inference extension."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import Metrics, Times
from deployments.telemetry.catalogue import CONVENTIONS, GEN_AI
from tests.deployments.in_process import make_config, make_service
from tests.deployments.test_metrics import MEMBER, POOL, USAGE
from tests.spans import traced_process
from turnout.calls import ChatMessage, GenerateCall, PoolStats, ScoreCall
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.types import SamplingParams

TRACEPARENT = f"00-{'c' * 32}-{'d' * 16}-01"


def call(**changes: Any) -> GenerateCall:
    values: dict[str, Any] = {"request_id": "r1", "model": "demo", "sampling": SamplingParams(max_tokens=4)}
    return GenerateCall(**{"prompt": "hello", "trace": TRACEPARENT, **values, **changes})


def series(text: str, name: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples of a family, by name, and the values of labels in the order of their names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name == name:
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


async def test_a_requests_span_tells_what_was_asked_and_what_came_of_it(tmp_path: Path) -> None:
    service = make_service()
    sampling = SamplingParams(
        temperature=0.5, top_k=7, max_tokens=3, n=2, seed=5, stop=("zz",), structure=Structure(kind="json_object")
    )
    messages = (ChatMessage("user", "hi"),)
    with traced_process(tmp_path, share=0.0) as spans:
        await service.generate(call(prompt=None, messages=messages, sampling=sampling, session="s1"))
        [span] = spans.all()
    assert span["kind"] == "SpanKind.SERVER"
    shown = {name: value for name, value in span["attributes"].items() if name.startswith("gen_ai.")}
    assert {name.removeprefix("gen_ai."): value for name, value in shown.items()} == {
        "operation.name": "chat", "provider.name": "turnout", "request.model": "demo", "request.stream": False,
        "request.temperature": 0.5, "request.top_k": 7.0, "request.max_tokens": 3, "request.seed": 5,
        "request.stop_sequences": ["zz"], "request.choice.count": 2, "output.type": "json", "conversation.id": "s1",
        "response.id": "r1", "response.model": "demo", "response.finish_reasons": ["length", "length"],
        "usage.input_tokens": 2, "usage.output_tokens": 6, "usage.cache_read.input_tokens": 0,
    }  # fmt: skip
    assert isinstance(shown["gen_ai.request.top_k"], float)


async def test_each_way_to_end_has_its_operation_reason_and_error(tmp_path: Path) -> None:
    service = make_service()
    with traced_process(tmp_path, share=1.0) as spans:
        assert [batch async for batch in service.stream(call(request_id="streamed"))]
        async with aclosing(service.stream(call(prompt="slow", request_id="left"))) as batches:
            await anext(batches)
        with pytest.raises(TurnoutError):
            await service.generate(call(request_id="refused", model="nope"))
        await service.score(ScoreCall("scored", "demo", "a", ("b",)))
        found = {span["attributes"]["request_id"]: span["attributes"] for span in spans.all()}
    names = ("operation.name", "request.stream", "response.finish_reasons", "usage.output_tokens")
    told = {id: (*(each.get(f"gen_ai.{n}") for n in names), each.get("error.type")) for id, each in found.items()}
    assert told == {
        "streamed": ("text_completion", True, ["length"], 4, None),
        "left": ("text_completion", True, None, None, "CANCELLED"),
        "refused": ("text_completion", False, None, None, "NOT_FOUND"),
        "scored": ("score", None, None, None, None),
    }
    text = service.metrics.render().decode()
    durations = series(text, "gen_ai_server_request_duration_seconds")["gen_ai_server_request_duration_seconds_count"]
    assert durations == {  # error, operation, provider, model asked for, model that answered
        ("", "text_completion", "turnout", "demo", "demo"): 1,
        ("CANCELLED", "text_completion", "turnout", "demo", "demo"): 1,
        ("NOT_FOUND", "text_completion", "turnout", "", ""): 1,
        ("", "score", "turnout", "demo", "demo"): 1,
    }
    tokens = series(text, "gen_ai_client_token_usage")["gen_ai_client_token_usage_sum"]
    assert {labels[-1]: value for labels, value in tokens.items()} == {"input": 5, "output": 4}


def test_times_are_those_of_our_own_metrics() -> None:
    metrics = Metrics()
    times = Times(0.6, 2.0)
    metrics.gen_ai.answered("chat", "demo", USAGE, times.first_token_s, times.token_s(USAGE))
    metrics.gen_ai.answered("chat", "demo", replace(USAGE, completion_tokens=1), 0.6, None)
    metrics.used("demo", "default", USAGE, times)
    text = metrics.render().decode()
    first = series(text, "gen_ai_server_time_to_first_token_seconds")
    assert sum(first["gen_ai_server_time_to_first_token_seconds_sum"].values()) == pytest.approx(1.2)
    [token_s] = series(text, "gen_ai_server_time_per_output_token_seconds")[
        "gen_ai_server_time_per_output_token_seconds_sum"
    ].values()
    assert token_s == series(text, "turnout_tpot_seconds")["turnout_tpot_seconds_sum"]["demo",] == pytest.approx(0.1)


def gauges(*stats: PoolStats) -> dict[str, dict[tuple[str, ...], float]]:
    metrics = Metrics(pools=make_config().pools)
    metrics.stores({"demo": stats})
    text = metrics.render().decode()
    names = [metric.name for metric in CONVENTIONS if metric.kind == "gauge"]
    return {name.removeprefix("vllm:"): series(text, name).get(name, {}) for name in names}


def test_an_endpoint_picker_finds_one_series_for_a_pool_of_two_models_and_two_replicas() -> None:
    small = replace(MEMBER, model="small", used_blocks=10, total_blocks=400, block_size=32)
    large = replace(MEMBER, used_blocks=30, total_blocks=100, block_size=16)
    one = replace(POOL, requests=4, batch_requests=5, queued=3, members=(small, large))
    other = replace(one, queued=1, place="b", members=(small, replace(large, used_blocks=70)))
    assert gauges(one, other) == {
        "num_requests_waiting": {("demo",): 4},
        "num_requests_running": {("demo",): 14},
        "kv_cache_usage_perc": {("demo",): 0.5},
        "cache_config_info": {("16", "demo", "200"): 1},
    }


def test_a_pool_without_a_cache_of_its_own_has_no_share_of_it() -> None:
    found = gauges(replace(POOL, members=(replace(MEMBER, used_blocks=0, cached_blocks=0, total_blocks=0),)))
    assert found["kv_cache_usage_perc"] == found["cache_config_info"] == {}
    assert found["num_requests_waiting"] == {("demo",): 0}


def test_histograms_have_the_buckets_of_the_conventions() -> None:
    metrics = Metrics()
    metrics.gen_ai.ended("chat", "demo", "OK", 1.0)
    metrics.gen_ai.answered("chat", "demo", USAGE, 0.1, 0.1)
    text = metrics.render().decode()
    for metric in GEN_AI:
        buckets = series(text, metric.name)[f"{metric.name}_bucket"]
        assert len({float(end) for labels in buckets for end in labels if _is_number(end)}) == len(metric.buckets) + 1
    powers = [4.0**power for power in range(14)]
    assert (powers[-1], list(GEN_AI[-1].buckets)) == (67108864.0, powers)


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("e+", "").replace("+Inf", "1").isdigit()
