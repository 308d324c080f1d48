"""Random messages for every RPC, made from the descriptors: what fits, what is nearly right, and nonsense."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from turnout.proto import generation_pb2 as pb
from turnout.registry import names

DEPTH = 3
INT64 = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1))
DOUBLES = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0, math.nan, math.inf, -math.inf]), st.floats())
TEXT = st.one_of(st.text(max_size=12), st.sampled_from(["1+1=", "a", "\u0000", "e\u0301", "𝄞"]))
PROCESSORS, CONTRASTS = names("decoding.processors"), names("decoding.contrast")
# What the server knows by name, so that messages also get past the first check.
KNOWN: dict[str, Any] = {
    "turnout.v1.GenerateRequest.model": st.sampled_from(["demo", "small", "large", "slow"]),
    "turnout.v1.ScoreRequest.model": st.sampled_from(["demo", "small", "large"]),
    "turnout.v1.EmbedRequest.model": st.sampled_from(["demo", "small", "large"]),
    "turnout.v1.EmbedRequest.pooling": st.sampled_from(["", "mean", "last", "x"]),
    "turnout.v1.RunTaskRequest.model": st.sampled_from(["demo", "small", "large"]),
    "turnout.v1.RunTaskRequest.name": st.sampled_from([*names("decoding.tasks"), "", "x"]),
    "turnout.v1.RunTaskRequest.deadline_s": st.sampled_from([0.05, 1.0, 20.0, -1.0]),
    "turnout.v1.GenerateRequest.method": st.sampled_from(["", "plain", "speculative", "entropy_adaptive", "auto"]),
    "turnout.v1.ChatMessage.role": st.sampled_from(["system", "user", "assistant", "tool"]),
    "turnout.v1.ToolCall.name": st.sampled_from(["f", "a b"]),
    "turnout.v1.ToolCall.arguments": st.sampled_from(["{}", '{"a": 1}', "["]),
    "turnout.v1.Tool.name": st.sampled_from(["f", "g", "a b"]),
    "turnout.v1.Tool.parameters": st.sampled_from(["", "{}", '{"type": "array"}', '{"properties": {"a": {}}}', "["]),
    "turnout.v1.ToolChoice.mode": st.sampled_from(["none", "auto", "required", "x"]),
    "turnout.v1.ToolChoice.name": st.sampled_from(["f", "h"]),
    "turnout.v1.GenerateRequest.deadline_s": st.sampled_from([0.05, 1.0, 20.0]),
    "turnout.v1.GenerateRequest.cache": st.sampled_from(["", "exact", "lossy"]),
    "turnout.v1.GenerateRequest.prompt": st.sampled_from(["fast", "1+1=", "a b c"]),
    "turnout.v1.Structure.json_schema": st.sampled_from(
        ["{}", "true", "false", '{"type": "string"}', "[", '{"$ref": "#"}']
    ),
    "turnout.v1.Structure.regex": st.sampled_from(["[0-9]+", "(", ".*", "a{1,9}"]),
    "turnout.v1.Structure.grammar": st.sampled_from(['start: "a"+', "start: start", "x"]),
    "turnout.v1.TokenIds.ids": st.integers(-1, 1030),
    "turnout.v1.GenerateRequest.prompt_logprobs": st.integers(0, 20),
    "turnout.v1.Chat.reasoning": st.sampled_from(["", "split", "hide", "raw"]),
    "turnout.v1.Chat.reasoning_effort": st.sampled_from(["", "none", "low", "high"]),
    "turnout.v1.Part.name": st.sampled_from([*PROCESSORS, "x"]),
    "grpc.health.v1.HealthCheckRequest.service": st.sampled_from(["", "turnout.v1.Generation", "x"]),
}
# How far an answer may go: fuzzing is about what is asked, and long answers would only take their time.
MOST_TOKENS, MOST_ANSWERS = 4, 2


PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 9),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 10),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 1023), st.floats(-100, 100), max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 1023), max_size=2),
    "ignore_eos": st.booleans(),
    "seed": st.integers(0, 2**63 - 1),
    "n": st.integers(1, MOST_ANSWERS),
    "logprobs": st.integers(0, 20),
    "min_tokens": st.integers(0, MOST_TOKENS),
    "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=2),
    "allowed_token_ids": st.lists(st.integers(0, 1023), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(-1, 9),
    "thinking_token_budget": st.integers(-1, 9),
    "processors": st.lists(st.builds(pb.Part, name=st.sampled_from(PROCESSORS)), max_size=2),
}


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a kind: three of four are told what is needed, since of many random fields one is always wrong."""
    aims = st.sampled_from(["random", "named", "plausible", "plain"])
    sampling = st.fixed_dictionaries({}, optional=PLAUSIBLE)
    parts = st.tuples(_fields(kind.DESCRIPTOR, DEPTH), aims, sampling)
    return parts.map(lambda drawn: _short(_aimed(kind(**drawn[0]), drawn[1], drawn[2])))


