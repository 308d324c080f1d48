"""Pools whose models run behind the wire: in this process, or in real actors, without anybody who restarts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import decoding.operations
from actors.connection import ActorConnection, Channel, ConnectionGroup
from actors.model_worker import ModelWorker
from actors.protocol import MemberSpec, ModelCard, PendingCall
from actors.remote import RemoteModel
from engine.costs.step_time import StepCost, StepTime
from pool.components import open_parts, prepare
from pool.local_pool import LocalPool
from pool.pool import Pool
from turnout.config import TurnoutConfig
from turnout.errors import Interrupted

LEAST_BYTES = 128


class FixedTimes(StepTime):
    """A cost model that learns nothing: what depends on forecasts is the same everywhere."""

    def __init__(self) -> None:
        super().__init__(StepCost(1e-3, (1, 16), (1e-5, 1e-4), 1e-8, 0.0, 128, 1e-5))

    def observe(self, fed: int, attended: int, sequences: int, seconds: float) -> None:
        """Nothing."""


def fix_times(model: Any) -> None:
    """Give an engine model `FixedTimes`."""
    model.step_time = model.batcher.times = FixedTimes()


class Board:
    """Where hosts of one process lay their tensors for each other: by sender and receiver, in order."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], asyncio.Queue[tuple[int, Any]]] = {}
        self.num_sent = 0

    def lane(self, source: int, to: int) -> asyncio.Queue[tuple[int, Any]]:
        return self.lanes.setdefault((source, to), asyncio.Queue())


