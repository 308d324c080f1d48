"""The verifier slot: walk a draft tree along what the target says, and emit tokens.

A module here assigns its class, made without arguments, to `VERIFIER`; `get_verifier` finds it by file name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from decoding.model import Row, Want
from decoding.sequence import Sequence
from decoding.stretch import reported
from decoding.tree import DraftTree
from turnout.registry import load
from turnout.types import Token


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one round.

    Attributes:
        path: accepted nodes, from the root's child down.
        tokens: emitted tokens: one per accepted node (kind `accepted`, source the drafting model), then one from
            the target: `recovered` where a candidate was rejected, `bonus` where the path ended in a leaf.
    """

    path: tuple[int, ...]
    tokens: tuple[Token, ...]

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that stay."""
        return len(self.path)


class Verifier(Protocol):
    """Decides which draft tokens stay.

    Attributes:
        lossless: whether emitted tokens follow the target's own law; if not, the class docstring states the law.
        proposals: whether sampled candidates must come with the distribution they were drawn from, and be
            drawn with noise of their own (`Draw.DRAFT`).
        want: what the target must read at the root and at every node; models read `want_of(verifier, seq)`.
    """

    name: str
    lossless: bool
    proposals: bool
    want: Want

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Row], target: str) -> Verdict:
        """Judge a draft.

        Args:
            seq: the sequence the draft continues.
            draft: the tree.
            rows: what the target read: rows[0] at the root, rows[i + 1] after node i.
            target: name of the target model.
        """
        ...


def want_of(verifier: Verifier, seq: Sequence) -> Want:
    """What the target reads in a round: what the verifier needs, and what the request reports about its tokens.

    A verifier that lets the target draw no token may emit any; then log-probabilities come from raw logits.
    """
    extra = reported(seq)
    if extra.logprob and verifier.want.draw is None:
        extra = extra | Want(draw=None, logits=True)
    return verifier.want | extra


def get_verifier(name: str, field: str = "verifier") -> Verifier:
    """A verifier by name.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists.
    """
    verifier: Verifier = load("decoding.verifiers", name, field).VERIFIER()
    return verifier
