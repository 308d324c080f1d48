"""A chain of tokens from the part of the vocabulary that the target uses most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.drafters.base import Candidates, Drafter, Room
from decoding.lengths.base import LengthPolicy, Step
from decoding.logits import NEG_INF, History
from decoding.model import Draw, Row, Want
from decoding.readout import read
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import Verdict

# The kept ids are chosen again after so many tokens of the target.
REFRESH_AFTER = 256


class VocabTrimParams(MethodParams):
    """Parameters of `vocab_trim`."""

    keep: Annotated[int, Field(ge=1, le=1_000_000, description="ids that can be drafted, ends of the answer apart")] = (
        32_768
    )
    domain: Annotated[
        str, Field(max_length=64, description="whose counts: requests of one domain share a sub-vocabulary")
    ] = "default"
    count_prompts: Annotated[bool, Field(description="whether prompts count like the target's own tokens")] = False


class TokenCounts:
    """How often the target emitted each token, and the ids kept by these counts.

    Args:
        vocab_size: number of ids.
        keep: how many ids to keep.
    """

    def __init__(self, vocab_size: int, keep: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._keep = keep
        self._kept: torch.Tensor | None = None
        self._new = 0

    def add(self, tokens: list[int]) -> None:
        """Tokens of the target, or of a text like its own."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        self._counts.index_add_(0, ids, torch.ones_like(ids))
        self._new += len(tokens)
        if self._new >= REFRESH_AFTER:
            self._new, self._kept = 0, None

    @property
    def dropped(self) -> torch.Tensor:
        """bool [vocab]: ids that are not among the most frequent.

        Ties go to the lower ids, which byte-pair vocabularies merged first.
        """
        if self._kept is None:
            order = self._counts.argsort(descending=True, stable=True)
            self._kept = torch.ones(len(self._counts), dtype=torch.bool)
            self._kept[order[: self._keep]] = False
        return self._kept


class VocabTrimDrafter(Drafter):
    """A draft of frequent tokens only (seed 189, VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding).

    Ids are kept by how often the target itself emitted them in requests of the tenant and domain, and those that end
    the answer always. What is drafted, and the distribution stored with it, are the draft model's over the kept ids,
    zero elsewhere; a token outside them comes from the target alone. The trim is of the reading: the model's head
    still computes all rows.
    """

    Params = VocabTrimParams
    seeds = (189,)
    beside = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    params: VocabTrimParams

    def __init__(self, params: VocabTrimParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._counts_prompt = self.params.count_prompts

    async def propose(self, model: Model, seq: Sequence, room: Room, length: LengthPolicy) -> DraftTree:
        """A chain, fewer tokens where the policy stops it."""
        drawn = self.candidates is Candidates.DRAWN
        want = Want(draw=Draw.DRAFT if drawn else Draw.SAMPLE, probs=drawn) | length.want
        counts = self._counts(model, seq)
        if self._counts_prompt:
            counts.add(seq.tokens[: seq.num_prompt_tokens])
            self._counts_prompt = False
        dropped = counts.dropped
        path: list[Step] = []
        while len(path) < min(room.depth, room.nodes):
            tokens = tuple(step.token for step in path)
            [whole] = await model.extend(seq, tokens=tokens, want=Want(draw=None, logits=True, hidden=want.hidden))
            row = trimmed(whole, dropped, History(seq, tokens), want)
            path.append(Step(row.token, row))
            if not length.goes_on(path):
                break
        proposals: list[torch.Tensor | None] = [step.row.probs for step in path]
        return DraftTree.chain([step.token for step in path], model.name, proposals if drawn else None)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: Verdict) -> None:
        """Count what the target emitted."""
        self._counts(model, seq).add([token.id for token in verdict.tokens if token.id < model.vocab_size])

    def _counts(self, model: Model, seq: Sequence) -> TokenCounts:
        size, keep = model.vocab_size, min(self.params.keep, model.vocab_size)
        kind = f"vocab_trim/{size}/{keep}/{self.params.domain}"
        return model.stores.open(kind, seq.tenant, lambda: TokenCounts(size, keep))


def trimmed(row: Row, dropped: torch.Tensor, history: History, want: Want) -> Row:
    """A row read again without some of the ids.

    Args:
        row: with its logits.
        dropped: bool [vocab]; ends of the answer stay nevertheless.
        history: whose row it is.
        want: what to read.
    """
    assert row.logits is not None
    logits = row.logits.masked_fill(dropped.to(row.logits.device), NEG_INF)
    for end in history.seq.end_ids:
        if end < len(logits):
            logits[end] = row.logits[end]
    [again] = read(logits[None], [history], [want])
    again.hidden = row.hidden
    return again


PART = VocabTrimDrafter
