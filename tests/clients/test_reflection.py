"""A gRPC client that knows nothing of us but the address: it learns messages and methods from reflection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.clients.cases import QUESTION, ids
from tests.clients.site import Site

pytestmark = pytest.mark.clients


class Learned:
    """Calls methods by name with plain data, as grpcurl does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def call(self, service: str, method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of the answer."""
        found = self._pool.FindServiceByName(service).FindMethodByName(method)
        made = json_format.ParseDict(body, GetMessageClass(found.input_type)(), descriptor_pool=self._pool)
        kind = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        call = kind(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        answer = call(made, timeout=60)
        return [json_format.MessageToDict(each) for each in (answer if found.server_streaming else [answer])]

    def ask(self, method: str, **body: Any) -> list[dict[str, Any]]:
        """A method of our own service."""
        return self.call("turnout.v1.Generation", method, body)


@pytest.fixture
def learned(site: Site) -> Iterator[Learned]:
    with grpc.insecure_channel(site.grpc_address) as channel:
        yield Learned(channel)


GREEDY = {"sampling": {"temperature": 0, "max_tokens": 8}, "model": "demo"}


def test_whole_and_streamed_answers_are_the_same(learned: Learned) -> None:
    [whole] = learned.ask("Generate", prompt=QUESTION, **GREEDY)
    parts = learned.ask("StreamGenerate", prompt=QUESTION, **GREEDY)
    pieces = [choice.get("text", "") for part in parts for choice in part.get("choices", ())]
    assert "".join(pieces) == whole["choices"][0]["text"]
    assert parts[-1]["usage"]["completionTokens"] == whole["usage"]["completionTokens"]


def test_each_kind_of_input_and_a_structure(learned: Learned) -> None:
    [text] = learned.ask("Generate", prompt=QUESTION, **GREEDY)
    [by_ids] = learned.ask("Generate", prompt_ids={"ids": ids(QUESTION)}, **GREEDY)
    assert by_ids["choices"][0]["text"] == text["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": QUESTION}]}
    [said] = learned.ask("Generate", chat=chat, structure={"choice": {"texts": ["yes", "no"]}}, **GREEDY)
    assert said["choices"][0]["text"] in ("yes", "no")


def test_scores_models_methods_and_health(learned: Learned) -> None:
    [scored] = learned.ask("Score", model="large", prompt={"text": "1+1="}, completions=[{"text": "2"}])
    assert scored["scored"][0]["tokens"][0]["logprob"] < 0
    [models] = learned.ask("ListModels")
    assert {"demo", "small", "large"} <= {model["name"] for model in models["models"]}
    [methods] = learned.ask("ListMethods")
    assert {"plain", "speculative"} <= {method["name"] for method in methods["methods"]}
    [health] = learned.call("grpc.health.v1.Health", "Check", {})
    assert health == {"status": "SERVING"}


def test_refusals_name_the_field(learned: Learned) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        learned.ask("Generate", prompt=QUESTION, model="demo", sampling={"temperature": 3})
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.temperature" in refused.value.details()
