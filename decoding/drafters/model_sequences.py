"""Several chains drawn independently of each other from the model that the drafter runs on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.draft_trees import PROBS, GrowingTree, tree_noise
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.noise import round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import probs_of
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model


class ModelSequencesParams(MethodParams):
    """Parameters of `model_sequences`."""

    sequences: Annotated[int, Field(ge=1, le=32, description="sequences drawn")] = 4


class ModelSequencesDrafter(Drafter):
    """Independent draft sequences (paper #165, SpecTr: Fast Speculative Decoding via Optimal Transport).

    Equal beginnings stand in the tree, and are fed, once; a level is drawn when there is room for all sequences.
    """

    Params = ModelSequencesParams
    papers = (165,)
    runs_on = "small"
    kinds = frozenset({Candidates.SEQUENCES})
    depth = 5
    nodes = 64
    params: ModelSequencesParams

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The sequences, all of one length."""
        growing = GrowingTree(model, seq, length)
        seed = round_seed(seq.seed, len(seq))
        count = min(self.params.sequences, room.nodes)
        paths: list[list[int]] = [[] for _ in range(count)]
        level, rows = [ROOT], [await growing.read_root(PROBS)]
        for depth in range(room.depth):
            probs = dict(zip(level, (probs_of(row) for row in rows), strict=True))
            if not all(bool((q > 0).any()) for q in probs.values()):
                break
            ends = [path[-1] if path else ROOT for path in paths]
            stacked = torch.stack([probs[end] for end in ends])
            noise = tree_noise(seed, len(seq) + depth, list(range(count)), stacked)
            tokens = stacked.log().add_(noise).argmax(-1).tolist()
            known: dict[tuple[int, int], int] = {}
            for path, end, token in zip(paths, ends, tokens, strict=True):
                if (end, token) not in known:
                    known[end, token] = growing.add(token, end, probs[end])
                path.append(known[end, token])
            if depth + 1 == room.depth or len(growing) + count > room.nodes:
                break
            level = list(known.values())
            rows = await growing.read(level, PROBS)
        return replace(growing.drawn(), sequences=tuple(map(tuple, paths)) if len(growing) else ())


PART = ModelSequencesDrafter
