from __future__ import annotations

from typing import Any

import grpc
import pytest

from deployments import grpc_messages
from deployments.service import Answer
from turnout import client_messages as wire
from turnout.calls import (
    ChatMessage,
    Chunk,
    DriftReading,
    EndToken,
    ModelDescription,
    PromptToken,
    ScoredTokens,
    TokenOut,
    Usage,
)
from turnout.candidate_sets import CandidateSet, Doubt, GraphEdge, GraphNode, ReportedCandidate, TokenGraph
from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
from turnout.errors import Code, TurnoutError
from turnout.types import FinishReason, TokenKind

TOKENS = (
    TokenOut(5, "a", "small", TokenKind.ACCEPTED, -0.25, 1.5, ((5, "a", -0.25), (6, "b", -2.0))),
    TokenOut(6, "b", "large", TokenKind.BONUS),
)
CANDIDATES = (
    CandidateSet(
        "search", "beam", "a rule", "nats", (0,),
        (ReportedCandidate("ab", 2, -1.5, None, "g", 0.0, (0,), False, True, (1, 2)), ReportedCandidate("")),
        3, TokenGraph((GraphNode(-1, ""), GraphNode(5, "a")), (GraphEdge(0, 1, -0.5),), (1,), 10**15, 2),
    ),
    CandidateSet("aggregators", "majority", "", "", (), ()),
)  # fmt: skip
USAGE = Usage(
    3, 2, 1,
    {"small": ModelMeter(10, draft_tokens=3, spared_tokens=1.5), "large": ModelMeter(20, fetched_tokens=1)},
    SpeculationMeter(3, 7, 5, 4, [3, 2], [3, 1], 0.25, 0.5), 0,
    CostReport(Cost(0.5, 6.0, 0.1), Cost(1.0, 8.0, 0.2), 0.5, 0.25), "plain",
    {"window": 3.0, "name": "x"}, 2**62, 0.01, 0.1, ("a note",),
    DriftReading("gate", "v1", 0.5, 0.25, 128), queue_s=0.5, measures={"semantic_entropy": 0.5},
    candidates=CANDIDATES, doubts=(Doubt(0, "snne", 0.5, "nats", "m", None, 0.7, 0.4, "abstained"),),
)  # fmt: skip


def test_an_answer_survives_the_wire() -> None:
    answer = Answer((Chunk(0, "ab", TOKENS, FinishReason.STOP),), USAGE)
    result = wire.result(grpc_messages.answer_message("id", "demo", answer))
    assert result == wire.Result("id", "demo", answer.choices, USAGE)
    assert (result.text, result.tokens) == ("ab", TOKENS)


@pytest.mark.parametrize("stop", [None, "", "end", 0, 7])
def test_what_ended_an_answer_survives_the_wire(stop: str | int | None) -> None:
    chunk = Chunk(0, "ab", (), FinishReason.STOP, stop=stop)
    [part] = grpc_messages.chunk_message("id", "demo", (chunk,)).choices
    whole = wire.result(grpc_messages.answer_message("id", "demo", Answer((chunk,), USAGE)))
    assert (wire.chunk(part).stop, whole.choices[0].stop) == (stop, stop)


def test_tokens_of_a_prompt_survive_the_wire() -> None:
    tops = ((6, "\ufffd", -0.5), (5, "a", -0.7), (9, "c", -2.0))
    token = TokenOut(5, "a", "large", TokenKind.DECODED, -0.7, top=tops, broken=((6, b"\xc3"),))
    message = grpc_messages.answer_message("id", "demo", Answer((Chunk(0, "", ()),), USAGE))
    grpc_messages.fill_prompt(message, (4, 5), "^a", ScoredTokens((token,), (False,), 1, (2,)), 2)
    assert wire.result(message).prompt_tokens == (
        PromptToken(4, "^"),
        PromptToken(5, "a", -0.7, 2, tops[:2], ((6, b"\xc3"),)),
    )