class BoardTransport:
    """A `Transport` over a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.generation: int | None = 1
        self._board = board
        self._rank = rank

    def ship(self, tensors: list[torch.Tensor], to: int, ticket: int) -> None:
        self._board.num_sent += len(tensors)
        self._board.lane(self._rank, to).put_nowait((ticket, tensors))

    def refuse(self, to: int, ticket: int) -> None:
        self._board.lane(self._rank, to).put_nowait((ticket, None))

    def receive(self, metas: list[Any], source: int, ticket: int, timeout_s: float) -> Awaitable[list[torch.Tensor]]:
        lane = self._board.lane(source, self._rank)

        async def receive() -> list[torch.Tensor]:
            got, tensors = await asyncio.wait_for(lane.get(), timeout_s)
            assert got == ticket, "a pair's transfers are in one order on both sides"
            if tensors is None:
                raise Interrupted("the sender has them no longer")
            assert [(tuple(each.shape), each.dtype) for each in tensors] == metas
            return tensors

        return receive()

    async def close(self) -> None:
        """Nothing."""


class DirectChannel(Channel):
    """To a host in this process.

    Args:
        host: it.

    Attributes:
        meddle: given each post, says which posts really go out, in order.
        cut: ends the replies.
        end: makes what they end with.
    """

    def __init__(self, host: ModelWorker) -> None:
        self.host = host
        self.meddle: Callable[[int, bytes], list[tuple[int, bytes]]] = lambda number, blob: [(number, blob)]
        self.posts: list[bytes] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.cut = asyncio.Event()
        self.end: Callable[[], Exception] = lambda: ConnectionError("the actor died")

    def post(self, number: int, blob: bytes) -> None:
        self.posts.append(blob)
        for sent in self.meddle(number, blob):
            task = asyncio.get_running_loop().create_task(self.host.post(*sent))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def replies(self) -> AsyncIterator[bytes]:
        items = self.host.replies()
        cut = asyncio.ensure_future(self.cut.wait())
        while True:
            item = asyncio.ensure_future(anext(items, None))  # type: ignore[arg-type]
            try:
                await asyncio.wait([item, cut], return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    raise self.end()
                blob = item.result()
            finally:
                if not item.done() or cut.done():
                    item.cancel()
                    cut.cancel()
            if blob is None:
                cut.cancel()
                return
            yield blob


@dataclass
class OneIncarnation:
    """A supervisor of one connection, which it can be told to replace. Calls are sent again to the next one."""

    card: ModelCard
    exchange: ConnectionGroup
    owner: int
    connection: ActorConnection | None = None
    restarts: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, line: Channel) -> ActorConnection:
        life = self.restarts
        self.connection = ActorConnection(line, self.card, life, self.owner, self.exchange)
        self.opened.set()
        return self.connection

    def end(self) -> None:
        self.connection = None
        self.restarts += 1
        self.opened.clear()

    async def submit(self, call: PendingCall) -> Any:
        while True:
            await self.opened.wait()
            connection = self.connection
            assert connection is not None
            connection.send(call)
            lost = asyncio.ensure_future(connection.lost.wait())
            try:
                await asyncio.wait([call.future, lost], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                call.future.cancel()
                connection.cancel(call)
                raise
            finally:
                lost.cancel()
            if call.future.done():
                return call.future.result()
            if self.connection is connection:
                self.end()

    def tell(self, message: Callable[[ActorConnection], None]) -> None:
        if self.connection is not None:
            message(self.connection)

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()


class RemotePool(Pool):
    """A pool over remote models, as tests look into it."""

    exchange: ConnectionGroup
    supervisors: dict[str, OneIncarnation]
    hosts: dict[str, ModelWorker]
    lines: dict[str, DirectChannel]
    board: Board

    def __init__(self, name: str, config: TurnoutConfig, members: dict[str, RemoteModel]) -> None:
        parts = open_parts(name, config)
        shared = (parts.roles, parts.tokenizer, parts.places, parts.default, parts.artifacts)
        super().__init__(name, members, *shared, parts.foreign)
        prepare(self, config)

    async def settle(self) -> None:
        """Wait until everything that was said has been applied."""
        await poll(lambda: all(not each._outbox for each in self._connections), "posts went out")
        for line in self.lines.values():
            while line.tasks:
                await asyncio.gather(*line.tasks, return_exceptions=True)
        await poll(lambda: all(not host._tasks for host in self.hosts.values()), "operations ended")
        await poll(lambda: all(not each.in_flight for each in self._connections), "replies came")
        held = [host.model.stats for host in self.hosts.values()]
        await poll(lambda: all(not each().used_blocks for each in held), "forwards in progress ended")

    @property
    def _connections(self) -> list[ActorConnection]:
        return [each.connection for each in self.supervisors.values() if each.connection is not None]

    def assert_idle(self) -> None:
        """Nothing is left on either side."""
        for connection in self._connections:
            assert connection.num_sequences == 0
            assert not connection.in_flight
        for host in self.hosts.values():
            host.model.pool.check_integrity()
            assert len(host._replicas) == 0
            assert host.model.stats().sequences == 0
            assert host.model.stats().used_blocks == 0
            assert len(host.store) == 0
            assert len(host._receiver) == 0


async def poll(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)
    assert condition(), what


class StoringWorker(ModelWorker):
    """Keeps the small tensors of small models on its store too, so that they go the way of large ones."""

    def __init__(self, spec: MemberSpec, address: str = "127.0.0.1", node_id: str = "") -> None:
        super().__init__(spec, address, node_id)
        decoding.operations.LEAST_BYTES = LEAST_BYTES  # type: ignore[misc]


def spec_of(name: str, config: TurnoutConfig, owner: int, pool: str = "pair", life: int = 0) -> MemberSpec:
    return MemberSpec(name, pool, config, owner, life, host="tests.actors.hosts:StoringWorker")


async def open_in_process(
    config: TurnoutConfig, pool: str = "pair", host: type[ModelWorker] = StoringWorker
) -> RemotePool:
    """A pool whose models run in this process, each behind a wire."""
    names = config.pools[pool].members
    board = Board()
    hosts = {name: host(spec_of(name, config, owner, pool)) for owner, name in enumerate(names)}
    cards = {name: each.load() for name, each in hosts.items()}
    foreign = open_parts(pool, config).foreign
    vocab_size = min(card.vocab_size for name, card in cards.items() if name not in foreign)
    exchange = ConnectionGroup(lambda: 1)
    supervisors, lines = {}, {}
    for owner, (name, each) in enumerate(hosts.items()):
        each.transport = each._endpoint._transport = BoardTransport(board, owner)  # type: ignore[assignment]
        card = each.begin(cards[name].vocab_size if name in foreign else vocab_size)
        fix_times(each.model)
        lines[name] = DirectChannel(each)
        supervisors[name] = OneIncarnation(card, exchange, owner)
        supervisors[name].open(lines[name])
    opened = RemotePool(pool, config, {name: RemoteModel(name, supervisors[name]) for name in names})
    opened.exchange, opened.supervisors, opened.hosts, opened.lines = exchange, supervisors, hosts, lines
    opened.board = board
    for each in supervisors.values():
        assert each.connection is not None
        connection = each.connection
        await poll(lambda connection=connection: connection.load is not None, "a first sign of life")
    return opened


async def close_in_process(opened: RemotePool) -> None:
    await opened.close()
    for host in opened.hosts.values():
        await host.stop()


def open_local(config: TurnoutConfig, pool: str = "pair") -> LocalPool:
    """The same pool in one piece."""
    loaded = LocalPool.load(pool, config)
    for engine in loaded.engines.values():
        fix_times(engine)
    return loaded
