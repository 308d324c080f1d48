"""The RPCs of `turnout.v1.Generation` and `grpc.health.v1.Health`, as methods that Serve finds by name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from ray.serve.grpc_util import RayServegRPCContext

from deployments import grpc_messages as messages
from deployments.access.callers import PRIORITY_HEADER, Caller, Callers
from deployments.bodies import parsed
from deployments.fan_out import check_prompt, score_prompt
from deployments.faults import guarded, respell
from deployments.grpc_wire import parse
from deployments.request_fields import request_id
from deployments.service import GenerationService
from deployments.tools import reader_of
from turnout.calls import GenerateCall, ScoreCall
from turnout.embed_calls import EmbedCall, TaskCall
from turnout.errors import Code, TurnoutError
from turnout.message_size import check_answer_bytes
from turnout.proto import generation_pb2 as pb

C = TypeVar("C", ScoreCall, EmbedCall, TaskCall)
HEALTH_SERVICES = ("", "turnout.v1.Generation", "grpc.health.v1.Health")


class RefusedError(Exception):
    """Ends a stream whose context already has its code and details."""


class GrpcServicer:
    """gRPC methods over a service. Each takes the request's bytes; the status is set on `grpc_context`."""

    service: GenerationService

    async def _caller(self, grpc_context: RayServegRPCContext, data: bytes) -> Caller:
        """Who calls; refuses what is too large before it is looked at."""
        caller = await caller_of(self.service.callers, grpc_context)
        limit = self.service.max_body_bytes
        if len(data) > limit:
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, f"message: at most {limit} bytes", "message")
        return caller

    async def _asked(
        self, grpc_context: RayServegRPCContext, data: bytes, names: dict[str, str], stream: bool = False
    ) -> tuple[GenerateCall, str, int | None]:
        """The call that a message asks for, what its model is called, and alternatives to tokens of its prompt.

        `names` gets the message's spelling.
        """
        with self.service.tracer.refusing(key_id=key_of(self.service.callers, grpc_context)):
            caller = await self._caller(grpc_context, data)
        with self.service.tracer.refusing(caller.tenant, key_id=caller.key_id):
            await self.service.precheck(caller)
            read, top = await parsed(data, lambda body: _generate_call(body, names, stream))
            call = caller.attributed(read)
            model = self.service.model_name(call.model, caller.limits)
            return replace(call, trace=_traceparent(grpc_context)), model, top

    async def Generate(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> pb.GenerateResponse:
        """Answer when complete."""
        names: dict[str, str] = {}
        with _status(grpc_context, names):
            call, model, top = await self._asked(grpc_context, data, names)
            if top is not None:  # before anything is written: of endpoints, tokens are not known
                await check_prompt(self.service, call)
            answer = await self.service.generate(call)
            message = messages.answer_message(call.request_id, model, answer, reader_of(call))
            if top is not None:
                messages.fill_prompt(message, *await score_prompt(self.service, call, top), top)
            check_answer_bytes(message.ByteSize())
            return message
        return pb.GenerateResponse()

    async def StreamGenerate(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Answer as it is written."""
        names: dict[str, str] = {}
        with _status(grpc_context, names):
            call, model, _ = await self._asked(grpc_context, data, names, stream=True)
            reader = reader_of(call)
            async with aclosing(self.service.stream(call)) as batches:
                async for batch in batches:
                    yield messages.chunk_message(call.request_id, model, batch, reader)
            return
        # A code reaches the client with a message or with an exception; an empty message would look like output.
        raise RefusedError

    async def Score(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> pb.ScoreResponse:
        """Log-likelihood of completions."""
        with _status(grpc_context, {}):
            read = partial(parse, pb.ScoreRequest)
            call = await self._asked_to_read(grpc_context, data, lambda body: messages.score_call(read(body)))
            return messages.score_message(call.request_id, await self.service.score(call))
        return pb.ScoreResponse()

    async def Embed(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> pb.EmbedResponse:
        """Embeddings of texts."""
        with _status(grpc_context, {}):
            read = partial(parse, pb.EmbedRequest)
            call = await self._asked_to_read(grpc_context, data, lambda body: messages.embed_call(read(body)))
            message = messages.embed_message(call.request_id, await self.service.embed(call))
            check_answer_bytes(message.ByteSize())
            return message
        return pb.EmbedResponse()

    async def RunTask(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> pb.RunTaskResponse:
        """Carry out a task."""
        with _status(grpc_context, {}):
            read = partial(parse, pb.RunTaskRequest)
            call = await self._asked_to_read(grpc_context, data, lambda body: messages.task_call(read(body)))
            message = messages.task_message(call.request_id, await self.service.task(call))
            check_answer_bytes(message.ByteSize())
            return message
        return pb.RunTaskResponse()

    async def _asked_to_read(self, grpc_context: RayServegRPCContext, data: bytes, read: Callable[[bytes], C]) -> C:
        """The call that a message of `Score`, `Embed` or `RunTask` asks for."""
        with self.service.tracer.refusing(key_id=key_of(self.service.callers, grpc_context)):
            caller = await self._caller(grpc_context, data)
        with self.service.tracer.refusing(caller.tenant, key_id=caller.key_id):
            await self.service.precheck(caller)
            return caller.attributed(await parsed(data, read))

    async def ListModels(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> pb.ListModelsResponse:
        """Pools and their members."""
        with _status(grpc_context, {}):
            caller = await self._caller(grpc_context, data)
            parse(pb.ListModelsRequest, data)
            return messages.models_message(await self.service.models_for(caller))
        return pb.ListModelsResponse()

    async def ListMethods(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> pb.ListMethodsResponse:
        """Decoding methods."""
        with _status(grpc_context, {}):
            await self._caller(grpc_context, data)
            parse(pb.ListMethodsRequest, data)
            return messages.methods_message(await self.service.methods())
        return pb.ListMethodsResponse()

    async def Check(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        """SERVING when every pool answers, with or without its prefix store."""
        with _status(grpc_context, {}):
            request = parse(health_pb2.HealthCheckRequest, data)
            if request.service not in HEALTH_SERVICES:
                grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
                grpc_context.set_details("service: unknown")
                return health_pb2.HealthCheckResponse()
            healthy = await self.service.health() != "unavailable"
            status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
            return health_pb2.HealthCheckResponse(status=status)
        return health_pb2.HealthCheckResponse()

    async def Watch(  # noqa: N802 - the RPC's name
        self, data: bytes, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The protocol lets a server refuse to watch; clients then poll Check."""
        grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        grpc_context.set_details("Watch is not offered; call Check")
        raise RefusedError
        yield


def _generate_call(data: bytes, names: dict[str, str], stream: bool) -> tuple[GenerateCall, int | None]:
    request = parse(pb.GenerateRequest, data)
    names.update(messages.spelling(request))
    return messages.generate_call(request), messages.prompt_logprobs(request, stream)


def _traceparent(context: RayServegRPCContext) -> str:
    """The caller's, from the metadata; "" without."""
    return next((str(value) for key, value in context.invocation_metadata() if key == "traceparent"), "")


@contextmanager
def _status(context: RayServegRPCContext, names: dict[str, str]) -> Iterator[None]:
    """Turn a TurnoutError of the block into the call's status; its caller continues after it."""
    try:
        with guarded(request_id()):
            yield
    except TurnoutError as error:
        set_status(context, respell(error, names))


RETRY_AFTER = "retry-after-s"
DETAILS = "grpc-status-details-bin"  # where gRPC's own libraries look for google.rpc.Status


async def caller_of(callers: Callers, context: Any) -> Caller:
    """Who makes a call, by its metadata `authorization` and `x-turnout-priority`.

    Raises:
        TurnoutError: see `Callers.of`.
    """
    metadata = _metadata(context)
    await callers.settle(metadata.get("authorization"))
    return callers.of(metadata.get("authorization"), metadata.get(PRIORITY_HEADER))


def key_of(callers: Callers, context: Any) -> str:
    """As `Callers.key_of`."""
    return callers.key_of(_metadata(context).get("authorization"))


def _metadata(context: Any) -> dict[str, str]:
    return {key.lower(): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def set_status(context: Any, error: TurnoutError) -> None:
    """End a call with an error: code, message, and when to try again."""
    code = grpc.StatusCode[error.code.name]
    context.set_code(code)
    context.set_details(error.message)
    if error.retry_after_s is None:
        return
    delay = Duration()
    delay.FromNanoseconds(round(error.retry_after_s * 1e9))
    status = Status(code=code.value[0], message=error.message)
    status.details.add().Pack(RetryInfo(retry_delay=delay))
    # As a list: Serve puts the request's id in front of it.
    context.set_trailing_metadata([(RETRY_AFTER, f"{error.retry_after_s:.3f}"), (DETAILS, status.SerializeToString())])
