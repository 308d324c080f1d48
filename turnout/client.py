"""Python clients of the gRPC service, sync and async.

    with Client("127.0.0.1:9000") as client:
        print(client.generate("2 + 2 =", max_tokens=8, temperature=0.0).text)

Every method raises TurnoutError with the server's code and the field at fault.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from turnout import client_messages as wire
from turnout import embed_messages, task_messages, usage_messages
from turnout.addresses import check_target
from turnout.calls import Chunk, MethodDescription, ModelDescription, ScoredTokens, Usage
from turnout.client_messages import Messages, Prompt, Result
from turnout.client_options import Options
from turnout.embed_calls import Pooling
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationStub

__all__ = ["AsyncClient", "AsyncStream", "Client", "Options", "Result", "Stream"]

# grpc.health.v1 as bytes: the request is an empty message, `status: SERVING` the field 1 with the value 1.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
HEALTH_REQUEST, HEALTH_SERVING = b"", b"\x08\x01"
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))


class Stream:
    """Chunks of a running generation. Leaving the `with` block, or `close`, cancels what is left."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._waiting: list[Chunk] = []
        self.usage: Usage | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._waiting:
            with _translated():
                message = next(self._call)
            _receive(self, message)
        return self._waiting.pop(0)

    def close(self) -> None:
        """Cancel the generation if it still runs; the server frees it within a step."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream:
    """Chunks of a running generation. Leaving the `async with` block, or `close`, cancels what is left."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = aiter(call)
        self._waiting: list[Chunk] = []
        self.usage: Usage | None = None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._waiting:
            with _translated():
                message = await anext(self._messages)
            _receive(self, message)
        return self._waiting.pop(0)

    def close(self) -> None:
        """Cancel the generation if it still runs; the server frees it within a step."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _receive(stream: Stream | AsyncStream, message: pb.GenerateChunk) -> None:
    stream._waiting.extend(wire.chunk(choice) for choice in message.choices)
    if message.HasField("usage"):
        stream.usage = usage_messages.usage(message.usage)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as failure:
        # grpc.aio and grpc raise different classes; both have these two methods.
        call: Any = failure
        raise wire.error(call.code(), call.details(), call.trailing_metadata()) from None


class Client:
    """A blocking client; safe to share between threads.

    Args:
        address: host:port, an IPv6 host in brackets.
        credentials: for TLS; None is a plain connection.
        api_key: an API key or a signed token; "" where the server asks for none. It is sent as it is: over a plain
            connection everybody on the way can read it.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None, api_key: str = "") -> None:
        check_target(address)
        self._metadata = wire.credentials(api_key)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[Options]
    ) -> Result:
        """Generate and wait for the whole answer. Give exactly one of `prompt` and `messages`."""
        request = wire.generate_request(prompt, messages, options)
        with _translated():
            return wire.result(self._stub.Generate(request, metadata=self._metadata))

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Generate and read along. Give exactly one of `prompt` and `messages`."""
        return Stream(
            self._stub.StreamGenerate(wire.generate_request(prompt, messages, options), metadata=self._metadata)
        )

    def score(
        self, prompt: Prompt, completions: Iterable[Prompt], *, model: str = "", top: int = 0
    ) -> list[ScoredTokens]:
        """Log-likelihood of each completion after the prompt, token by token."""
        with _translated():
            request = wire.score_request(prompt, completions, model, top)
            return wire.scored(self._stub.Score(request, metadata=self._metadata))

    def embed(
        self,
        inputs: Iterable[Prompt],
        *,
        model: str = "",
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[float]]:
        """Embeddings of texts or token ids: unit vectors, in their order. See `EmbedRequest` for the options."""
        with _translated():
            request = embed_messages.embed_request(inputs, model, pooling, dimensions, truncate_prompt_tokens)
            return embed_messages.embeddings(self._stub.Embed(request, metadata=self._metadata))

    def task(
        self, name: str, params: Mapping[str, Any] | None = None, *, model: str = "", deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Have a pool carry out a task; parameters and result are as its schemas say, bytes in them base64."""
        with _translated():
            request = task_messages.task_request(name, params or {}, model, deadline_s)
            return task_messages.task_result(self._stub.RunTask(request, metadata=self._metadata))

    def models(self, timeout_s: float | None = None) -> list[ModelDescription]:
        """Names that `model` may be: each pool, then its members. A pool without a replica starts one for it."""
        with _translated():
            return wire.models(
                self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
            )

    def healthy(self, timeout_s: float | None = None) -> bool:
        """Whether every pool answers; one that sleeps is left asleep."""
        check = self._channel.unary_unary(HEALTH_CHECK, bytes, bytes)
        with _translated():
            return bool(check(HEALTH_REQUEST, timeout=timeout_s) == HEALTH_SERVING)

    def methods(self) -> list[MethodDescription]:
        """Decoding methods and the schemas of their parameters."""
        with _translated():
            return wire.methods(self._stub.ListMethods(pb.ListMethodsRequest(), metadata=self._metadata))

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio; use it within one event loop.

    Args:
        address: host:port, an IPv6 host in brackets.
        credentials: for TLS; None is a plain connection.
        api_key: an API key or a signed token; "" where the server asks for none. It is sent as it is: over a plain
            connection everybody on the way can read it.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None, api_key: str = "") -> None:
        check_target(address)
        self._metadata = wire.credentials(api_key)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[Options]
    ) -> Result:
        """Generate and wait for the whole answer. Give exactly one of `prompt` and `messages`."""
        request = wire.generate_request(prompt, messages, options)
        with _translated():
            return wire.result(await self._stub.Generate(request, metadata=self._metadata))

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Generate and read along. Give exactly one of `prompt` and `messages`."""
        return AsyncStream(
            self._stub.StreamGenerate(wire.generate_request(prompt, messages, options), metadata=self._metadata)
        )

    async def score(
        self, prompt: Prompt, completions: Iterable[Prompt], *, model: str = "", top: int = 0
    ) -> list[ScoredTokens]:
        """Log-likelihood of each completion after the prompt, token by token."""
        with _translated():
            request = wire.score_request(prompt, completions, model, top)
            return wire.scored(await self._stub.Score(request, metadata=self._metadata))

    async def embed(
        self,
        inputs: Iterable[Prompt],
        *,
        model: str = "",
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[float]]:
        """Embeddings of texts or token ids: unit vectors, in their order. See `EmbedRequest` for the options."""
        with _translated():
            request = embed_messages.embed_request(inputs, model, pooling, dimensions, truncate_prompt_tokens)
            return embed_messages.embeddings(await self._stub.Embed(request, metadata=self._metadata))

    async def task(
        self, name: str, params: Mapping[str, Any] | None = None, *, model: str = "", deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Have a pool carry out a task; parameters and result are as its schemas say, bytes in them base64."""
        with _translated():
            request = task_messages.task_request(name, params or {}, model, deadline_s)
            return task_messages.task_result(await self._stub.RunTask(request, metadata=self._metadata))

    async def models(self, timeout_s: float | None = None) -> list[ModelDescription]:
        """Names that `model` may be: each pool, then its members. A pool without a replica starts one for it."""
        with _translated():
            return wire.models(
                await self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
            )

    async def healthy(self, timeout_s: float | None = None) -> bool:
        """Whether every pool answers; one that sleeps is left asleep."""
        check = self._channel.unary_unary(HEALTH_CHECK, bytes, bytes)
        with _translated():
            return bool(await check(HEALTH_REQUEST, timeout=timeout_s) == HEALTH_SERVING)

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods and the schemas of their parameters."""
        with _translated():
            return wire.methods(await self._stub.ListMethods(pb.ListMethodsRequest(), metadata=self._metadata))

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
