"""What goes between a coordinator and its model actors: operations, what a sequence has become, results, signs of life.

Posts and replies are lists of plain tuples, pickled once each; the first place of a tuple says what it is.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from decoding.model import Busy
from decoding.operations import Operation
from decoding.sequence import Sequence
from engine.costs.step_time import StepTime
from turnout.calls import CacheStats, MemberStats
from turnout.config import TurnoutConfig
from turnout.cost import ModelMeter
from turnout.tracing import header
from turnout.types import FinishReason, Token, TokenKind

if TYPE_CHECKING:
    from actors.connection import ActorConnection

HEARTBEAT_S = 1.0  # an actor that has nothing to say says so this often

KINDS = tuple(TokenKind)
FINISHES = (None, *FinishReason)
# Counts of a meter as they are now; all others travel as what was added.
ABSOLUTE = ("cached_tokens", "fetched_tokens")
# `Sequence.append` counts generated tokens, here and there.
COUNTED = tuple(f.name for f in fields(ModelMeter) if f.name not in ("num_parameters", "generated_tokens", *ABSOLUTE))


class RequestKind(IntEnum):
    """First place of a message to an actor."""

    CALL = 0  # number, update, operation, and as far as there are any: components, needed tensors, span
    CANCEL = 1  # number
    FORK = 2  # sequence, twin, seed
    RELEASE = 3  # sequence
    CONSTANT = 4  # number, bytes: a value that later messages name by its number
    FORGET = 5  # numbers of components that are garbage at the coordinator
    DROP = 6  # ids of tensors on the store without a handle
    SHIP = 7  # ids, rank, ticket: send tensors of the store to another actor
    PARTS = 8  # what travelled with a call that could not be sent after all
    DEPARTED = 9  # a tenant whose texts nothing is to be known of any more


class ReplyKind(IntEnum):
    """First place of a message from an actor."""

    DONE = 0  # number, result, and what there is of Grown
    FAILED = 1  # number, exception, and what there is of Grown
    ALIVE = 2  # Load


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What an actor loads.

    Attributes:
        name: the model's, as in the configuration.
        pool: name of its pool.
        config: the whole configuration.
        owner: number of the actor in its replica: names its store, and is its rank in the transport's group.
        life: counts its restarts.
        threads: CPU threads of its forwards; None: all.
        rank: of the process among those that one copy is split over; 0 leads.
        world: how many these are.
        address: where rank 0 waits for the others; unused with one.
        port: there.
        listen_fd: of the socket that listens there already, in rank 0's process; None: none does.
        timeout_s: time all have to come.
        host: "module:class" of what answers in the actor, `ModelWorker` or a subclass.
    """

    name: str
    pool: str
    config: TurnoutConfig
    owner: int
    life: int
    threads: int | None = None
    rank: int = 0
    world: int = 1
    address: str = ""
    port: int = 0
    listen_fd: int | None = None
    timeout_s: float = 30.0
    host: str = "actors.model_worker:ModelWorker"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What an actor says of its model and of itself.

    Attributes:
        name: the model's.
        architecture: as Hugging Face names it.
        num_parameters: every weight once.
        vocab_size: of the checkpoint; after `begin`, of the pool.
        max_length: longest sequence, tokens; after `begin`, as its memory allows.
        num_layers: decoder layers.
        digest: of configuration and weights.
        code: digest of the program's sources there.
        versions: of Python, torch and Ray.
        node_ip: address of its node.
        node_id: Ray's name of the node; empty outside Ray.
        pid: of its process.
        numerics: class of what computes it, see `engine.fingerprint.numerics_class`.
        token_bytes: KV of one token as it is moved; 0 before `begin`.
        by_length: see `decoding.model.Model`.
        times: its cost model; None before `begin`.
    """

    name: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_length: int
    num_layers: int
    digest: str
    code: str
    versions: dict[str, str]
    node_ip: str
    node_id: str
    pid: int
    numerics: str = ""
    token_bytes: int = 0
    by_length: bool = False
    times: StepTime | None = None

    @property
    def place(self) -> str:
        """Node and process, for people."""
        return f"{self.node_ip} pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Load:
    """A sign of life: what an actor holds now.

    Attributes:
        stats: of its model.
        busy: what it works on.
        step_seconds: of a decode step.
        times: its cost model.
        cache: what its prefix store did.
        stored: tensors on its store.
        in_flight: operations it works on.
    """

    stats: MemberStats
    busy: Busy
    step_seconds: float
    times: StepTime | None
    cache: CacheStats | None
    stored: int = 0
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class PendingCall:
    """One operation on its way. It can be sent again to another life of the actor: it names only what is here.

    Attributes:
        op: which.
        seq: of which sequence.
        future: gets the result, once; an actor that dies leaves it open.
        released: the sequence was given back meanwhile: the call fails when it is sent.
        base: length of the sequence when it was last sent.
        trace: `traceparent` of the span it is part of; "" where it is not traced.
    """

    op: Operation[Any]
    seq: Sequence
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    released: bool = False
    base: int = 0
    trace: str = field(default_factory=header)

    def renew(self) -> None:
        """Wait once more: its last attempt has failed in a way that another can mend."""
        self.future = asyncio.get_running_loop().create_future()


class Supervisor(Protocol):
    """Keeps one actor alive: what `RemoteModel` talks to.

    Attributes:
        card: what the actor said of itself, at first; models and code of later lives are the same.
        connection: the present life; None while there is none.
        restarts: lives that ended.
    """

    @property
    def card(self) -> ModelCard:
        """See `Supervisor`."""
        ...

    @property
    def connection(self) -> ActorConnection | None:
        """See `Supervisor`."""
        ...

    @property
    def restarts(self) -> int:
        """See `Supervisor`."""
        ...

    async def submit(self, call: PendingCall) -> Any:
        """Send a call, again where its actor died, and wait for the result; cancelled, it ends the call there.

        Raises:
            TurnoutError: what the operation raised; INTERRUPTED where no life of the actor will answer it.
        """
        ...

    def tell(self, message: Callable[[ActorConnection], None]) -> None:
        """Let something be said to the present life; nothing happens where there is none, for a new one knows nothing.

        Args:
            message: says it.
        """
        ...

    async def close(self) -> None:
        """End the actor."""
        ...


class Update(NamedTuple):
    """What an actor's replica of a sequence lacks.

    Attributes:
        sid: number of the sequence in this connection.
        base: tokens the replica must have.
        tokens: what follows, packed.
        finish: place in FINISHES.
        whole: everything else of the sequence, where the actor has no replica or must write it anew; else None.
        open: whether an operation that appends may be under way: then the replica may be longer.
        sampling: other sampling parameters than before, else None.
    """

    sid: int
    base: int
    tokens: tuple[Any, ...] = ()
    finish: int = 0
    whole: tuple[Any, ...] | None = None
    open: bool = False
    sampling: Any = None


class Grown(NamedTuple):
    """Effects of an operation apart from its result.

    Attributes:
        tokens: what the replica appended during it, packed; empty for operations that append nothing.
        counts: ABSOLUTE of the model's meter as they are, then COUNTED since the last reply; without zeros at the end.
        states: new state of components that it carries: (place, state).
    """

    tokens: tuple[Any, ...] = ()
    counts: tuple[float, ...] = ()
    states: tuple[tuple[int, bytes], ...] = ()


def trimmed(values: list[Any]) -> tuple[Any, ...]:
    """Return values as a tuple without what is zero, None or empty at its end."""
    while values and not values[-1]:
        values.pop()
    return tuple(values)


def pack_ids(ids: Items[int]) -> bytes:
    """Token ids, 4 bytes each."""
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """What `pack_ids` packed."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


def pack_tokens(tokens: Iterable[Token]) -> tuple[Any, ...]:
    """Tokens as runs: (source, kind, ids) where nothing else is known of them, else whole."""
    runs: list[Any] = []
    ids: list[int] = []
    last: tuple[str, TokenKind] | None = None
    for token in tokens:
        known = token.logprob is not None or token.entropy_bits is not None or token.surprise_bits is not None
        if known or token.top or token.rejected:
            runs.append((token.source, KINDS.index(token.kind), *token[:1], *token[3:]))
            last = None
        elif last == (token.source, token.kind):
            ids.append(token.id)
        else:
            ids, last = [token.id], (token.source, token.kind)
            runs.append((token.source, KINDS.index(token.kind), ids))
    return tuple(runs)


def unpack_tokens(runs: tuple[Any, ...]) -> list[Token]:
    """What `pack_tokens` packed."""
    tokens: list[Token] = []
    for source, kind, ids, *rest in runs:
        if rest:
            tokens.append(Token(ids, source, KINDS[kind], *rest))
        else:
            tokens += [Token(each, source, KINDS[kind]) for each in ids]
    return tokens