def _aimed(message: Message, aim: str, sampling: dict[str, Any]) -> Message:
    if aim == "random" or not isinstance(message, pb.GenerateRequest | pb.ScoreRequest):
        return message
    message.request_id, message.model = "", "demo"
    if isinstance(message, pb.ScoreRequest):
        message.top = abs(message.top) % 21
        for each in (message.prompt, *message.completions):
            if aim != "named" and not each.text:
                each.token_ids.ids[:] = [abs(token) % 1024 for token in each.token_ids.ids] or [7]
        return message
    if not message.prompt and not message.chat.messages:
        message.prompt = "1+1="
    if aim != "named":
        message.sampling.CopyFrom(pb.Sampling(**sampling))
        message.ClearField("limits")
        message.cache = ""
        if message.HasField("contrast"):
            message.contrast.CopyFrom(pb.Part(name=CONTRASTS[len(message.contrast.name) % len(CONTRASTS)]))
    if aim == "plain":
        message.ClearField("params")
        message.ClearField("structure")
    return message


def wires(kind: type[Message]) -> st.SearchStrategy[bytes]:
    """Messages as bytes: mostly whole; cut short, spoilt or no message at all."""
    whole = messages(kind).map(lambda message: message.SerializeToString())
    spoilt = st.tuples(whole, st.binary(max_size=6), st.integers(0, 64)).map(lambda parts: _spoilt(*parts))
    return st.one_of(whole, whole, whole, spoilt, st.binary(max_size=40))


def _spoilt(data: bytes, put: bytes, at: int) -> bytes:
    at = at % (len(data) + 1)
    return data[:at] + put + data[at + len(put) // 2 :]


def _short(message: Message) -> Message:
    if isinstance(message, pb.GenerateRequest):
        sampling = message.sampling
        if not sampling.HasField("max_tokens") or MOST_TOKENS < sampling.max_tokens <= 1_000_000:
            sampling.max_tokens = MOST_TOKENS
        if MOST_ANSWERS < sampling.n <= 64:
            sampling.n = MOST_ANSWERS
    return message


def _fields(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    if descriptor.full_name.startswith("google.protobuf."):
        return st.just({})
    chosen: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        value = _field(field, depth)
        if value is not None:
            chosen[field.name] = value
    return st.fixed_dictionaries({}, optional=chosen).map(lambda fields: _one_of_each(descriptor, fields))


def _one_of_each(descriptor: Descriptor, fields: dict[str, Any]) -> dict[str, Any]:
    """Of the members of a oneof, the last given stays."""
    for oneof in descriptor.oneofs:
        given = [field.name for field in oneof.fields if field.name in fields]
        for name in given[:-1]:
            del fields[name]
    return fields


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any] | None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_scalar(key), _scalar(value), max_size=3)
    if field.message_type is not None:
        if depth == 0:
            return None
        one = _structs() if field.message_type.full_name == "google.protobuf.Struct" else _message(field, depth)
    else:
        one = _scalar(field)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _message(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    return _fields(field.message_type, depth - 1)


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind: st.SearchStrategy[Any] = {
        FieldDescriptor.CPPTYPE_INT64: INT64,
        FieldDescriptor.CPPTYPE_DOUBLE: DOUBLES,
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_STRING: TEXT,
    }[field.cpp_type]
    known = KNOWN.get(field.full_name)
    return kind if known is None else st.one_of(known, known, known, known, kind)


def _structs() -> st.SearchStrategy[struct_pb2.Struct]:
    plain = st.one_of(st.none(), st.booleans(), DOUBLES, TEXT)
    nested = st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
                          max_leaves=4)  # fmt: skip
    names = st.one_of(st.sampled_from(["threshold", "window", "drafter", "max_draft", "parts"]), TEXT)
    return st.dictionaries(names, nested, max_size=3).map(_struct)


def _struct(values: dict[str, Any]) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(values)
    return message
