"""One trace through every process of a served application, and one line of the log for every request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import grpc
import httpx
import pytest

from tests.observability.conftest import QUESTION, Load, Served
from tests.spans import Spans
from turnout import client_messages as wire
from turnout.proto import generation_pb2_grpc

pytestmark = pytest.mark.observability


def poll(condition: Callable[[], bool], what: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what()}"
        time.sleep(0.2)


def ask_http(served: Served, pool: str, traceparent: str) -> str:
    body = {
        "model": pool,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "temperature": 0,
        "decoding": {"method": "speculative"},
    }
    answer = httpx.post(
        f"{served.http}/v1/chat/completions", json=body, headers={"traceparent": traceparent}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ask_grpc(served: Served, pool: str, traceparent: str) -> str:
    request = wire.generate_request(
        None, [{"role": "user", "content": QUESTION}],
        {"model": pool, "method": "speculative", "max_tokens": 12, "temperature": 0.0, "request_id": f"g-{pool}"},
    )  # fmt: skip
    with grpc.insecure_channel(served.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        parts = list(stub.StreamGenerate(request, metadata=(("traceparent", traceparent),)))
    assert parts[-1].usage.completion_tokens == 12
    return f"g-{pool}"


@pytest.mark.parametrize("ask", [ask_http, ask_grpc])
@pytest.mark.parametrize("pool", ["demo", "apart"])
def test_a_trace_goes_from_the_ingress_to_each_forward(
    served: Served, load: Load, pool: str, ask: Callable[[Served, str, str], str]
) -> None:
    trace = f"{int.from_bytes(f'{pool} {ask.__name__}'.encode()):032x}"[-32:]
    request_id = ask(served, pool, f"00-{trace}-{'e' * 16}-01")
    spans = Spans(served.traces)
    first = "stream" if ask is ask_grpc else "generate"
    head = (first, f"replica of {pool}", f"pool {pool}", "method speculative", "demo-large verify")
    wanted = (*head, "demo-large forward") if pool == "demo" else (*head, "demo-large verify in its actor")
    poll(lambda: any(path[: len(wanted)] == wanted for path in spans.paths(trace)), lambda: spans.paths(trace))
    poll(lambda: any(path[-1] == "demo-large forward" for path in spans.paths(trace)), lambda: spans.paths(trace))
    found = spans.trace(trace).values()
    root = next(span for span in found if span["name"] == first)
    assert root["parent_id"] == f"0x{'e' * 16}"
    assert root["attributes"]["request_id"] == request_id
    assert [span["kind"] for span in found].count("SpanKind.SERVER") == 1
    assert root["kind"] == "SpanKind.SERVER"
    names = ("operation.name", "request.model", "request.temperature", "usage.output_tokens", "response.finish_reasons")
    told = [root["attributes"][f"gen_ai.{name}"] for name in names]
    assert told == ["chat", pool, 0.0, 12, ["length"]]

    def processes() -> set[object]:
        return {span["resource"]["attributes"]["process.pid"] for span in spans.trace(trace).values()}

    # Each of them writes its spans down at its own times.
    poll(lambda: len(processes()) >= (2 if pool == "demo" else 4), processes)

    def lines() -> list[dict[str, object]]:
        text = "".join(path.read_text() for path in served.logs.glob("requests*.jsonl"))
        return [line for line in map(json.loads, text.splitlines()) if line["request_id"] == request_id]

    poll(lambda: bool(lines()), lines)
    (line,) = lines()
    assert (line["trace_id"], line["outcome"], line["model"]) == (trace, "OK", pool)


def test_who_is_not_traced_leaves_no_span(served: Served, load: Load) -> None:
    trace = f"{77:032x}"
    ask_http(served, "apart", f"00-{trace}-{'e' * 16}-00")
    after = f"{78:032x}"
    ask_http(served, "apart", f"00-{after}-{'e' * 16}-01")
    spans = Spans(served.traces)
    poll(lambda: any(path[-1] == "generate" for path in spans.paths(after)), lambda: spans.paths(after))
    assert spans.paths(trace) == []
