"""The slot of constraint kinds, and the constraint protocol: masks of allowed next tokens.

A module here assigns its class to `PART`; a request chooses it by file name, as the kind of its structure. Processes
that take requests import the kinds, to check values, and so they import no torch.
"""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from decoding.parts import Part
from turnout.errors import invalid
from turnout.structure import MAX_CHARS

PACKAGE = "decoding.constraints"
FIELD = "structure"

# One bit per token, the lowest of the first byte is token 0: whether it may follow. Tokens behind the last may not.
Mask = npt.NDArray[np.uint8]
Shared = TypeVar("Shared")

EIGHT = 8
ALL = 0xFF
# Of a place where every token may follow, those that a constraint does not know as well; compared by identity.
ANY: Mask = np.zeros(0, dtype=np.uint8)


class Constraint(Protocol):
    """Constraint of one answer: which tokens may come next.

    A pure function of the answer's tokens: state of an implementation is only a cache. Calls may
    come from several threads, for models of one request run side by side.

    Attributes:
        end_ids: tokens that end the answer; allowed where the text is complete, and nowhere else.
        vocab_size: tokens that its masks cover.
        failure: why the grammar cannot be followed from where it was asked last; empty where it can.
        remembers: whether masks that it was asked for once are at hand when it is asked again.
        is_lazy: whether a few tokens are asked for with `permits` in less time than a mask: masks are then only made
            where a distribution is wanted, or many tokens were refused.
    """

    end_ids: frozenset[int]
    vocab_size: int
    failure: str
    remembers: bool
    is_lazy: bool = False

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        """Return masks of the tokens that may follow each of some continuations of an answer.

        Args:
            answer: its tokens so far.
            paths: hypothetical tokens after it, () for none.

        Returns:
            For each path a mask, which is not to be changed. None where the tokens are no prefix of a text that
            fits, so that nothing that follows matters; `ANY` where every token may follow.
        """
        ...

    def permits(self, answer: list[int], path: tuple[int, ...], token: int) -> bool:
        """Return whether a token may follow: what `masks` says of it. False where the answer and path do not fit.

        Args:
            answer: its tokens so far.
            path: hypothetical tokens after it.
            token: any id.
        """
        [mask] = self.masks(answer, [path])
        return allows(mask, token)

    def accepts(self, tokens: list[int]) -> bool:
        """Return whether the text of these tokens, without one that ends the answer, fits and is complete."""
        ...

    def clone(self) -> Constraint:
        """Return an independent copy for a twin of the answer."""
        ...


class Vocabulary:
    """The tokens of a pool, and what its constraints share. May be used by several threads.

    Args:
        definition: of the tokenizer, as JSON of the tokenizers library.
        end_ids: tokens that end an answer, at least one.
    """

    def __init__(self, definition: str, end_ids: frozenset[int]) -> None:
        self.definition = definition
        self.end_ids = end_ids
        self._shared: dict[Any, Any] = {}
        self._lock = threading.RLock()  # what is shared may be made of what else is

    def shared(self, make: Callable[[Vocabulary], Shared]) -> Shared:
        """Return what `make` makes of this vocabulary, made once: tables, compilers, tries."""
        with self._lock:
            if make not in self._shared:
                self._shared[make] = make(self)
            found: Shared = self._shared[make]
            return found


class ConstraintKind(Part):
    """A kind of constraint. No instance is made: a structure is a kind and a text, and compiles to a `Constraint`.

    Attributes:
        public: whether requests may ask for it; otherwise the server alone does.
        max_chars: longest value.
        takes_json: whether the short form's value may be JSON that is no text.
        examples: values with answers that fit them, for conformance tests.
    """

    where = FIELD
    public: ClassVar[bool] = True
    max_chars: ClassVar[int] = MAX_CHARS
    takes_json: ClassVar[bool] = False
    examples: ClassVar[Rows[tuple[str, str]]]

    @classmethod
    def check_value(cls, value: str, field: str) -> None:
        """Refuse a value as far as it can be judged without a vocabulary.

        Args:
            value: a text, or JSON where the short form's value is no text.
            field: the field that holds it.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field.
        """
        if not value:
            raise invalid(field, f"{cls.name} must not be empty")

    @classmethod
    def short(cls, value: str) -> Any:
        """Return a checked value as the short form has it, `{kind: value}`."""
        return value

    @classmethod
    @abstractmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """Compile a checked value: the constraint of an answer that has not begun.

        Raises:
            TurnoutError: INVALID_ARGUMENT for `structure`, saying what is wrong with the value.
        """

    @classmethod
    def rule(cls, value: str) -> str | None:
        """Return the right-hand side of a rule for it in Lark's notation; None: it cannot be combined with tools."""
        return None


def parsed(text: str, kind: str, field: str) -> Any:
    """Return a value that is JSON.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it is not.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise invalid(field, f"{kind} is nested too deeply") from None
    except ValueError as error:
        raise invalid(field, f"{kind} is no JSON: {error}") from None


def allows(mask: Mask | None, token: int) -> bool:
    """Return whether a mask allows a token; no mask allows none."""
    if mask is ANY:
        return True
    return mask is not None and token < EIGHT * mask.size and bool(mask[token // EIGHT] >> token % EIGHT & 1)


def is_forced(mask: Mask, vocab_size: int, end_ids: frozenset[int]) -> bool:
    """Return whether a mask leaves no choice below `vocab_size`: one token, or only tokens that end the answer."""
    if mask is ANY:
        return False
    allowed = np.flatnonzero(np.unpackbits(mask, count=vocab_size, bitorder="little"))
    return len(allowed) == 1 or (0 < len(allowed) <= len(end_ids) and end_ids.issuperset(allowed.tolist()))
