"""Structures that answers must fit, compiled for a pool's tokenizer: within limits of time and memory, and kept."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from decoding.constraints.grammar import Compiler, Vocabulary, check_whole
from decoding.sequence import Sequence
from turnout.errors import TurnoutError, busy, invalid
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from decoding.constraints.base import Constraint

FIELD = "structure"
KEPT = 64
COMPILE_S = 5.0


class Structures:
    """Compiled structures of one tokenizer, those used last; of those that were refused, why.

    One is compiled at a time, away from the event loop, so that a slow one delays other new ones and nothing else.

    Args:
        end_ids: tokens that end an answer.
        definition: gives the tokenizer as JSON of the tokenizers library, slowly; asked once, with the first structure.
            None: this tokenizer cannot be constrained.
    """

    def __init__(self, end_ids: frozenset[int], definition: Callable[[], str] | None) -> None:
        self._end_ids = end_ids
        self._definition = definition
        self._compiler: Compiler | None = None
        self._kept: OrderedDict[Structure, Constraint | TurnoutError] = OrderedDict()
        self._lock = threading.Lock()  # of what is kept; never held while something is compiled
        self._making = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._kept)

    async def admit(self, sampling: SamplingParams, vocab_size: int) -> Constraint | None:
        """What a call asks for, compiled: to be cloned for each answer. None where it asks for nothing.

        Args:
            sampling: the call's.
            vocab_size: ids that every model of the pool knows are below this.

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
        return await self.made(structure)

    async def made(self, structure: Structure) -> Constraint:
        """A structure compiled: at once where it is kept, else when its turn has come.

        Raises:
            TurnoutError: see `admit`.
        """
        if structure in self._kept:
            return self._compiled(structure)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="structures")
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def make() -> Constraint:
            loop.call_soon_threadsafe(begun.set)
            return self._compiled(structure)

        work = self._thread.submit(make)
        try:
            await asyncio.wait_for(begun.wait(), COMPILE_S)
            return await asyncio.wait_for(asyncio.wrap_future(work), COMPILE_S)
        except TimeoutError:
            if begun.is_set():
                raise invalid(FIELD, f"is too complex: not compiled within {COMPILE_S:g} s") from None
            message = f"{FIELD}: others wait to be compiled; its turn did not come within {COMPILE_S:g} s"
            raise busy(message, FIELD) from None
        finally:
            work.cancel()  # nothing where it has begun

    def close(self) -> None:
        """Let the thread go when it has done what it is at; what is asked for later gets another one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def constraint(self, structure: Structure | None) -> Constraint | None:
        """For an answer that begins; None without a structure. Compiles at once what is not kept: not for event loops.

        Raises:
            TurnoutError: INVALID_ARGUMENT.
        """
        return self._compiled(structure).clone() if structure is not None else None

    def _check(self) -> Callable[[], str]:
        if self._definition is None:
            raise invalid(FIELD, "this pool's tokenizer has no fast form, or no token that ends a text")
        return self._definition

    def _compiled(self, structure: Structure) -> Constraint:
        with self._lock:
            found = self._kept.get(structure)
            if found is not None:
                self._kept.move_to_end(structure)
        if found is None:
            found = self._compile(structure)
            with self._lock:
                self._kept[structure] = found
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        if isinstance(found, TurnoutError):
            raise TurnoutError(found.code, found.message, found.field)
        return found

    def _compile(self, structure: Structure) -> Constraint | TurnoutError:
        definition = self._check()
        with self._making:
            if self._compiler is None:
                self._compiler = Compiler(Vocabulary(definition(), self._end_ids))
        try:
            return self._compiler.compile(structure)
        except TurnoutError as error:
            return error


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
