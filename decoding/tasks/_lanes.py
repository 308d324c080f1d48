"""Walking through tokens in lanes of forwards of a fixed shape: the part that coding and decoding have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from decoding.fixed_forward import FixedForward, FixedRows
from decoding.model import TokenText
from decoding.sequence import Sequence
from decoding.tasks._container import Shape
from decoding.tasks.base import Progress, TaskRun
from turnout.errors import TurnoutError, invalid

Logits = npt.NDArray[np.float32]
# (lane, index of the token in it, logits before it, what computed them) -> the token
Coded = Callable[[int, int, Logits, str], int]
LEAST_LANES = 2  # of one row alone, matrix products are computed otherwise
LONGEST_MATCH = 32  # bytes of a token that is looked for


async def walk(run: TaskRun, shape: Shape, coded: Coded, progress: Progress, field: str) -> list[list[int]]:
    """Let a model read the tokens of each lane, one after the other, as `coded` returns them.

    After `window` tokens a lane begins anew with its last `overlap` tokens: a token is read after at least that many,
    and at most `window`, others of its lane. All lanes keep step, and those that have ended are fed the start token, so
    that coding and decoding run the same forwards.

    Args:
        run: the request.
        shape: of the lanes.
        coded: codes a token.
        progress: of the task.
        field: where the shape is from.

    Returns:
        The tokens of each lane.

    Raises:
        TurnoutError: naming `field`: the model has no room for the lanes.
    """
    lengths = shape.lengths
    longest = max(lengths, default=0)
    lanes: list[list[int]] = [[] for _ in range(shape.lanes)]
    seq = run.sequence([shape.start])
    begin = done = 0
    try:
        while done < longest:
            for place in range(min(shape.window, longest - begin)):
                index = begin + place
                fed = tuple(lane[index - 1] if 0 < index <= len(lane) else shape.start for lane in lanes)
                found = await _read(run, seq, FixedForward(fed, place, shape.window), field)
                progress.read(len(lengths))
                if index < done:
                    continue
                rows: Logits = found.logits.numpy()
                for lane, length in enumerate(lengths):
                    if index < length:
                        lanes[lane].append(coded(lane, index, rows[lane], found.numerics))
                done = index + 1
                progress.done(done, longest)
            begin = done - shape.overlap
    finally:
        run.model.release(seq)
    return lanes[: len(lengths)]


async def _read(run: TaskRun, seq: Sequence, op: FixedForward, field: str) -> FixedRows:
    try:
        return await run.model.do(seq, op)
    except TurnoutError as error:
        if error.field != "window":
            raise
        raise TurnoutError(error.code, f"{field}: {error.message}", field, error.retry_after_s) from None


def start_token(run: TaskRun) -> int:
    """The token that stands before the first one of a lane: what begins every text, or what ends one, or 0."""
    return run.begin[0] if run.begin else min(run.end_ids, default=0)


async def tokens_of(data: bytes, run: TaskRun, texts: TokenText, field: str) -> list[int]:
    """Token ids whose bytes are the data: as the tokenizer cuts it where that keeps every byte, else the longest.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the vocabulary cannot write a byte.
    """
    try:
        ids = await run.encode(data.decode())
    except UnicodeDecodeError:
        ids = []
    if ids and max(ids) < run.model.vocab_size and bytes_of(ids, texts) == data:
        return ids
    known = _by_bytes(texts, run.model.vocab_size)
    found, place = list[int](), 0
    while place < len(data):
        parts = (data[place:end] for end in range(min(place + LONGEST_MATCH, len(data)), place, -1))
        part = next((part for part in parts if part in known), None)
        if part is None:
            raise invalid(field, f"byte 0x{data[place]:02x} cannot be written in the tokens of this model")
        found.append(known[part])
        place += len(part)
    return found


def bytes_of(ids: list[int], texts: TokenText) -> bytes:
    """The bytes of token ids, joined."""
    return b"".join(map(texts.token_bytes, ids))


@lru_cache(maxsize=4)
def _by_bytes(texts: TokenText, vocab_size: int) -> dict[bytes, int]:
    """Tokens by their bytes; special ones are left out, whose names are no text."""
    found: dict[bytes, int] = {}
    for token in range(vocab_size):
        # Twice: the blank at the beginning of a text is left out by some tokenizers.
        if texts.decode([token, token]) and (data := texts.token_bytes(token)):
            found.setdefault(data, token)
    return found
