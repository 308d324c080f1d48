"""HTTP and gRPC servers of an ingress process that listens itself: no proxy of Serve's lies before it.

Several such processes of a machine share each port (SO_REUSEPORT): the kernel gives every new connection to one of
them. What Serve's proxies do for an ingress behind them is done here: ids of requests, their probe, reflection, and a
request is cancelled when its client leaves, or takes too long to read the answer.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any
from uuid import uuid4

import grpc
import uvicorn
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.deadline import BACKSTOP_S
from deployments.grpc_server import GrpcServicer, RefusedError
from deployments.grpc_wire import MAX_MESSAGE_BYTES, add_to_server
from deployments.request_fields import REQUEST_ID_HEADER
from deployments.serve_internals import is_ipv6
from turnout.addresses import host_port
from turnout.config import ServerConfig
from turnout.errors import TurnoutError, invalid
from turnout.proto import generation_pb2

PROBE = "/-/healthz"  # where probes of Serve's proxies ask
KEEP_ALIVE_S = 90  # of a connection without a request, as Serve's proxies have it
START_S = 30.0
SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


class DirectServers:
    """The servers of one process, in the event loop that `start` runs in.

    Args:
        config: where to listen.
        app: answers HTTP.
        servicer: answers gRPC.
    """

    def __init__(self, config: ServerConfig, app: ASGIApp, servicer: GrpcServicer) -> None:
        self._config = config
        most_s = config.request_timeout_s + BACKSTOP_S
        self._http = uvicorn.Server(
            uvicorn.Config(
                CancelledWithClient(RequestIds(app), most_s),
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
            )
        )
        self._servicer = _DirectServicer(servicer, most_s)
        self._serving: asyncio.Task[None] | None = None
        self._rpc: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen, and return when both servers accept connections.

        Raises:
            TurnoutError: INVALID_ARGUMENT: a port cannot be bound; names the field.
        """
        listening = _shared_socket(self._config)
        try:
            self._rpc = _rpc_server(self._config, self._servicer)
            await self._rpc.start()
        except BaseException:
            listening.close()
            raise
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._sockets = [listening]
        self._serving = asyncio.create_task(self._http.serve(self._sockets))
        async with asyncio.timeout(START_S):
            while not self._http.started:
                if self._serving.done():
                    self._serving.result()
                    raise RuntimeError("the HTTP server ended while it started")
                await asyncio.sleep(0.01)

    def check(self) -> None:
        """Raise where this process does not answer any more.

        Raises:
            RuntimeError: a server has ended by itself.
        """
        if self._serving is not None and self._serving.done() and not self._http.should_exit:
            raise RuntimeError("the HTTP server has ended")

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, and return when what is being answered has ended.

        Args:
            grace_s: seconds after which what still runs is cancelled.
        """
        self._http.config.timeout_graceful_shutdown = max(1, round(grace_s))
        ending: list[Awaitable[None]] = [self._rpc.stop(grace_s)] if self._rpc is not None else []
        if self._serving is not None:
            ended_itself, self._http.should_exit = self._serving.done(), True
            ending.append(self._http.shutdown(self._sockets) if ended_itself else self._serving)
        await asyncio.gather(*ending, return_exceptions=True)


def _shared_socket(config: ServerConfig) -> socket.socket:
    """A bound socket for HTTP, whose port other processes of this user may bind, too."""
    host, port = config.http_host, config.http_port
    opened = socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        field = "http_port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "http_host"
        raise _unbound(field, host_port(host, port), str(error.strerror)) from None
    return opened


def _rpc_server(config: ServerConfig, servicer: _DirectServicer) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
    )
    bare: Any = server  # its stubs lack the registration of a service's methods
    add_to_server(servicer, bare)
    reflection.enable_server_reflection(SERVICES, server)
    try:
        server.add_insecure_port(f"[::]:{config.grpc_port}")
    except RuntimeError:
        raise _unbound("grpc_port", f"[::]:{config.grpc_port}", "it is in use, or not allowed") from None
    return server


def _unbound(field: str, where: str, reason: str) -> TurnoutError:
    return invalid(f"server.{field}", f"{where} cannot be bound: {reason}; choose one that is free")


class _DirectServicer:
    """The methods of a servicer as gRPC itself calls them: a refused stream ends without an exception.

    Args:
        servicer: has them.
        most_s: seconds after which a stream is cut off: its deadline is for us, not for how its client reads.
    """

    def __init__(self, servicer: GrpcServicer, most_s: float) -> None:
        self._servicer, self._most_s = servicer, most_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._servicer, name, _unimplemented)
        if not inspect.isasyncgenfunction(method):
            return method

        async def stream(data: bytes, context: Any) -> AsyncGenerator[Any, None]:
            task = asyncio.current_task()
            assert task is not None
            too_long = asyncio.get_running_loop().call_later(self._most_s, task.cancel)
            # Its code and details are in the context; after an exception gRPC would log it, and send its text.
            with suppress(RefusedError):
                try:
                    async with aclosing(method(data, context)) as messages:
                        async for message in messages:
                            yield message
                finally:
                    too_long.cancel()

        return stream


async def _unimplemented(_: bytes, context: Any) -> None:
    """Answer a method of a newer protocol."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not offered")


class RequestIds:
    """ASGI middleware: a request without an id gets one, every answer names its request's, and probes are answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == PROBE:
            await PlainTextResponse("success")(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.get(REQUEST_ID_HEADER)
        if not request_id:
            headers[REQUEST_ID_HEADER] = request_id = str(uuid4())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("X-Request-ID", request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


class CancelledWithClient:
    """ASGI middleware: a request whose client leaves before its answer is whole is cancelled.

    Args:
        app: answers.
        most_s: seconds after which an answer is cut off: its deadline is for us, not for how its client reads.
    """

    def __init__(self, app: ASGIApp, most_s: float) -> None:
        self._app, self._most_s = app, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = _Watched(receive, send)
        try:
            async with asyncio.timeout(self._most_s):
                await self._app(scope, watched.receive, watched.send)
        except asyncio.CancelledError:
            if not watched.was_left:
                raise
            watched.task.uncancel()
        finally:
            watched.end()


class _Watched:
    """One request. When its body has been read, what `receive` says next is that the client has left."""

    def __init__(self, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.was_left = False
        self._receive, self._send = receive, send
        self._watcher: asyncio.Task[Message] | None = None
        self._answered = False

    async def receive(self) -> Message:
        """The next part of the body; after its end, that the client has left, once it has."""
        if self._watcher is not None:
            return await asyncio.shield(self._watcher)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._answered = True
        await self._send(message)

    async def _watch(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._answered:
            self.was_left = True
            self.task.cancel()
        return message

    def end(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()
