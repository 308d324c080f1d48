"""The Ray actor around a model."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import ray

from actors.model_worker import ModelWorker as ModelWorker
from actors.protocol import MemberSpec, ModelCard
from engine.parallel.tcp_store import listen
from pool.member_loading import Ranks, follow_leader
from turnout.gc_freeze import freeze_loaded
from turnout.tracing import set_up


class ModelActor:
    """The Ray actor: `ray.remote(ModelActor)` with resources of its own."""

    def __init__(self) -> None:
        self._host: ModelWorker | None = None
        self._listener: socket.socket | None = None

    @property
    def _there(self) -> ModelWorker:
        assert self._host is not None, "load comes first"
        return self._host

    async def place(self) -> tuple[str, str, int]:
        """IP address and id of the node, and the process; answers while a model is being loaded."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid()

    async def hold_port(self) -> int:
        """Reserve a TCP port of this node, at which `load` lets this actor's ranks meet."""
        self._listener = listen(ray.util.get_node_ip_address())
        port: int = self._listener.getsockname()[1]
        return port

    async def load(self, spec: MemberSpec) -> ModelCard:
        """See `ModelWorker.load`."""
        set_up(spec.config.telemetry.traces, f"model-{spec.name}")
        address, node_id, _ = await self.place()
        if self._listener is not None:
            spec = replace(spec, listen_fd=self._listener.detach())
        module, _, name = spec.host.partition(":")
        self._host = getattr(importlib.import_module(module), name)(spec, address, node_id)
        card = await asyncio.to_thread(self._there.load)
        freeze_loaded()
        return card

    async def begin(self, vocab_size: int) -> ModelCard:
        """See `ModelWorker.begin`."""
        return await asyncio.to_thread(self._there.begin, vocab_size)

    async def post(self, number: int, blob: bytes) -> None:
        """See `ModelWorker.post`."""
        await self._there.post(number, blob)

    async def replies(self) -> AsyncIterator[bytes]:
        """See `ModelWorker.replies`."""
        async for blob in self._there.replies():
            yield blob

    async def listen(self) -> tuple[str, int]:
        """See `Transport.listen`."""
        return self._there.transport.listen()

    async def join(
        self,
        generation: int,
        rank: int,
        world: int,
        address: str,
        port: int,
        timeout_s: float,
        names: Sequence[str] = (),
    ) -> None:
        """See `Transport.join`."""
        await self._there.transport.join(generation, rank, world, address, port, timeout_s, names)

    async def follow(self, spec: MemberSpec) -> None:
        """In place of `load`, for ranks above 0: hold a share of the model until its leader ends it.

        Raises:
            TurnoutError: the share could not be loaded.
            Interrupted: the leader is gone, or a rank failed.
        """
        ranks = Ranks(spec.rank, spec.world, spec.address, spec.port, spec.timeout_s)
        await asyncio.to_thread(follow_leader, spec.name, spec.config, ranks, spec.threads)

    async def stop(self) -> None:
        """See `ModelWorker.stop`."""
        if self._host is not None:
            await self._host.stop()
