"""Answers that are written before it is known whether they are shown: kept apart from the request's sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from decoding.model import Model, ModelPool
from decoding.sequence import Sequence
from turnout.types import SamplingParams, Segment

MARK = "Answer:"


def show(seq: Sequence, draft: Sequence, models: ModelPool) -> Segment:
    """Append what `draft` has beyond `seq`, and take over what it cost.

    Args:
        seq: the request's.
        draft: a fork of it that was written on; not used any more.
        models: the pool.
    """
    tokens = draft.generated[len(seq.generated) :]
    charge(seq, draft, shown=True)
    return Segment(seq.extend(tokens, models.sizes), "finish")


def charge(seq: Sequence, draft: Sequence, shown: bool = False) -> None:
    """Add a fork's work to the request's: tokens that no client will see are counted as discarded.

    Args:
        seq: the request's.
        draft: a fork of it; its meter is used up.
        shown: whether its tokens will be appended to `seq`, which counts them.
    """
    for meter in draft.meter.models.values():
        if not shown:
            meter.discarded_tokens += meter.generated_tokens
        meter.generated_tokens = 0
    seq.meter.merge(draft.meter)


def final_answer(text: str, mark: str = MARK) -> str:
    """Return the final answer: the line after the last `mark`, or its last line where there is none.

    Runs of blanks count as one, and letters as small ones, so that the same answer is one answer.
    """
    _, found, tail = text.rpartition(mark) if mark else ("", "", text)
    lines = [line for line in (tail if found else text).splitlines() if line.strip()]
    if not lines:
        return ""
    return " ".join((lines[0] if found else lines[-1]).split()).casefold()


@contextmanager
def reading(model: Model, seq: Sequence, tokens: Iterable[int]) -> Iterator[Sequence]:
    """Lend a sequence of other tokens to read; its work is added to the request's, and its memory is freed.

    Args:
        model: that reads.
        seq: the request's.
        tokens: at least one.
    """
    one = SamplingParams(temperature=0.0, max_tokens=1)
    made = Sequence(
        tokens, one, 0, sharing=seq.sharing, tenant=seq.tenant, lossy=seq.lossy, low_priority=seq.low_priority
    )
    made.owner = seq.owner
    try:
        yield made
    finally:
        model.release(made)
        seq.meter.merge(made.meter)
