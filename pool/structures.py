"""Structures that answers must fit, compiled for a pool's tokenizer: within limits of time and memory, and kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from decoding.constraints.base import FIELD, Vocabulary
from decoding.drafter_state import Stores
from decoding.sequence import Sequence
from decoding.structures import Compiler, check_whole
from turnout.errors import TurnoutError, busy, invalid
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from decoding.constraints.base import Constraint

KEPT = 128
COMPILE_S = 5.0


@dataclass(slots=True)
class _Kept:
    """A tenant's structure, and what became of it; None while it is not compiled."""

    tenant: str
    structure: Structure
    made: Constraint | TurnoutError | None = None


@dataclass(slots=True, eq=False)
class _Wanted:
    """One that a caller waits for; `work` is there once it has begun."""

    kept: _Kept
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Future[None] | None = None


class Structures:
    """Compiled structures of one tokenizer, those used last; of those that were refused, why.

    One is compiled at a time, away from the event loop, so that a slow one delays other new ones and nothing else.
    Tenants take turns, and each has its own: where there are too many, the tenant that has most loses one. So no
    tenant keeps the others' out, nor learns what they ask for from what is there already. All calls must come from
    one event loop.

    Args:
        end_ids: tokens that end an answer.
        definition: gives the tokenizer as JSON of the tokenizers library, slowly; asked once, with the first structure.
            None, itself or what it gives: this tokenizer cannot be constrained.
    """

    def __init__(self, end_ids: frozenset[int], definition: Callable[[], str | None] | None) -> None:
        self._end_ids = end_ids
        self._definition = definition
        self._compiler: Compiler | None = None
        self._kept = Stores(KEPT)
        self._waiting: dict[str, deque[_Wanted]] = {}  # by tenant, the next one's first; also the running one's
        self._running: _Wanted | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._kept)

    async def admit(self, sampling: SamplingParams, vocab_size: int, tenant: str) -> Constraint | None:
        """What a call asks for, compiled: to be cloned for each answer. None where it asks for nothing.

        Args:
            sampling: the call's.
            vocab_size: ids that every model of the pool knows are below this.
            tenant: whose call it is.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the structure cannot be followed, takes too long to compile, or contradicts
                another parameter; RESOURCE_EXHAUSTED: too many others wait to be compiled.
        """
        structure = sampling.structure
        if structure is None:
            return None
        if sampling.ignore_eos:
            raise invalid("ignore_eos", "an answer with a structure ends where its text is complete")
        self._check()
        if max(self._end_ids) >= vocab_size:
            raise invalid(FIELD, "a model of this pool does not know the token that ends a text")
        return await self.made(structure, tenant)

    async def made(self, structure: Structure, tenant: str) -> Constraint:
        """A tenant's structure compiled: at once where it is kept, else when its turn has come.

        Raises:
            TurnoutError: see `admit`.
        """
        name = f"{structure.kind} {structure.value}"
        kept = self._kept.open(name, tenant, partial(_Kept, tenant, structure))
        if kept.made is None:
            await self._in_turn(_Wanted(kept))
        if isinstance(kept.made, TurnoutError):
            raise TurnoutError(kept.made.code, kept.made.message, kept.made.field)
        assert kept.made is not None
        return kept.made

    async def _in_turn(self, wanted: _Wanted) -> None:
        """Wait until it is compiled; a caller that gives up before its turn leaves the queue."""
        queue = self._waiting.setdefault(wanted.kept.tenant, deque())
        queue.append(wanted)
        self._begin()
        try:
            await asyncio.wait_for(wanted.begun.wait(), COMPILE_S)
            assert wanted.work is not None
            await asyncio.wait_for(asyncio.shield(wanted.work), COMPILE_S)
        except TimeoutError:
            if wanted.begun.is_set():
                raise invalid(FIELD, f"is too complex: not compiled within {COMPILE_S:g} s") from None
            message = f"{FIELD}: others wait to be compiled; its turn did not come within {COMPILE_S:g} s"
            raise busy(message, FIELD) from None
        finally:
            if not wanted.begun.is_set():
                queue.remove(wanted)

    def _begin(self) -> None:
        """Compile the first one of the tenant whose turn it is, unless one is being compiled."""
        while self._running is None and self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            if not queue:
                del self._waiting[tenant]
                continue
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="structures")
            self._running = wanted = queue.popleft()
            wanted.work = asyncio.get_running_loop().run_in_executor(self._thread, self._make, wanted.kept)
            wanted.work.add_done_callback(partial(self._end, wanted))
            wanted.begun.set()

    def _end(self, wanted: _Wanted, _: asyncio.Future[None]) -> None:
        """One is compiled: its tenant is now the last of those who wait."""
        if self._running is wanted:
            self._running = None
            self._waiting[wanted.kept.tenant] = self._waiting.pop(wanted.kept.tenant)
            self._begin()

    def _make(self, kept: _Kept) -> None:
        """On the thread: nothing where another call for the same was before it."""
        if kept.made is None:
            kept.made = self._compile(kept.structure)

    def close(self) -> None:
        """Let the thread go when it has done what it is at; what is asked for later gets another one."""
        self._waiting.clear()
        self._running = None
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _check(self) -> Callable[[], str | None]:
        if self._definition is None:
            raise invalid(FIELD, "this pool's tokenizer has no fast form, or no token that ends a text")
        return self._definition

    def _compile(self, structure: Structure) -> Constraint | TurnoutError:
        try:
            if self._compiler is None:
                definition = self._check()()
                if definition is None:
                    raise invalid(FIELD, "not supported by this pool's tokenizer: texts of tokens depend on each other")
                self._compiler = Compiler(Vocabulary(definition, self._end_ids))
            return self._compiler.compile(structure)
        except TurnoutError as error:
            return error
        except RecursionError:
            return invalid(FIELD, f"the {structure.kind} is nested too deeply")


def check_answer(sequence: Sequence) -> None:
    """An answer that ended of itself has the text it was to have; one cut by its length or a stop need not.

    Raises:
        TurnoutError: see `check_whole`.
    """
    constraint = sequence.constraint
    if constraint is None or sequence.finish_reason is not FinishReason.STOP:
        return
    answer = sequence.answer
    if answer and answer[-1] in constraint.end_ids:
        check_whole(constraint, answer[:-1])
