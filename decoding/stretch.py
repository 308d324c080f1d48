"""One decoding stretch, token by token: what every model's `decode` does around its forward pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from decoding.model import Decision, Model, Row, Until, Want, token_of
from decoding.sequence import Sequence
from turnout.types import Segment, Token

LONGEST_STRETCH = 8


def reported(seq: Sequence) -> Want:
    """What the request itself wants to hear about each emitted token; draws nothing."""
    if seq.sampling.logprobs is None:
        return Want(draw=None)
    return Want(draw=None, logprob=True, top=seq.sampling.logprobs)


async def run_stretch(
    step: Callable[[Want], Awaitable[Row]], seq: Sequence, until: Until, source: str, num_parameters: int
) -> Segment:
    """Generate and append tokens until `until` or the end of the sequence.

    Rules look at a token in their order, before it is appended. The first that says DROP ends the stretch: the
    token is counted as discarded and the rules after it never see it. STOP keeps the token, and wins over a
    `max_tokens` that is reached with the same token.

    Args:
        step: one forward pass: reads the position after the sequence's last token.
        seq: appended to.
        until: when to end.
        source: name of the model that runs.
        num_parameters: its parameters, for the meter.

    Returns:
        The appended tokens; `stopped_by` is the rule's name, "max_tokens" or "finish".
    """
    want = until.want | reported(seq)
    tokens: list[Token] = []
    while not seq.finished:
        if until.max_tokens is not None and len(tokens) >= until.max_tokens:
            return Segment(tuple(tokens), "max_tokens")
        row = await step(want)
        stopped_by = ""
        for rule in until.rules:
            decision = rule.observe(row.token, row)
            if decision is Decision.DROP:
                seq.meter.of(source, num_parameters).discarded_tokens += 1
                return Segment(tuple(tokens), rule.name)
            if decision is Decision.STOP:
                stopped_by = stopped_by or rule.name
        token = token_of(row, source)
        seq.append(token, num_parameters)
        tokens.append(token)
        if stopped_by and not seq.finished:
            return Segment(tuple(tokens), stopped_by)
    return Segment(tuple(tokens), "finish")


def stretch_lengths(longest: int = LONGEST_STRETCH) -> Iterator[int]:
    """Lengths of an answer's successive stretches: 1, so that the first token leaves at once, then doubling.

    Boundaries never change tokens; they only decide how many tokens reach the client together.
    """
    length = 1
    while True:
        yield length
        length = min(2 * length, longest)


async def stream(model: Model, seq: Sequence) -> AsyncIterator[Segment]:
    """Decode to the end of the sequence in short stretches, each yielded when it is ready."""
    lengths = stretch_lengths()
    while not seq.finished:
        yield await model.decode(seq, Until(max_tokens=next(lengths)))
