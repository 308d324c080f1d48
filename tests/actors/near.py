"""Lives of members in this process: what a supervisor does with actors, without waiting for processes to start."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from actors.connection import ActorConnection, ConnectionGroup
from actors.incarnation import Incarnation, Place
from actors.model_worker import ModelWorker
from actors.protocol import ModelCard
from actors.quarantine import REQUEST
from actors.remote import RemoteModel
from actors.supervisor import Supervisor
from decoding.model import ModelPool
from pool.components import open_parts, prepare
from pool.pool import Pool
from pool.routing import Routing
from pool.validation import PreparedRequest
from tests.actors.hosts import Board, BoardTransport, DirectChannel, fix_times, poll, spec_of
from turnout.calls import Event
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError

POISON = 126  # the token that ends the process which feeds it


class NearChannel(DirectChannel):
    """A line that can fall silent, and that carries nothing once it is cut."""

    def __init__(self, host: ModelWorker) -> None:
        super().__init__(host)
        self.silent = False

    async def replies(self) -> AsyncIterator[bytes]:
        async for blob in super().replies():
            if self.cut.is_set():
                raise self.end()
            if not self.silent:
                yield blob


@dataclass(frozen=True)
class NearIncarnation(Incarnation):
    """A life that is ended by cutting its line."""

    def kill(self) -> None:
        assert isinstance(self.line, NearChannel)
        self.line.cut.set()
        self.line.tasks.add(asyncio.get_running_loop().create_task(self.line.host.stop()))

    async def stop(self) -> None:
        self.kill()


@dataclass
class NearLauncher:
    """Loads hosts in this process.

    Attributes:
        plan: what happens to the next starts: an error to raise, an event to wait for; empty: they succeed.
        lines: of all lives.
    """

    name: str
    owner: int
    config: TurnoutConfig
    board: Board
    poisoned: bool = False
    plan: list[Any] = field(default_factory=list)
    lines: list[NearChannel] = field(default_factory=list)

    async def start(self, number: int, vocab_size: int, first: ModelCard | None) -> Incarnation:
        step = self.plan.pop(0) if self.plan else None
        if isinstance(step, TurnoutError):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        host = ModelWorker(spec_of(self.name, self.config, self.owner, life=number))
        host.load()
        card = host.begin(vocab_size)
        host.transport = host._endpoint._transport = BoardTransport(self.board, self.owner)  # type: ignore[assignment]
        fix_times(host.model)
        line = NearChannel(host)
        if self.poisoned:
            poison(host, line)
        self.lines.append(line)
        return NearIncarnation(number, (host,), (Place("here", "", 1000 + number),), card, line)

    @property
    def host(self) -> ModelWorker:
        """Of the present life."""
        return self.lines[-1].host


def cleared(host: ModelWorker, connection: ActorConnection | None) -> bool:
    """Whether a host has nothing left that travelled; lets the connection say what nobody has any more."""
    if connection is not None:
        connection.say()
    return not len(host.store) and not len(host._receiver)


def poison(host: ModelWorker, line: NearChannel) -> None:
    """Let a host's forwards end it when they are fed `POISON`."""
    loop, run = asyncio.get_running_loop(), host.model.batcher.runner.run

    def deadly(feeds: Any) -> Any:
        if any(POISON in feed.tokens for feed in feeds):
            loop.call_soon_threadsafe(line.cut.set)
            raise RuntimeError("nobody hears this")
        return run(feeds)

    host.model.batcher.runner.run = deadly  # type: ignore[method-assign]


class NearPool(Pool):
    """A pool over supervised members in this process."""

    supervisors: dict[str, Supervisor]
    launchers: dict[str, NearLauncher]

    @classmethod
    async def open(cls, config: TurnoutConfig, poisoned: bool = False, **placement: Any) -> NearPool:
        parts = open_parts("pair", config)
        vocab_size, board, exchange = len(parts.tokenizer), Board(), ConnectionGroup(lambda: 1)
        settings = PlacementConfig(models="actors", **placement)
        launchers = {
            name: NearLauncher(name, owner, config, board, poisoned) for owner, name in enumerate(parts.models)
        }
        supervisors = {}
        for name, launcher in launchers.items():
            life = await launcher.start(0, vocab_size, None)
            supervisors[name] = Supervisor(launcher, life, vocab_size, settings, exchange)
        members = {name: RemoteModel(name, each) for name, each in supervisors.items()}
        pool = cls("pair", members, parts.roles, parts.tokenizer, parts.places, parts.default, parts.artifacts)
        prepare(pool, config)
        pool.launchers, pool.supervisors = launchers, supervisors
        for each in supervisors.values():
            each.attach(None)
        return pool

    def _run(
        self, prepared: PreparedRequest, models: ModelPool, routing: Routing | None = None
    ) -> AsyncIterator[Event]:
        REQUEST.set(prepared.call.request_id)
        return super()._run(prepared, models, routing)

    def line(self, name: str = "large") -> NearChannel:
        """To the present life of a member."""
        return self.launchers[name].lines[-1]

    async def assert_idle(self) -> None:
        """The present lives hold nothing, and nobody waits here."""
        for name, supervisor in self.supervisors.items():
            host, connection = self.launchers[name].host, supervisor.connection
            await poll(lambda host=host: host.model.stats().sequences == 0, f"{name} forgot its sequences")
            await poll(lambda host=host: host.model.stats().used_blocks == 0, f"{name} gave back its blocks")
            gc.collect()  # exceptions hold what was on its way
            await poll(lambda host=host, connection=connection: cleared(host, connection), f"{name} cleared its store")
            assert not supervisor._calls
            assert not supervisor._sent
            assert not len(supervisor._quarantine)
            if connection is not None:
                assert not connection.in_flight
                assert connection.num_sequences == 0

    async def finish(self) -> None:
        """Close the pool and all hosts there ever were."""
        await self.close()
        for launcher in self.launchers.values():
            for line in launcher.lines:
                await asyncio.gather(*line.tasks, return_exceptions=True)