def test_a_call_survives_the_wire() -> None:
    request = wire.generate_request(
        None,
        [{"role": "user", "content": "hi"}, ChatMessage("assistant", "ho")],
        {
            "model": "demo", "method": "plain", "params": {"window": 3, "tau": 0.5}, "deadline_s": 2.0, "seed": 0,
            "temperature": 0.0, "stop": "end", "logit_bias": {7: -1.0}, "stop_token_ids": [1, 2], "request_id": "r",
            "cache": "lossy", "processors": ["xtc", {"name": "fsd", "k": 4}],
        },
    )  # fmt: skip
    call = grpc_messages.generate_call(request)
    assert call.messages == (ChatMessage("user", "hi"), ChatMessage("assistant", "ho"))
    assert (call.model, call.method, call.deadline_s, call.request_id) == ("demo", "plain", 2.0, "r")
    assert call.cache == "lossy"
    assert call.params == {"window": 3, "tau": 0.5}
    assert call.sampling.model_dump(exclude_defaults=True) == {
        "processors": ("xtc", {"name": "fsd", "k": 4}),
        "temperature": 0.0, "stop": ("end",), "logit_bias": {7: -1.0}, "stop_token_ids": (1, 2), "seed": 0,
    }  # fmt: skip
    assert grpc_messages.generate_call(wire.generate_request((4, 5), None, {})).prompt == (4, 5)
    plain = grpc_messages.generate_call(wire.generate_request("text", None, {}))
    assert (plain.prompt, plain.cache) == ("text", "exact")
    with pytest.raises(TurnoutError, match=r"^cache: must be one of exact, lossy \(got 'fast'\)$"):
        grpc_messages.generate_call(wire.generate_request("text", None, {"cache": "fast"}))  # type: ignore[typeddict-item]


def test_a_malformed_processor_is_refused_by_its_place() -> None:
    with pytest.raises(TurnoutError, match=r"^processors\.1\.name: ") as caught:
        wire.generate_request("text", None, {"processors": ["xtc", {"chance": 0.5}]})
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_models_survive_the_wire() -> None:
    own = {"threshold": 0.5, "window": 3}
    ends: dict[str, Any] = {"ends": (EndToken(2, "</s>"), EndToken(7, "")), "ends_source": "config.json"}
    models = [
        ModelDescription("demo", "Llama", 5, 6, 7, {"small": "s"}, "entropy_adaptive", own, routed=True, **ends),
        ModelDescription("s", "Llama", 5, 6, 7, {}, "plain", revision="0f" * 20),
    ]
    assert wire.models(grpc_messages.models_message(models)) == models


@pytest.mark.parametrize(
    ("prompt", "messages", "options", "field"),
    [
        (None, None, {}, "prompt"),
        ("x", [], {}, "prompt"),
        ("x", None, {"tempratur": 1}, "tempratur"),
        ("x", None, {"temperature": "hot"}, "sampling.temperature"),
        ("x", None, {"seed": 2**64}, "sampling.seed"),
        ("x", None, {"params": {"a": object()}}, "params"),
        (["a"], None, {}, "prompt_ids"),
        ("\ud800", None, {}, "prompt"),
    ],
)
def test_what_has_no_place_in_a_message_is_refused_by_name(
    prompt: Any, messages: Any, options: Any, field: str
) -> None:
    with pytest.raises(TurnoutError) as refusal:
        wire.generate_request(prompt, messages, options)
    assert (refusal.value.code, refusal.value.field) == (Code.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("code", "details", "expected", "field"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: too low", Code.INVALID_ARGUMENT, "sampling.top_p"),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", Code.UNAVAILABLE, None),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", Code.INTERNAL, None),
        (grpc.StatusCode.CANCELLED, None, Code.CANCELLED, None),
        (grpc.StatusCode.NOT_FOUND, "model: 'x' is not known; available: p", Code.NOT_FOUND, "model"),
        (grpc.StatusCode.NOT_FOUND, "Application metadata not set. Ping /x", Code.UNAVAILABLE, None),
    ],
)
def test_statuses_become_errors(code: grpc.StatusCode, details: str | None, expected: Code, field: str | None) -> None:
    error = wire.error(code, details)
    assert (error.code, error.field) == (expected, field)
    assert error.message
