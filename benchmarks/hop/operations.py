"""The time of one operation of a remote model, split by where it is spent, and the bytes that a token costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import ray

from actors.connection import ActorConnection, Channel, ConnectionGroup, RayChannel
from actors.group import join
from actors.model_actor import ModelActor
from actors.model_worker import ModelWorker
from actors.protocol import MemberSpec, ModelCard, PendingCall
from actors.remote import RemoteModel
from benchmarks.harness import note
from decoding.model import ReadSpec, StopCondition, WrappedModel
from decoding.operations import Operation as ModelOperation
from decoding.sequence import Sequence
from experiments.pairs import Pair
from pool.components import open_parts
from pool.pool import Pool
from training.data import arithmetic
from turnout.calls import Chunk, GenerateCall
from turnout.types import SamplingParams

R = TypeVar("R")

GENERATION = 1
JOIN_S = 60.0
WARM_UP = 10
PER_SEQUENCE = 10  # operations
LENGTH = 96  # of answers, tokens
PROMPTS = 8
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("speculative", {"drafter": "model_chain", "length": "fixed"}),
    ("speculative", {"length": "fixed", "verifier": "rejection"}),
    ("entropy_adaptive", {}),
    ("cascade", {}),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of operation: medians, in seconds and bytes of one."""

    name: str
    total_s: float
    coordinator_s: float
    client_s: float
    transit_s: float
    actor_s: float
    model_s: float
    bytes_there: float
    bytes_back: float


@dataclass(frozen=True, slots=True)
class Spoken:
    """Traffic of a method for one token of an answer; `messages` are posts to both actors."""

    method: str
    tokens: int
    messages: float
    bytes_there: float
    bytes_back: float
    bytes_between: float


class TimedModel(WrappedModel):
    """A model that notes how long its operations take.

    Attributes:
        seconds: of the last operation.
    """

    seconds = 0.0

    async def do(self, seq: Sequence, op: ModelOperation[R]) -> R:
        """See `decoding.model.Model.do`."""
        start = time.perf_counter()
        try:
            return await self.inner.do(seq, op)
        finally:
            self.seconds = time.perf_counter() - start


