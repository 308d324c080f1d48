"""A sequence on both sides of the wire: the replica next to a model, and what the coordinator knows of it.

The coordinator's sequence is the truth. Each operation brings what the replica lacks and how long it must be before, so
that a message that was lost or came twice is an error and never a wrong token.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from actors.protocol import (
    ABSOLUTE,
    COUNTED,
    FINISHES,
    Update,
    pack_ids,
    pack_tokens,
    trimmed,
    unpack_ids,
    unpack_tokens,
)
from decoding.constraints.base import Constraint
from decoding.model import Model
from decoding.sequence import Sequence
from decoding.thinking import Thinking
from decoding.thinking_constraint import look_astride
from pool.reasoning import answer_text, bound
from pool.stop_strings import detokenizer_of, text_of
from pool.text import TextTokenizer
from turnout.cost import ModelMeter
from turnout.errors import Code, TurnoutError
from turnout.structure import Structure
from turnout.types import Token

NO_CONSTANTS: Mapping[int, Any] = MappingProxyType({})
KEPT = 3  # drafts and readings of a sequence that can still be named


@dataclass(slots=True)
class ReplicaView:
    """What the coordinator knows of one replica.

    Attributes:
        sid: its number.
        length: tokens it has.
        sampling: the parameters it has.
        stale: it may have other tokens than the sequence and is to be written anew; also where there is none yet.
        appending: operations under way that make it longer.
        kept: drafts and readings that the actor keeps, by the number of the call that made them.
        networks: of its logits processors, as it has them.
    """

    sid: int
    length: int = 0
    sampling: Any = None
    stale: bool = True
    appending: int = 0
    kept: OrderedDict[int, tuple[Any, ...]] = field(default_factory=OrderedDict)
    networks: Any = None

    def update(self, seq: Sequence, number_of: Callable[[Any], int] = id) -> Update:
        """What the replica lacks; it is taken for having it from now on.

        Args:
            seq: the sequence.
            number_of: number of a network, which the actor has from then on.
        """
        finish = FINISHES.index(seq.finish_reason)
        if self.stale or (seq.networks is not self.networks and (seq.networks or self.networks)):
            update = self._whole(seq, finish, {place: number_of(each) for place, each in seq.networks.items()})
            self.stale, self.networks = False, seq.networks
        else:
            behind = len(seq) - self.length
            new = pack_tokens(seq.generated[-behind:]) if behind else ()
            sampling = None if seq.sampling is self.sampling else seq.sampling
            update = Update(self.sid, self.length, new, finish, None, self.appending > 0, sampling)
        self.length, self.sampling = len(seq), seq.sampling
        return update

    def _whole(self, seq: Sequence, finish: int, networks: dict[int, int]) -> Update:
        start = len(seq) - len(seq.generated)
        watches = seq.stop is not None and bool(seq.sampling.stop)
        whole = (
            pack_ids(seq.tokens[:start]),
            seq.num_prompt_tokens,
            seq.seed,
            seq.end_ids,
            seq.sharing,
            seq.tenant,
            seq.owner,
            seq.lossy,
            seq.low_priority,
            watches,
            seq.constraint is not None,
            seq.renderings,
            seq.thinking,
            networks,
        )
        return Update(self.sid, start, pack_tokens(seq.generated), finish, whole, False, seq.sampling)

    def twin(self, sid: int) -> ReplicaView:
        """Of a replica that was forked off this one just now."""
        return ReplicaView(sid, self.length, self.sampling, self.stale or self.appending > 0, networks=self.networks)

    def place_of(self, thing: Any) -> int | None:
        """Return twice the number of the call under which the actor keeps this very object, plus its place there.

        Returns:
            None where the actor does not keep it.
        """
        for number, things in self.kept.items():
            for place, each in enumerate(things):
                if each is thing:
                    return 2 * number + place
        return None


def keep(kept: OrderedDict[int, tuple[Any, ...]], number: int, things: tuple[Any, ...]) -> None:
    """Keep what a call had or made; both sides forget the oldest in the order in which the actor answered."""
    if things:
        kept[number] = things
    while len(kept) > KEPT:
        kept.popitem(last=False)


@dataclass(slots=True, eq=False)
class Replica:
    """A sequence next to its model.

    Attributes:
        seq: what the model works on.
        ending: cancelled operations that have not ended yet.
        reported: counts of the meter that the coordinator has.
        kept: drafts and readings by the number of the call that made them.
        fault: what failed in an operation without an answer; the next one fails with it.
        making: compiles what the answer must fit; shared with twins. None: nothing is to be waited for.
    """

    seq: Sequence
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    reported: list[float] = field(default_factory=lambda: [0] * len(COUNTED))
    kept: OrderedDict[int, tuple[Any, ...]] = field(default_factory=OrderedDict)
    fault: Exception | None = None
    making: asyncio.Task[Constraint] | None = None

    async def ready(self) -> None:
        """Wait until what the answer must fit is compiled.

        Raises:
            TurnoutError: it cannot be.
        """
        while (making := self.making) is not None:
            compiled = await asyncio.shield(making)
            if self.making is making:
                self.seq.constraint, self.making = compiled.clone(), None

    def counts(self, name: str) -> tuple[float, ...]:
        """Return ABSOLUTE, then COUNTED since the last time; empty where the model has done nothing."""
        meter = self.seq.meter.models.get(name)
        if meter is None:
            return ()
        now = [getattr(meter, count) for count in COUNTED]
        added = [count - before for count, before in zip(now, self.reported, strict=True)]
        self.reported = now
        return trimmed([*(getattr(meter, count) for count in ABSOLUTE), *added]) or (0,)


def add_counts(meter: ModelMeter, counts: tuple[float, ...], discarded: int = 0) -> None:
    """Enter what `Replica.counts` returned, and how many tokens were written after their call was given up."""
    for place, name in enumerate(ABSOLUTE):
        setattr(meter, name, counts[place] if place < len(counts) else 0)
    for name, count in zip(COUNTED, counts[len(ABSOLUTE) :], strict=False):
        if count:
            setattr(meter, name, getattr(meter, name) + count)
    meter.discarded_tokens += discarded


class Replicas:
    """All replicas of an actor.

    Args:
        model: whose caches they have.
        tokenizer: makes the text that stop strings are found in.
        constants: values by number, networks among them.
    """

    def __init__(self, model: Model, tokenizer: TextTokenizer, constants: Mapping[int, Any] = NO_CONSTANTS) -> None:
        self._model = model
        self._constants = constants
        self._tokenizer = tokenizer
        self._replicas: dict[int, Replica] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    async def update(self, update: Update) -> Replica:
        """Bring a replica up to its sequence.

        Raises:
            TurnoutError: INTERNAL: it is not what the coordinator thinks.
        """
        replica = self._replicas.get(update.sid)
        if update.whole is not None:
            replica = await self._written(replica, update)
        elif replica is None:
            raise _apart(update, "there is no such replica")
        elif len(replica.seq) != update.base and not (update.open and not update.tokens):
            raise _apart(update, f"it has {len(replica.seq)} tokens")
        seq = replica.seq
        if update.sampling is not None:
            seq.sampling = update.sampling
        if update.tokens:
            _append(seq, unpack_tokens(update.tokens))
        if not update.open:
            seq.finish_reason = FINISHES[update.finish]
        return replica

    async def _written(self, replica: Replica | None, update: Update) -> Replica:
        """A replica made, or made anew in place, so that its cache stays as far as it agrees."""
        assert update.whole is not None
        (
            prompt,
            num_prompt,
            seed,
            ends,
            sharing,
            tenant,
            owner,
            lossy,
            low_priority,
            watches,
            held,
            rendered,
            thinking,
            networks,
        ) = update.whole
        tokens = unpack_ids(prompt)
        if replica is None:
            fresh = Sequence(tokens, update.sampling, seed, (), None, sharing, tenant, lossy, low_priority)
            replica = self._replicas[update.sid] = Replica(fresh)
        elif replica.ending:
            await asyncio.wait(replica.ending)
        seq = replica.seq
        seq.owner = owner
        for companion in seq.companions.values():  # it may have followed tokens that are no longer there
            self._model.release(companion)
        seq.companions.clear()
        seq.renderings = rendered
        seq.tokens[:] = tokens
        seq.networks = {place: self._constants[number] for place, number in networks.items()}
        seq.chain = None  # what its processors know is of the tokens that it had
        seq.generated.clear()
        seq.output_counts.clear()
        seq.num_prompt_tokens = num_prompt
        seq.prompt_set = frozenset(tokens[:num_prompt])
        seq._ends = ends
        seq.thinking = thinking
        seq.stop = None
        if watches:
            text = detokenizer_of(self._tokenizer, tokens[:num_prompt], update.sampling)
            seq.stop = text_of(answer_text(text, thinking, self._tokenizer, keeps=False), update.sampling)
        structure = update.sampling.structure if held else None
        seq.constraint, replica.making = bound(None, thinking, self._tokenizer, structure), None
        if structure is not None:
            # In a task of its own: messages for other sequences do not wait for it.
            replica.making = asyncio.create_task(self._made(structure, tenant, thinking))
        seq.finish_reason = None
        return replica

    async def _made(self, structure: Structure, tenant: str, thinking: Thinking | None) -> Constraint:
        """Compile what the answer must fit, after its thinking."""
        inner = (await self._tokenizer.structures.made(structure, tenant)).clone()
        await look_astride(thinking, self._tokenizer, len(self._tokenizer))
        made = bound(inner, thinking, self._tokenizer, structure)
        assert made is not None
        return made

    def fork(self, sid: int, twin: int, seed: int | None) -> None:
        """Let a sequence have a twin that shares its cache; nothing where there is no replica: its twin needs none."""
        replica = self._replicas.get(sid)
        if replica is not None:
            self._replicas[twin] = Replica(self._model.fork(replica.seq, seed), making=replica.making)

    def release(self, sid: int) -> None:
        """Forget a sequence."""
        replica = self._replicas.pop(sid, None)
        if replica is not None:
            self._model.release(replica.seq)

    def clear(self) -> None:
        """Forget all."""
        for sid in list(self._replicas):
            self.release(sid)


def _append(seq: Sequence, tokens: list[Token]) -> None:
    """Add tokens that the coordinator has accepted; whether they end the answer it says itself."""
    for token in tokens:
        seq.tokens.append(token.id)
        seq.generated.append(token)
        seq.output_counts[token.id] = seq.output_counts.get(token.id, 0) + 1
        if seq.stop is not None:
            seq.stop.feed(token.id)


def _apart(update: Update, what: str) -> TurnoutError:
    message = f"a sequence's replica is out of step: {update.base} tokens were expected, {what}"
    return TurnoutError(Code.INTERNAL, message)
