from __future__ import annotations

import math

import pytest
from google.protobuf.struct_pb2 import Struct

from deployments.grpc_messages import generate_call, spelling
from deployments.grpc_values import struct_values
from deployments.grpc_wire import parse
from turnout.errors import Code, TurnoutError
from turnout.proto import generation_pb2 as pb

MALFORMED = [
    (b"\xff", "request", "malformed"),
    (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "request", "malformed"),
    (b"\x1a\x05ab", "prompt", "cut short"),
    (b"\x1a", "prompt", "cut short"),
    (b"\x1a\x02\xff\xfe", "prompt", "UTF-8"),
    (b"\x12\x01\x80", "model", "UTF-8"),
    (b"\x1b", "prompt", "malformed"),
    (b"\x2a\x08\x0a\x06\x0a\x04us", "chat", "cut short"),
    (b"\x2a\x05\x0a\x03\x12\x01\xff", "chat.messages.content", "UTF-8"),
    (b"\x32\x03\x09\x00\x00", "sampling.temperature", "cut short"),
    (b"\x32\x04\x4a\x02\xc3\x28", "sampling.stop", "UTF-8"),
]


@pytest.mark.parametrize(("data", "field", "reason"), MALFORMED)
def test_malformed_bytes_are_refused_by_field(data: bytes, field: str, reason: str) -> None:
    with pytest.raises(TurnoutError) as refusal:
        parse(pb.GenerateRequest, data)
    assert refusal.value.code is Code.INVALID_ARGUMENT
    assert refusal.value.field == field
    assert reason in refusal.value.message
    assert "turnout.v1.GenerateRequest" in refusal.value.message


def test_every_cut_of_a_message_parses_or_is_refused() -> None:
    whole = pb.GenerateRequest(
        prompt="hello", model="m", sampling=pb.Sampling(temperature=0.5, stop=["é"]), deadline_s=1.0
    ).SerializeToString()
    refused = 0
    for end in range(len(whole)):
        try:
            parse(pb.GenerateRequest, whole[:end])
        except TurnoutError:
            refused += 1
    assert refused > len(whole) / 2


def test_whole_numbers_become_integers_at_every_depth() -> None:
    struct = Struct()
    struct.update({"window": 5, "tau": 0.5, "list": [1, 2.5, {"k": 3}], "flag": True, "none": None, "huge": 1e300})
    values = struct_values(struct, "params")
    assert values == {"window": 5, "tau": 0.5, "list": [1, 2.5, {"k": 3}], "flag": True, "none": None, "huge": 1e300}
    assert isinstance(values["window"], int)
    assert isinstance(values["list"][2]["k"], int)
    assert isinstance(values["huge"], float)


def test_numbers_that_are_not_finite_are_refused() -> None:
    struct = Struct()
    struct.update({"deep": {"tau": math.nan}})
    with pytest.raises(TurnoutError) as refusal:
        struct_values(struct, "params")
    assert refusal.value.field == "params.deep.tau"


def test_absent_sampling_fields_take_the_defaults_and_zero_is_a_value() -> None:
    call = generate_call(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(temperature=0.0)))
    assert call.sampling.temperature == 0.0
    assert call.sampling.top_p == 1.0
    assert call.deadline_s is None
    with pytest.raises(TurnoutError) as refusal:
        generate_call(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_tokens=0)))
    assert refusal.value.field == "sampling.max_tokens"


def test_a_request_id_must_fit_a_log_line() -> None:
    assert generate_call(pb.GenerateRequest(prompt="x", request_id="my-1")).request_id == "my-1"
    assert generate_call(pb.GenerateRequest(prompt="x")).request_id
    for bad in ("a" * 129, "new\nline", "é"):
        with pytest.raises(TurnoutError) as refusal:
            generate_call(pb.GenerateRequest(prompt="x", request_id=bad))
        assert refusal.value.field == "request_id"


def test_fields_are_named_as_the_caller_spelled_them() -> None:
    names = spelling(pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=[1])))
    assert (names["prompt"], names["method.params"]) == ("prompt_ids", "params")
