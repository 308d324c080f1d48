"""A model that runs in an actor: `decoding.model.Model`, one message for each operation."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn, TypeVar

from actors.protocol import Load, PendingCall, RequestKind, Supervisor
from decoding.drafter_state import Stores
from decoding.drafters.base import Drafter
from decoding.model import Busy
from decoding.operations import Observe, Operation
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from engine.member import PoolMember
from turnout.calls import CacheStats, MemberStats
from turnout.errors import Code, TurnoutError

R = TypeVar("R")


class RemoteModel(PoolMember):
    """A model elsewhere.

    Every operation is one message there and one back, however many tokens or forwards it takes. The sequence given is
    the truth: what the actor lacks of it comes with each message, and what the actor appends is appended to it when
    the reply comes, so an actor that dies loses nothing but time. Copies of drafters, rules and policies stay next to
    the model between calls; their new state comes back. Tensors of drafts and verdicts stay there too.

    Load, step times and statistics are as the actor last reported, at most about a second ago.

    Args:
        name: what requests and meters call it.
        supervisor: keeps the actor alive.
    """

    def __init__(self, name: str, supervisor: Supervisor) -> None:
        card = supervisor.card
        self.name = name
        self.architecture = card.architecture
        self.num_parameters = card.num_parameters
        self.vocab_size = card.vocab_size
        self.max_length = card.max_length
        self.num_layers = card.num_layers
        self.digest = card.digest
        self.numerics = card.numerics
        self.token_bytes = card.token_bytes
        self.by_length = card.by_length
        self.stores = Stores()
        self.supervisor = supervisor
        self._busy: dict[Sequence, set[PendingCall]] = {}

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        call = PendingCall(op, seq)
        calls = self._busy.setdefault(seq, set())
        calls.add(call)
        try:
            value: R = await self.supervisor.submit(call)
            return value
        finally:
            calls.discard(call)
            if not calls and self._busy.get(seq) is calls:
                del self._busy[seq]

    def embed(self, tokens: list[int]) -> NoReturn:
        """Refuse: there are no weights here; only components that run next to the model may ask for its embeddings.

        Raises:
            TurnoutError: INTERNAL.
        """
        message = f"the embeddings of {self.name} are next to the model, at {self.supervisor.card.place}"
        raise TurnoutError(Code.INTERNAL, message)

    def observe(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: VerifyResult) -> None:
        """See `decoding.model.Model.observe`; a fault in it is raised by the next operation on the sequence."""
        if type(drafter).observe is not Drafter.observe:
            call = PendingCall(Observe(drafter, draft, verdict), seq)
            self.supervisor.tell(lambda connection: connection.observe(call))

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`."""
        twin = seq.fork(seed)
        self.supervisor.tell(lambda connection: connection.fork(seq, twin))
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        for call in self._busy.get(seq, ()):
            call.released = True
        self.supervisor.tell(lambda connection: connection.release(seq))

    def forget(self, tenant: str) -> None:
        """See `engine.member.PoolMember.forget`; most is learned in the actor."""
        self.stores.forget(tenant)
        self.supervisor.tell(lambda connection: connection.say((RequestKind.DEPARTED, tenant)))

    @property
    def _load(self) -> Load | None:
        connection = self.supervisor.connection
        return connection.load if connection is not None else None

    def step_seconds(self) -> float:
        """See `decoding.model.Model.step_seconds`."""
        load = self._load
        return load.step_seconds if load is not None else 0.0

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        """See `decoding.model.Model.forward_seconds`."""
        load = self._load
        times = load.times if load is not None else self.supervisor.card.times
        return times.seconds(fed, attended, sequences) if times is not None else 0.0

    def busy(self) -> Busy:
        """See `decoding.model.Model.busy`."""
        load = self._load
        return load.busy if load is not None else Busy(0, 0)

    def stats(self) -> MemberStats:
        """What it holds; its place is the node and process of its actor."""
        load, restarts = self._load, self.supervisor.restarts
        connection = self.supervisor.connection
        place = connection.card.place if connection is not None else ""
        if load is None:
            return MemberStats(self.name, 0, 0, 0, 0, 0, 0, 0.0, place, restarts)
        return replace(load.stats, model=self.name, place=place, restarts=restarts)

    def cache_stats(self) -> CacheStats | None:
        """What its prefix store did; None: it has none."""
        load = self._load
        return load.cache if load is not None else None

    async def close(self) -> None:
        """End the actor."""
        await self.supervisor.close()
