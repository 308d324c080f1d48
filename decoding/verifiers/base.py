"""The verifier slot: accept a path of a draft tree by the target's readouts, and emit tokens.

A module here assigns its class to `PART`; requests choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from decoding.constraints.base import allows
from decoding.decode_loop import reported
from decoding.drafters.base import Candidates
from decoding.model import Readout, ReadSpec
from decoding.parts import Part
from decoding.sequence import Sequence
from decoding.state import Stateful, twin
from decoding.token_bans import is_banned
from decoding.tree import ROOT, DraftTree
from turnout.types import Token, TokenKind

PACKAGE = "decoding.verifiers"


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of verification of one round.

    Attributes:
        path: accepted nodes, from the root's child down.
        tokens: emitted tokens: one per accepted node (kind `accepted`, source the drafting model), then one from
            the target: `recovered` where a candidate was rejected, `bonus` where the path ended in a leaf.
        rows: the target's readouts: at the root, after every node, after every extra row.
        state: of the verifier after the round; see `decoding.state.Stateful`.
    """

    path: tuple[int, ...]
    tokens: tuple[Token, ...]
    rows: list[Readout] = field(default_factory=list)
    state: tuple[Any, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)


class Verifier(Part, Stateful):
    """Verifier of draft tokens.

    Attributes:
        lossless: whether emitted tokens follow the target's own law; if not, the class docstring states the law.
        accepts: candidates it can judge, best first.
        resumable: whether each token depends on those before it and the seed alone, whatever was drafted.
        as_greedy: parameters with which a verifier that is not lossless gives plain greedy decoding at temperature 0.
        want: what the target must read at the root and at every node; models read `want_of(verifier, seq)`.
    """

    lossless: ClassVar[bool]
    accepts: ClassVar[tuple[Candidates, ...]]
    resumable: ClassVar[bool] = False
    as_greedy: ClassVar[Mapping[str, Any]] = {}
    want: ReadSpec

    @abstractmethod
    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """Judge a draft.

        Args:
            seq: the sequence the draft continues.
            draft: the tree.
            rows: the target's readouts: rows[0] at the root, rows[i + 1] after node i.
            target: name of the target model.
        """

    def verdict(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """Judge a draft without changing itself: rows and new state are in the verdict. See `judge`."""
        verifier = twin(self) if self.state() else self
        return replace(verifier.judge(seq, draft, rows, target), rows=rows, state=verifier.state())


def want_of(verifier: Verifier, seq: Sequence) -> ReadSpec:
    """Return the target's read specification of a round: of the verifier, and of what the request reports.

    A verifier that lets the target draw no token may emit any; then log-probabilities come from raw logits.
    """
    extra = reported(seq)
    if extra.logprob and verifier.want.draw is None:
        extra = extra | ReadSpec(draw=None, logits=True)
    return verifier.want | extra


def with_rejected(draft: DraftTree, verdict: VerifyResult) -> tuple[Token, ...]:
    """Return a verdict's tokens, each with the rejected candidates of its position, in draw order."""
    tokens = []
    for token, node in zip(verdict.tokens, (ROOT, *verdict.path), strict=False):
        candidates = (draft.tokens[child] for child in draft.children(node))
        rejected = tuple(dict.fromkeys(each for each in candidates if each != token.id))
        tokens.append(token._replace(rejected=rejected) if rejected else token)
    return tuple(tokens)


def as_verified(drafted: tuple[int, ...], written: tuple[Token, ...], source: str) -> tuple[DraftTree, VerifyResult]:
    """Return a chain that was not verified, cut to what was written instead, and what verification would have said."""
    drafted = drafted[: len(written)]
    agree = (token.id == guess for token, guess in zip(written, drafted, strict=False))
    accepted = next((place for place, equal in enumerate(agree) if not equal), len(drafted))
    tokens = written[: accepted + 1]
    if accepted < len(drafted):
        tokens = (*tokens[:-1], tokens[-1]._replace(kind=TokenKind.RECOVERED))
    return DraftTree.chain(list(drafted), source), VerifyResult(tuple(range(accepted)), tokens)


def fitting(seq: Sequence, draft: DraftTree) -> list[bool]:
    """Return for each draft token whether the answer's constraint and the request's bans allow it at its position.

    The target gives a token that is not allowed probability zero.
    """
    if seq.constraint is None and not seq.sampling.bans_tokens:
        return [True] * len(draft)
    paths = [tuple(draft.tokens[each] for each in draft.path(parent)) for parent in draft.parents]
    fits = [not is_banned(seq, path, token) for path, token in zip(paths, draft.tokens, strict=True)]
    if seq.constraint is None:
        return fits
    masks = seq.constraint.masks(seq.answer, paths)
    return [fit and allows(mask, token) for fit, mask, token in zip(fits, masks, draft.tokens, strict=True)]


def probs_of(row: Readout) -> torch.Tensor:
    """Return the target's distribution at a node, float32 [vocab].

    Raises:
        ValueError: the verifier did not want it.
    """
    if row.probs is None:
        raise ValueError("this verifier needs the target's distribution at every node")
    return row.probs


def emitted(token: int, row: Readout, source: str, kind: TokenKind) -> Token:
    """Return a token the target did not draw itself, with its log-probability and entropy from the row."""
    logprob = None
    if row.logits is not None:
        logprob = float(torch.log_softmax(row.logits, dim=-1)[token])
    return Token(token, source, kind, logprob, row.entropy_bits, row.top)
