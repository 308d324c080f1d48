"""The decode loop: one decoding stretch, token by token, around the forward passes of any model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, runtime_checkable

from decoding.logits import BITS_PER_NAT
from decoding.model import Decision, Model, Readout, ReadSpec, StopCondition, WrappedModel, token_of
from decoding.processor_chain import reads_of
from decoding.sequence import Sequence
from turnout.types import Segment, Token

LONGEST_STRETCH = 8


def reported(seq: Sequence) -> ReadSpec:
    """Return what is read with each emitted token: what the request reports, and what is recorded; draws nothing."""
    asked, top = seq.sampling, seq.sampling.logprobs
    surprise = bool(asked.processors) and reads_of(seq, 0).surprise
    return ReadSpec(draw=None, entropy=asked.token_details, logprob=top is not None, top=top or 0, surprise=surprise)


def chosen_among(seq: Sequence, row: Readout, token: int, logprob: float | None, source: str) -> Token:
    """Return a token that a method chose itself among a row's `top_processed`, with what the request reports.

    Args:
        seq: which it continues; nothing is appended.
        row: read with `reported`.
        token: its id.
        logprob: raw, nats; None: unknown.
        source: name of the model.
    """
    top = row.top[: seq.sampling.logprobs or 0]
    made = Token(token, source, logprob=logprob, entropy_bits=row.entropy_bits, top=top)
    if seq.sampling.greedy or not reported(seq).surprise:
        return made
    return made._replace(surprise_bits=-dict(row.top_processed)[token] * BITS_PER_NAT)


class DecodeLoop:
    """Decode loop of one call to `decode`: each token is checked by the rules, appended, and the end detected.

    Rules look at a token in their order, before it is appended. The first that says DROP ends the stretch: the
    token is counted as discarded and the rules after it never see it. STOP keeps the token, and wins over a
    `max_tokens` that is reached with the same token.

    Args:
        seq: appended to.
        until: when to end.
        source: name of the model that runs.
        num_parameters: its parameters, for the meter.

    Attributes:
        want: what must be read with each token.
        stopped_by: a rule's name, "max_tokens" or "finish" once it has ended; "" before.
    """

    __slots__ = (
        *("_announced", "_due", "_given", "_length", "_lengths", "_most", "_num_parameters", "_source", "_tokens"),
        *("_until", "seq", "stopped_by", "want"),
    )

    def __init__(self, seq: Sequence, until: StopCondition, source: str, num_parameters: int) -> None:
        self.seq = seq
        self.want = until.want | reported(seq)
        self._most = seq.sampling.logprobs or 0
        self._until = until
        self._source = source
        self._num_parameters = num_parameters
        self._tokens: list[Token] = []
        self._due: Callable[[], None] | None = None
        self._lengths = stretch_lengths()
        self._given = self._announced = 0
        self._length = sys.maxsize
        self.stopped_by = ""
        if seq.finished:
            self.stopped_by = "finish"
        elif until.max_tokens is not None and until.max_tokens <= 0:
            self.stopped_by = "max_tokens"

    def take(self, row: Readout) -> bool:
        """Take the next chosen token; return whether another one is wanted."""
        seq, until, stopped_by = self.seq, self._until, ""
        for rule in until.rules:
            decision = rule.observe(row.token, row)
            if decision is Decision.DROP:
                seq.meter.of(self._source, self._num_parameters).discarded_tokens += 1
                self.stopped_by = rule.name
                return False
            if decision is Decision.STOP:
                stopped_by = stopped_by or rule.name
        token = token_of(row, self._source)
        if len(token.top) > self._most:  # the others are for rules
            token = token._replace(top=token.top[: self._most])
        seq.append(token, self._num_parameters)
        self._tokens.append(token)
        if seq.finished:
            self.stopped_by = "finish"
        elif stopped_by:
            self.stopped_by = stopped_by
        elif until.max_tokens is not None and len(self._tokens) >= until.max_tokens:
            self.stopped_by = "max_tokens"
        return not self.stopped_by

    def take_plain(self, tokens: list[int]) -> int:
        """Take the next chosen tokens, of which nothing else was read, up to the end; no rule looks at them.

        Returns:
            How many were taken.
        """
        seq, most = self.seq, self._until.max_tokens
        if most is not None:
            tokens = tokens[: most - len(self._tokens)]
        added = seq.append_plain(tokens, self._source, self._num_parameters)
        self._tokens += seq.generated[len(seq.generated) - added :]
        if seq.finished:
            self.stopped_by = "finish"
        elif most is not None and len(self._tokens) >= most:
            self.stopped_by = "max_tokens"
        return added

    @property
    def room(self) -> int:
        """Most tokens that it may still take."""
        left, most = self.seq.num_remaining, self._until.max_tokens
        return left if most is None else min(left, most - len(self._tokens))

    @property
    def ruled(self) -> bool:
        """Whether rules look at its tokens."""
        return bool(self._until.rules)

    @property
    def watched(self) -> bool:
        """Whether its text can end it."""
        return self.seq.stop is not None and self.seq.stop.watches

    def stream(self, due: Callable[[], None]) -> None:
        """From now on, let `announce` call `due` when a stretch is there."""
        self._due, self._length = due, next(self._lengths)

    @property
    def streams(self) -> bool:
        """Whether its stretches are waited for."""
        return self._due is not None

    @property
    def num_before_due(self) -> int:
        """Tokens until the next stretch is there, at least 1; where none is waited for, more than there ever are."""
        return max(self._announced + self._length - len(self._tokens), 1)

    def announce(self, share: float = 1.0) -> bool:
        """If the next stretch is there, or that share of it, let who waits for it know."""
        if self._due is None or len(self._tokens) - self._announced < share * self._length:
            return False
        self._announced, self._length = len(self._tokens), next(self._lengths)
        self._due()
        return True

    def stretch(self) -> Segment:
        """Return what has come since the last call."""
        tokens = tuple(self._tokens[self._given :])
        self._given = len(self._tokens)
        return Segment(tokens, self.stopped_by or "max_tokens")

    @property
    def segment(self) -> Segment:
        """Appended tokens, and the reason of the end."""
        return Segment(tuple(self._tokens), self.stopped_by)


async def run_decode_loop(
    step: Callable[[ReadSpec], Awaitable[Readout]],
    seq: Sequence,
    until: StopCondition,
    source: str,
    num_parameters: int,
) -> Segment:
    """Generate and append tokens until `until` or the end of the sequence; see `DecodeLoop`.

    Args:
        step: one forward pass: reads the position after the sequence's last token.
        seq: appended to.
        until: when to end.
        source: name of the model that runs.
        num_parameters: its parameters, for the meter.

    Returns:
        The appended tokens; `stopped_by` is the rule's name, "max_tokens" or "finish".
    """
    loop = DecodeLoop(seq, until, source, num_parameters)
    while not loop.stopped_by:
        loop.take(await step(loop.want))
    return loop.segment


def stretch_lengths(longest: int = LONGEST_STRETCH) -> Iterator[int]:
    """Yield the lengths of an answer's successive stretches: 1, so that the first token leaves at once, then doubling.

    Boundaries never change tokens; they only decide how many tokens reach the client together.
    """
    length = 1
    while True:
        yield length
        length = min(2 * length, longest)


@runtime_checkable
class Streams(Protocol):
    """Model that decodes to the end of a sequence in one operation, and gives its tokens as they come."""

    def stream(self, seq: Sequence) -> AsyncIterator[Segment]:
        """Decode to the end of the sequence; it may be longer than the segments that were yielded."""
        ...


def stream(model: Model, seq: Sequence, ahead: bool = False) -> AsyncIterator[Segment]:
    """Decode to the end of the sequence in short stretches, each yielded when it is ready.

    Args:
        model: decodes.
        seq: appended to.
        ahead: whether the sequence may grow while a stretch is dealt with.
    """
    if ahead and isinstance(model, Streams) and not isinstance(model, WrappedModel):
        return model.stream(seq)
    return _in_stretches(model, seq)


async def _in_stretches(model: Model, seq: Sequence) -> AsyncIterator[Segment]:
    lengths = stretch_lengths()
    while not seq.finished:
        yield await model.decode(seq, StopCondition(max_tokens=next(lengths)))
