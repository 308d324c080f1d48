"""Prompts computed elsewhere: actors of the large model that only prefill, and whose KV goes to the one that decodes.

Long prompts make everybody else's decode steps wait. A prefill actor computes them instead; the keys and values go
from actor to actor, into blocks of the decoding model's pool, where the sequence's first operation finds them as it
finds any prefix. Whatever fails on the way, the decoding model computes what is not there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.remote import RemoteModel
from decoding.model import WrappedModel
from decoding.operations import Operation
from decoding.sequence import Sequence
from engine.kv_operations import ExportKV, HeldKV, ImportKV
from engine.member import PoolMember
from turnout.calls import CacheStats, MemberStats
from turnout.errors import Interrupted

R = TypeVar("R")

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # longer than its computation would take, KV is not waited for: its way may have to be built anew


@dataclass(frozen=True, slots=True)
class _Found:
    """Tokens of a sequence that a prefill actor did not compute: those in its cache, and of these those fetched."""

    cached: int
    fetched: int


class PromptMover:
    """Has the beginnings of sequences computed on other actors, before their first operation.

    Args:
        decode: where the KV is wanted.
        prefills: compute prompts; the one with the fewest tokens to compute is asked.
        least_tokens: shortest part of a prompt that is moved.

    Attributes:
        tokens: whose KV was moved.
        moved: prompts.
        failed: prompts that are left to `decode` after all: a prefill actor ended, or something failed.
    """

    def __init__(self, decode: RemoteModel, prefills: Items[RemoteModel], least_tokens: int) -> None:
        self.tokens = 0
        self.moved = 0
        self.failed = 0
        self._decode = decode
        self._prefills = prefills
        self._least_tokens = least_tokens
        self._given = [0] * len(prefills)  # tokens each was given and has not computed
        self._under_way: dict[Sequence, asyncio.Task[None]] = {}
        self._cached: dict[Sequence, _Found | None] = {}

    async def prepare(self, seq: Sequence) -> None:
        """Returns at once but for a sequence's first operations; raises nothing of what fails."""
        if seq in self._cached:
            return
        task = self._under_way.get(seq)
        if task is None:
            if len(seq) - 1 < self._least_tokens or not self._prefills:
                self._cached[seq] = None
                return
            task = asyncio.get_running_loop().create_task(self._move(seq), name="move-prompt")
            self._under_way[seq] = task
        await asyncio.wait([task])

    def correct(self, seq: Sequence) -> None:
        """Count as cached and as fetched only what no model computed for this sequence, without what was moved."""
        found = self._cached.get(seq)
        if found is not None:
            meter = seq.meter.of(self._decode.name, self._decode.num_parameters)
            meter.cached_tokens, meter.fetched_tokens = found.cached, found.fetched

    def fork(self, seq: Sequence, twin: Sequence) -> None:
        """A twin has its KV from the sequence."""
        if seq in self._cached:
            self._cached[twin] = None

    def release(self, seq: Sequence) -> None:
        """Whatever is under way for the sequence ends."""
        self._cached.pop(seq, None)
        task = self._under_way.pop(seq, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _move(self, seq: Sequence) -> None:
        cached: _Found | None = None
        try:
            held = await self._decode.do(seq, HeldKV())
            index = self._least_busy()
            if index is not None and len(seq) - 1 - held >= self._least_tokens:
                cached = await self._carry(index, seq, held)
        except (Interrupted, TimeoutError) as error:
            self.failed += 1
            log.warning("a prompt is computed by the model that decodes: %s", error or "its KV did not come in time")
        except Exception:
            self.failed += 1
            log.exception("moving a prompt failed; the model that decodes computes it")
        finally:
            if self._under_way.pop(seq, None) is not None:  # else it was released
                self._cached[seq] = cached

    def _least_busy(self) -> int | None:
        there = [i for i, member in enumerate(self._prefills) if member.supervisor.connection is not None]
        return min(there, key=self._given.__getitem__, default=None)

    async def _carry(self, index: int, seq: Sequence, held: int) -> _Found:
        """Compute and move; returns what the prefill actor found."""
        prefill, given = self._prefills[index], len(seq) - 1 - held
        self._given[index] += given
        try:
            async with asyncio.timeout(_wait_limit_s(prefill, held, self._given[index])):  # others are before it
                kv = await _while_it_lives(prefill, _computed(prefill, seq, held))
        finally:
            self._given[index] -= given
            prefill.release(seq)
        meter = seq.meter.of(prefill.name, prefill.num_parameters)
        found = _Found(meter.cached_tokens, meter.fetched_tokens)
        async with asyncio.timeout(_wait_limit_s(self._decode, held, given)):
            now = await self._decode.do(seq, ImportKV(held, kv))
        self.moved += 1
        self.tokens += max(now - held, 0)
        return found


class DisaggregatedModel(WrappedModel, PoolMember):
    """A model that lets others, with the same weights, compute long prompts.

    Before a sequence's first operation the part of it that the decoding model has no KV of is looked at; where it is
    long enough, a prefill actor computes it, and its KV is moved. An actor that is away or ends meanwhile is passed
    over. Operations of the sequence wait until this is done. What was moved does not count as cached in the sequence's
    meter: it was computed for it.

    Args:
        decode: answers all operations.
        prefills: compute prompts.
        least_tokens: shortest part of a prompt that is moved.

    Attributes:
        inner: the decoding model.
        prefills: the others.
        mover: what was moved.
    """

    def __init__(self, decode: RemoteModel, prefills: Items[RemoteModel], least_tokens: int) -> None:
        super().__init__(decode)
        self.inner: RemoteModel = decode
        self.prefills = tuple(prefills)
        self.mover = PromptMover(decode, self.prefills, least_tokens)
        self.max_length = min(member.max_length for member in (decode, *self.prefills))

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        if not op.fills_cache:
            return await self.inner.do(seq, op)
        await self.mover.prepare(seq)
        value = await self.inner.do(seq, op)
        self.mover.correct(seq)
        return value

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`."""
        twin = self.inner.fork(seq, seed)
        self.mover.fork(seq, twin)
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        self.mover.release(seq)
        self.inner.release(seq)

    def forget(self, tenant: str) -> None:
        """See `engine.member.PoolMember.forget`; those that compute prompts learn nothing."""
        self.inner.forget(tenant)

    def stats(self) -> MemberStats:
        """What the decoding model holds; each of `prefills` has its own."""
        return self.inner.stats()

    def cache_stats(self) -> CacheStats | None:
        """What the decoding model's prefix store did."""
        return self.inner.cache_stats()

    async def close(self) -> None:
        """End all actors."""
        await self.mover.close()
        await asyncio.gather(*(member.close() for member in (self.inner, *self.prefills)))


def _wait_limit_s(member: RemoteModel, held: int, tokens: int) -> float:
    """Return how long to wait for the KV of `tokens` tokens that follow `held` others, in seconds."""
    return PATIENCE_S + member.forward_seconds(tokens, tokens * (held + tokens // 2), 1)


async def _computed(prefill: RemoteModel, seq: Sequence, start: int) -> Any:
    await prefill.prefill_ahead(seq)
    return await prefill.do(seq, ExportKV(start, stays=True))


async def _while_it_lives(member: RemoteModel, work: Coroutine[Any, Any, Any]) -> Any:
    """Do something with an actor, but do not wait for its next life.

    Raises:
        Interrupted: it is away, or ended meanwhile.
    """
    connection = member.supervisor.connection
    if connection is None:
        work.close()
        raise Interrupted(f"an actor of {member.name!r} that computes prompts is away")
    loop = asyncio.get_running_loop()
    working, ended = loop.create_task(work), loop.create_task(connection.lost.wait())
    try:
        await asyncio.wait([working, ended], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Interrupted(f"an actor of {member.name!r} that computed a prompt has ended")
        return working.result()
    finally:
        working.cancel()
        ended.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)
