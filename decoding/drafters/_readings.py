"""Readouts of the target in a round, with the tokens before each of them, for stores that learn its guesses."""

from __future__ import annotations

from decoding.model import Readout
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult


def readings(
    seq: Sequence, draft: DraftTree, verdict: VerifyResult, width: int
) -> list[tuple[tuple[int, ...], Readout]]:
    """The rows at the root and at every node, accepted or not, each with the last tokens before what it foretells.

    What was emitted stands last, so that it has the last word where two rows stand after the same tokens. Extra
    rows, which may see gaps, are left out.

    Args:
        seq: the sequence, with what the round emitted.
        draft: what was verified.
        verdict: the outcome.
        width: tokens given with each row; fewer at the start of a sequence.
    """
    end = root_end(seq, verdict)
    root = tuple(seq.tokens[max(end - width, 0) : end])
    contexts: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        above = root if parent < 0 else contexts[parent]
        contexts.append((*above, token)[-width:])
    accepted = set(verdict.path)
    nodes = [node for node in range(len(draft)) if node not in accepted]
    read = [(contexts[node], verdict.rows[node + 1]) for node in nodes]
    read.append((root, verdict.rows[0]))
    read += [(contexts[node], verdict.rows[node + 1]) for node in verdict.path]
    return read


def root_end(seq: Sequence, verdict: VerifyResult) -> int:
    """Length of the sequence before a round: an end of the answer inside the emitted tokens cuts the rest of them.

    Args:
        seq: the sequence, with what the round emitted.
        verdict: the outcome.
    """
    tokens = list(verdict.tokens)
    added = next(
        count for count in range(len(tokens), -1, -1) if seq.generated[len(seq.generated) - count :] == tokens[:count]
    )
    return len(seq) - added
