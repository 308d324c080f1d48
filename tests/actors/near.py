"""Lives of members in this process: what a supervisor does with actors, without waiting for processes to start."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from actors.connection import Exchange, Mailbox
from actors.incarnation import Life, Place
from actors.model_host import ModelHost
from actors.protocol import ModelCard
from actors.quarantine import REQUEST
from actors.remote import RemoteModel
from actors.supervisor import Supervisor
from decoding.model import ModelPool
from pool.components import open_parts, prepare
from pool.pool import Endpoint
from pool.routing import Routing
from pool.validation import Prepared
from tests.actors.hosts import Board, BoardTransport, DirectLine, fix_times, poll, spec_of
from turnout.calls import Event
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError

POISON = 126  # the token that ends the process which feeds it


class NearLine(DirectLine):
    """A line that can fall silent, and that carries nothing once it is cut."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(host)
        self.silent = False

    async def replies(self) -> AsyncIterator[bytes]:
        async for blob in super().replies():
            if self.cut.is_set():
                raise self.end()
            if not self.silent:
                yield blob


@dataclass(frozen=True)
class NearLife(Life):
    """A life that is ended by cutting its line."""

    def kill(self) -> None:
        assert isinstance(self.line, NearLine)
        self.line.cut.set()
        self.line.tasks.add(asyncio.get_running_loop().create_task(self.line.host.stop()))

    async def stop(self) -> None:
        self.kill()


@dataclass
class NearStarter:
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
    lines: list[NearLine] = field(default_factory=list)

    async def start(self, number: int, vocab_size: int, first: ModelCard | None) -> Life:
        step = self.plan.pop(0) if self.plan else None
        if isinstance(step, TurnoutError):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        host = ModelHost(spec_of(self.name, self.config, self.owner, life=number))
        host.load()
        card = host.begin(vocab_size)
        host.transport = host._dock._transport = BoardTransport(self.board, self.owner)  # type: ignore[assignment]
        fix_times(host.model)
        line = NearLine(host)
        if self.poisoned:
            poison(host, line)
        self.lines.append(line)
        return NearLife(number, (host,), (Place("here", "", 1000 + number),), card, line)

    @property
    def host(self) -> ModelHost:
        """Of the present life."""
        return self.lines[-1].host


def cleared(host: ModelHost, mailbox: Mailbox | None) -> bool:
    """Whether a host has nothing left that travelled; lets the mailbox say what nobody has any more."""
    if mailbox is not None:
        mailbox.say()
    return not len(host.shelf) and not len(host._receiver)


def poison(host: ModelHost, line: NearLine) -> None:
    """Let a host's forwards end it when they are fed `POISON`."""
    loop, run = asyncio.get_running_loop(), host.model.batcher.runner.run

    def deadly(feeds: Any) -> Any:
        if any(POISON in feed.tokens for feed in feeds):
            loop.call_soon_threadsafe(line.cut.set)
            raise RuntimeError("nobody hears this")
        return run(feeds)

    host.model.batcher.runner.run = deadly  # type: ignore[method-assign]


class NearPool(Endpoint):
    """A pool over supervised members in this process."""

    supervisors: dict[str, Supervisor]
    starters: dict[str, NearStarter]

    @classmethod
    async def open(cls, config: TurnoutConfig, poisoned: bool = False, **placement: Any) -> NearPool:
        parts = open_parts("pair", config)
        vocab_size, board, exchange = len(parts.tokenizer), Board(), Exchange(lambda: 1)
        settings = PlacementConfig(models="actors", **placement)
        starters = {name: NearStarter(name, owner, config, board, poisoned) for owner, name in enumerate(parts.models)}
        supervisors = {}
        for name, starter in starters.items():
            life = await starter.start(0, vocab_size, None)
            supervisors[name] = Supervisor(starter, life, vocab_size, settings, exchange)
        members = {name: RemoteModel(name, each) for name, each in supervisors.items()}
        pool = cls("pair", members, parts.roles, parts.tokenizer, parts.places, parts.default, parts.artifacts)
        prepare(pool, config)
        pool.starters, pool.supervisors = starters, supervisors
        for each in supervisors.values():
            each.attach(None)
        return pool

    def _run(self, prepared: Prepared, models: ModelPool, routing: Routing | None = None) -> AsyncIterator[Event]:
        REQUEST.set(prepared.call.request_id)
        return super()._run(prepared, models, routing)

    def line(self, name: str = "large") -> NearLine:
        """To the present life of a member."""
        return self.starters[name].lines[-1]

    async def assert_idle(self) -> None:
        """The present lives hold nothing, and nobody waits here."""
        for name, supervisor in self.supervisors.items():
            host, mailbox = self.starters[name].host, supervisor.mailbox
            await poll(lambda host=host: host.model.stats().sequences == 0, f"{name} forgot its sequences")
            await poll(lambda host=host: host.model.stats().used_blocks == 0, f"{name} gave back its blocks")
            gc.collect()  # exceptions hold what was on its way
            await poll(lambda host=host, mailbox=mailbox: cleared(host, mailbox), f"{name} cleared its shelf")
            assert not supervisor._calls
            assert not supervisor._sent
            assert not len(supervisor._suspects)
            if mailbox is not None:
                assert not mailbox.in_flight
                assert mailbox.num_sequences == 0

    async def finish(self) -> None:
        """Close the pool and all hosts there ever were."""
        await self.close()
        for starter in self.starters.values():
            for line in starter.lines:
                await asyncio.gather(*line.tasks, return_exceptions=True)
