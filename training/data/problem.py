"""The problem record, and the two questions asked of every problem: is it held out, and how is its answer read."""

import hashlib
from dataclasses import dataclass

ANSWER_MARK = "Answer:"
HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """One question with its worked answer.

    `key` names the mathematical content without the phrasing, so that two wordings of one question
    always fall on the same side of the held-out split.
    """

    prompt: str
    answer: str
    result: str
    difficulty: int
    task: str
    key: str = ""


def is_heldout(key: str) -> bool:
    """Whether the problem with this key is kept out of training (one in HELDOUT_ONE_IN is)."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0


def final_answer(completion: str) -> str | None:
    """The first line after the last answer mark, or None when the text has no mark."""
    _, mark, tail = completion.rpartition(ANSWER_MARK)
    if not mark:
        return None
    lines = tail.strip().splitlines()
    return lines[0].strip() if lines else ""
