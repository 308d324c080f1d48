"""Answers whose beginning a client has already: what comes after it is sent, once, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from decoding.sequence import Sequence
from turnout.calls import Delivered, GenerateCall
from turnout.cost import Meter
from turnout.errors import Code, TurnoutError, invalid, out_of_range
from turnout.types import Token

NOTHING = Delivered()
# Who wrote the tokens is known where they were shown; here it is not.
SOURCE = "delivered"


class ResumeState:
    """What of one answer is still to be sent.

    Args:
        index: of the answer, for messages.
        delivered: what the client has.

    Attributes:
        finished: whether the client has all of it.
    """

    __slots__ = ("_chars", "_index", "_reasoning", "_seen", "_tokens", "finished")

    def __init__(self, index: int, delivered: Delivered) -> None:
        self._index = index
        self._tokens = delivered.tokens
        self._chars = delivered.chars
        self._reasoning = delivered.reasoning_chars
        self._seen = 0
        self.finished = delivered.finished

    def __bool__(self) -> bool:
        """Whether the client has anything."""
        return bool(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that the client has."""
        return self._tokens

    @property
    def count(self) -> int:
        """Tokens the client has."""
        return len(self._tokens)

    def resume(self, sequence: Sequence) -> None:
        """Let the sequence begin with what the client has; its meter counts the work that is done here only.

        Raises:
            TurnoutError: INTERNAL: the answer ends before.
        """
        meter, sequence.meter = sequence.meter, Meter()
        for token in self._tokens[self._seen :]:
            if not sequence.append(Token(token, SOURCE)) and not self.finished:
                raise self._disagrees(f"it ends after {len(sequence.generated)} of {self.count} tokens")
        self._seen = self.count
        sequence.meter = meter

    def new(self, tokens: Tokens[Token]) -> tuple[Token, ...]:
        """The next tokens of the answer, without those the client has.

        Raises:
            TurnoutError: INTERNAL: they are not those the client has.
        """
        if self._seen == self.count:
            return tuple(tokens)
        known = min(len(tokens), self.count - self._seen)
        for place, token in enumerate(tokens[:known], self._seen):
            if token.id != self._tokens[place]:
                raise self._disagrees(f"token {place} is {token.id} and was {self._tokens[place]}")
        self._seen += known
        return tuple(tokens[known:])

    def text(self, added: str) -> str:
        """The answer's next text, without what the client has of it."""
        known = min(len(added), self._chars)
        self._chars -= known
        return added[known:]

    def reasoning(self, added: str) -> str:
        """The answer's next reasoning, without what the client has of it."""
        known = min(len(added), self._reasoning)
        self._reasoning -= known
        return added[known:]

    def end(self) -> None:
        """The answer has ended.

        Raises:
            TurnoutError: INTERNAL: the client has more of it.
        """
        if self._seen < self.count:
            raise self._disagrees(f"it ends after {self._seen} of {self.count} tokens")
        if self._reasoning:
            raise self._disagrees(f"its reasoning ends {self._reasoning} characters before")
        if self._chars:
            raise self._disagrees(f"its text ends {self._chars} characters before")

    def _disagrees(self, how: str) -> TurnoutError:
        message = (
            f"answer {self._index} made again is not the one that was begun: {how}; with dtype float32, or a method"
            " that continues from what was delivered, this cannot happen"
        )
        return TurnoutError(Code.INTERNAL, message)


def deliveries(call: GenerateCall) -> list[ResumeState]:
    """One for each answer of a call."""
    given = call.delivered
    return [ResumeState(index, given[index] if index < len(given) else NOTHING) for index in range(call.sampling.n)]


def notes_of(begun: list[ResumeState], continued: bool) -> list[str]:
    """What to say of answers whose beginning was written elsewhere.

    Args:
        begun: those of which something was delivered.
        continued: whether they go on from there, and are not made again.
    """
    counts = " + ".join(str(delivery.count) for delivery in begun if not delivery.finished)
    how = "continued after" if continued else "made again up to"
    return [f"{how} {counts} tokens that were written elsewhere"] if counts else []


def check_delivered(call: GenerateCall, vocab_size: int) -> None:
    """What is said to be delivered can have been.

    Raises:
        TurnoutError: INVALID_ARGUMENT or OUT_OF_RANGE, naming the field.
    """
    if not any(each.tokens for each in call.delivered):
        return
    if call.sampling.seed is None:
        raise invalid("delivered", "needs sampling.seed: without it the same answers cannot be made again")
    if len(call.delivered) > call.sampling.n:
        raise invalid("delivered", f"has {len(call.delivered)} answers; the call asks for {call.sampling.n}")
    for index, each in enumerate(call.delivered):
        if len(each.tokens) > call.sampling.max_tokens:
            most = call.sampling.max_tokens
            raise out_of_range(f"delivered.{index}.tokens", f"{len(each.tokens)} tokens; at most max_tokens, {most}")
        wrong = next((token for token in each.tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise out_of_range(f"delivered.{index}.tokens", f"token id {wrong}; allowed: 0 to {vocab_size - 1}")
