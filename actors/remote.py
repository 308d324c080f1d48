"""A model that runs in an actor: the `Model` protocol, one message for each operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch

from actors.pickling import TensorHandle
from actors.wire import Call, Load, Op, Post, Supervisor
from decoding.drafters.base import Drafter, Room
from decoding.lengths.base import LengthPolicy
from decoding.model import Busy, Row, Score, Until, Want
from decoding.sequence import Sequence
from decoding.sketch import Sketch
from decoding.stores import Stores
from decoding.tree import DraftTree
from decoding.verifiers.base import Verdict, Verifier
from turnout.calls import CacheStats, MemberStats
from turnout.errors import Code, TurnoutError
from turnout.types import Segment


class RemoteModel:
    """A model elsewhere. Implements `engine.endpoint.PoolMember`.

    Every operation is one message there and one back, however many tokens or forwards it takes. The sequence given is
    the truth: what the actor lacks of it comes with each message, and what the actor appends is appended to it when
    the reply comes, so an actor that dies loses nothing but time. Drafters, rules and policies given stay beside the
    model between calls; what changes of them comes back. Tensors of drafts and verdicts stay there too.

    Load, step times and statistics are as the actor last told, at most about a second ago.

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
        self.stores = Stores()
        self.supervisor = supervisor
        self._busy: dict[Sequence, set[Call]] = {}

    async def _ask(self, op: Op, seq: Sequence, *args: Any) -> Any:
        call = Call(op, seq, args)
        calls = self._busy.setdefault(seq, set())
        calls.add(call)
        try:
            return await self.supervisor.submit(call)
        finally:
            calls.discard(call)
            if not calls and self._busy.get(seq) is calls:
                del self._busy[seq]

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: Want = Want(), every: bool = False
    ) -> list[Row]:
        """See `decoding.model.Model.extend`."""
        rows: list[Row] = await self._ask(Op.EXTEND, seq, tokens, want, every)
        return rows

    async def decode(self, seq: Sequence, until: Until = Until()) -> Segment:
        """See `decoding.model.Model.decode`."""
        segment: Segment = await self._ask(Op.DECODE, seq, until)
        return segment

    async def expand(self, seq: Sequence, tree: DraftTree, start: int, want: Want) -> list[Row]:
        """See `decoding.model.Model.expand`."""
        rows: list[Row] = await self._ask(Op.EXPAND, seq, tree, start, want)
        return rows

    async def sketch(self, seq: Sequence, sketch: Sketch, want: Want) -> list[Row]:
        """See `decoding.model.Model.sketch`; an exit must be picklable."""
        rows: list[Row] = await self._ask(Op.SKETCH, seq, sketch, want)
        return rows

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: list[tuple[int, ...]], want: Want, normed: bool = False
    ) -> list[Row]:
        """See `decoding.model.Model.read`."""
        rows: list[Row] = await self._ask(Op.READ, seq, states, paths, want, normed)
        return rows

    def embed(self, tokens: list[int]) -> NoReturn:
        """There are no weights here: only parts that run beside the model may ask for its embeddings.

        Raises:
            TurnoutError: INTERNAL.
        """
        message = f"the embeddings of {self.name} are beside the model, at {self.supervisor.card.place}"
        raise TurnoutError(Code.INTERNAL, message)

    async def propose(self, seq: Sequence, drafter: Drafter, room: Room, length: LengthPolicy) -> DraftTree:
        """See `decoding.model.Model.propose`."""
        tree: DraftTree = await self._ask(Op.PROPOSE, seq, drafter, room, length)
        return tree

    async def verify(
        self, seq: Sequence, draft: DraftTree, verifier: Verifier, want: Want = Want(draw=None)
    ) -> Verdict:
        """See `decoding.model.Model.verify`; tensors that only the verifier wanted are not in the verdict's rows."""
        verdict: Verdict = await self._ask(Op.VERIFY, seq, draft, verifier, want)
        return verdict

    def teach(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: Verdict) -> None:
        """See `decoding.model.Model.teach`; a fault in it is raised by the next operation on the sequence."""
        if type(drafter).observe is not Drafter.observe:
            call = Call(Op.TEACH, seq, (drafter, draft, verdict))
            self.supervisor.tell(lambda mailbox: mailbox.teach(call))

    async def score(self, seq: Sequence, continuations: list[tuple[int, ...]], top: int = 0) -> list[Score]:
        """See `decoding.model.Model.score`."""
        scores: list[Score] = await self._ask(Op.SCORE, seq, continuations, top)
        return scores

    async def absorb(self, seq: Sequence) -> None:
        """See `decoding.model.Model.absorb`."""
        await self._ask(Op.ABSORB, seq)

    async def held_kv(self, seq: Sequence) -> int:
        """Leading tokens of a sequence whose keys and values it has; see `engine.moving.held_tokens`."""
        held: int = await self._ask(Op.HELD_KV, seq)
        return held

    async def export_kv(
        self, seq: Sequence, start: int = 0, stop: int | None = None, shelved: bool = False
    ) -> torch.Tensor | TensorHandle:
        """Keys and values of cached tokens; see `engine.moving.export_kv`.

        Args:
            seq: whose tokens.
            start: first token.
            stop: end of the tokens; absent: of the sequence.
            shelved: leave them on the actor's shelf and give their handle; otherwise they come here, to the CPU.
        """
        kv: torch.Tensor | TensorHandle = await self._ask(Op.EXPORT_KV, seq, start, stop, shelved)
        return kv

    async def import_kv(self, seq: Sequence, start: int, kv: torch.Tensor | TensorHandle) -> int:
        """Put keys and values into its pool, those of a handle from actor to actor; see `engine.moving.import_kv`."""
        kept: int = await self._ask(Op.IMPORT_KV, seq, start, kv)
        return kept

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`."""
        twin = seq.fork(seed)
        self.supervisor.tell(lambda mailbox: mailbox.fork(seq, twin))
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        for call in self._busy.get(seq, ()):
            call.released = True
        self.supervisor.tell(lambda mailbox: mailbox.release(seq))

    def forget(self, tenant: str) -> None:
        """See `engine.endpoint.PoolMember.forget`; most is learned beside the model."""
        self.stores.forget(tenant)
        self.supervisor.tell(lambda mailbox: mailbox.say((Post.DEPARTED, tenant)))

    @property
    def _load(self) -> Load | None:
        mailbox = self.supervisor.mailbox
        return mailbox.load if mailbox is not None else None

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
        mailbox = self.supervisor.mailbox
        place = mailbox.card.place if mailbox is not None else ""
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
