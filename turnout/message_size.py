"""What fits one message: between the processes of a cluster, and from there to a client."""

from __future__ import annotations

from turnout.errors import out_of_range

MOST_UNITS = 1 << 20  # of some 30 bytes: half of what a message between replicas may have
PART_UNITS = 1 << 16  # of a stream: gRPC clients accept messages of 4 MiB by default
MOST_ANSWER_BYTES = 36 << 20  # a little less than a proxy sends to a client in one piece


def units(tokens: int, top: int | None) -> int:
    """Units that tokens take in a message between processes, each with this many alternatives."""
    return tokens * (2 + (top or 0))


def check_answer_bytes(size: int) -> None:
    """Refuse an answer that is too large to be sent in one piece.

    Raises:
        TurnoutError: OUT_OF_RANGE.
    """
    if size > MOST_ANSWER_BYTES:
        what = f"the whole answer has {size} bytes, at most {MOST_ANSWER_BYTES} can be sent at once"
        raise out_of_range("n", f"{what}; stream it, or ask for fewer answers, tokens or log-probabilities")