class TimedWorker(ModelWorker):
    """Model worker that records for each operation the seconds it spent here, and those its model took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans: list[tuple[float, float]] = []
        self._came = 0.0
        self._timed: TimedModel | None = None

    @property
    def model(self) -> Any:
        """See `ModelWorker.model`."""
        if self._timed is None:
            self._timed = TimedModel(super().model)
        return self._timed

    async def post(self, number: int, blob: bytes) -> None:
        """See `ModelWorker.post`."""
        self._came = time.perf_counter()
        await super().post(number, blob)

    def _say(self, message: tuple[Any, ...]) -> None:
        super()._say(message)
        self.spans.append((time.perf_counter() - self._came, self.model.seconds))


class TimedActor(ModelActor):
    """Tells what its host noted."""

    async def spans(self) -> list[tuple[float, float]]:
        """(seconds here, seconds of the model) of each operation since the last time."""
        host = self._there
        assert isinstance(host, TimedWorker)
        spans, host.spans = host.spans, []
        return spans

    async def traffic(self) -> int:
        """Bytes sent to other actors."""
        return self._there.transport.traffic.bytes_sent


class TimedChannel:
    """A way to an actor that notes how much of the event loop's CPU time Ray's client takes, and counts posts.

    Args:
        line: the way itself.
    """

    def __init__(self, line: Channel) -> None:
        self.client_s = 0.0
        self.posts = 0
        self._channel = line

    def post(self, number: int, blob: bytes) -> None:
        """See `Channel.post`."""
        start = time.thread_time()
        self._channel.post(number, blob)
        self.client_s += time.thread_time() - start
        self.posts += 1

    def replies(self) -> AsyncIterator[bytes]:
        """See `Channel.replies`."""
        return self._channel.replies()


class OneIncarnation:
    """Supervisor of an actor that is expected to live; it restarts nothing.

    Args:
        actor: its handle.
        card: what it said of itself.
        owner: its number.
        exchange: shared with the other actor.
    """

    restarts = 0

    def __init__(self, actor: Any, card: ModelCard, owner: int, exchange: ConnectionGroup) -> None:
        self.actor = actor
        self.card = card
        self.line = TimedChannel(RayChannel(actor))
        self.connection = ActorConnection(self.line, card, 0, owner, exchange)

    async def submit(self, call: PendingCall) -> Any:
        """Send it once."""
        self.connection.send(call)
        return await call.future

    def tell(self, message: Callable[[ActorConnection], None]) -> None:
        """Say it."""
        message(self.connection)

    async def close(self) -> None:
        """End the actor."""
        await self.actor.stop.remote()
        await self.connection.close()
        ray.kill(self.actor)


async def measure_operations(count: int, pair: Pair) -> tuple[list[Operation], list[Spoken]]:
    """Start a pair in two actors, and measure.

    Args:
        count: operations of each kind.
        pair: of models.
    """
    note(f"loading the {pair.title} into two actors")
    supervisors = await _start(pair)
    parts = open_parts(pair.pool, pair.config)
    large = pair.members[1]
    members = {each.card.name: RemoteModel(each.card.name, each) for each in supervisors}
    endpoint = Pool(pair.pool, members, parts.roles, parts.tokenizer, parts.places, parts.default, parts.artifacts)
    prompts = [problem.prompt for problem in arithmetic.heldout(3, PROMPTS)]
    prompt = parts.tokenizer.encode(prompts[0])
    try:
        operations = []
        for name, kind in _KINDS.items():
            note(f"timing {name}")
            operations.append(await _timed(name, kind, members[large], supervisors[1], prompt, count))
        spoken = [await _spoken(endpoint, supervisors, prompts, *method) for method in METHODS]
    finally:
        await endpoint.close()
    return operations, spoken


async def _start(pair: Pair) -> list[OneIncarnation]:
    names = pair.members
    actors = [ray.remote(num_cpus=0)(TimedActor).remote() for _ in names]
    host = f"{__name__}:{TimedWorker.__name__}"
    specs = [
        MemberSpec(name, pair.pool, pair.config, owner, 0, threads=1, host=host) for owner, name in enumerate(names)
    ]
    cards = await asyncio.gather(*(actor.load.remote(spec) for actor, spec in zip(actors, specs, strict=True)))
    vocab_size = min(card.vocab_size for card in cards)
    cards = await asyncio.gather(*(actor.begin.remote(vocab_size) for actor in actors))
    await join(actors, names, GENERATION, JOIN_S)
    exchange = ConnectionGroup(lambda: GENERATION)
    return [OneIncarnation(*each, exchange) for each in zip(actors, cards, range(len(actors)), strict=True)]


ReplyKind = Callable[[RemoteModel, Sequence], Awaitable[Any]]

_KINDS: dict[str, ReplyKind] = {
    "read one row": lambda model, seq: model.extend(seq, (), ReadSpec(), False),
    "decode 1 token": lambda model, seq: model.decode(seq, StopCondition(max_tokens=1)),
    "decode 8 tokens": lambda model, seq: model.decode(seq, StopCondition(max_tokens=8)),
}


async def _timed(
    name: str, kind: ReplyKind, model: RemoteModel, supervisor: OneIncarnation, prompt: list[int], count: int
) -> Operation:
    connection, line = supervisor.connection, supervisor.line
    rows: list[tuple[float, ...]] = []
    for index in range(count + WARM_UP):
        if index % PER_SEQUENCE == 0:
            seq = Sequence(prompt, SamplingParams(max_tokens=LENGTH, ignore_eos=True), index)
            await model.decode(seq, StopCondition(max_tokens=1))
        there, back = connection.bytes_posted, connection.bytes_heard
        client, cpu, start = line.client_s, time.thread_time(), time.perf_counter()
        await kind(model, seq)
        times = time.perf_counter() - start, time.thread_time() - cpu, line.client_s - client
        sizes = connection.bytes_posted - there, connection.bytes_heard - back
        rows.append((*times, *(await supervisor.actor.spans.remote())[-1], *sizes))
        if (index + 1) % PER_SEQUENCE == 0:
            model.release(seq)
    model.release(seq)
    total, loop, client, here, inner, sent, heard = map(float, np.median(np.array(rows[WARM_UP:]), axis=0))
    return Operation(name, total, loop - client, client, total - loop - here, here - inner, inner, sent, heard)


async def _spoken(
    endpoint: Pool, supervisors: list[OneIncarnation], prompts: list[str], method: str, params: dict[str, Any]
) -> Spoken:
    note(f"counting what {method} sends")
    before, tokens = await _counted(supervisors), 0
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=LENGTH, seed=number)
        call = GenerateCall(f"hop-{number}", endpoint.name, sampling, prompt=prompt, method=method, params=params)
        async for event in endpoint.generate(call):
            tokens += len(event.tokens) if isinstance(event, Chunk) else 0
    posts, there, back, between = (
        (after - first) / tokens for after, first in zip(await _counted(supervisors), before, strict=True)
    )
    name = ", ".join([method, *(f"{key}: {value}" for key, value in params.items())])
    return Spoken(name, tokens, posts, there, back, between)


async def _counted(supervisors: list[OneIncarnation]) -> tuple[int, int, int, int]:
    """Posts, bytes posted, bytes heard, bytes from actor to actor."""
    sent = await asyncio.gather(*(each.actor.traffic.remote() for each in supervisors))
    return (
        sum(each.line.posts for each in supervisors),
        sum(each.connection.bytes_posted for each in supervisors),
        sum(each.connection.bytes_heard for each in supervisors),
        sum(sent),
    )
