"""Continuations retrieved from earlier text, pruned by a draft model and fused with its own tree."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from decoding.draft_trees import GrowingTree, draw_without_replacement, grow_top_tree, sibling_proposals
from decoding.drafters.base import Candidates, Drafter, Room
from decoding.lengths.base import LengthPolicy
from decoding.model import Row, Want
from decoding.ngrams import RecentTexts, SuffixIndex, longest_of
from decoding.noise import round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import probs_of
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import Verdict


class RasdParams(MethodParams):
    """Parameters of `rasd`."""

    model_depth: Annotated[int, Field(ge=1, le=16, description="deepest node the draft model drafts itself")] = 5
    model_nodes: Annotated[int, Field(ge=1, le=256, description="most nodes it drafts itself")] = 24
    branch: Annotated[
        int,
        Field(ge=1, le=16, description="children it considers per node; where they are drawn, children of the root"),
    ] = 4
    plausible: Annotated[
        int,
        Field(ge=1, le=64, description="retrieved paths begin with one of so many tokens it finds most probable"),
    ] = 10


@dataclass(slots=True)
class Branch:
    """A node of a prefix tree: how many texts run through it, and how they go on."""

    count: int = 0
    below: dict[int, Branch] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Iterable[Iterable[int]]) -> Branch:
        """The prefix tree of texts."""
        root = cls()
        for text in texts:
            root.count += 1
            branch = root
            for token in text:
                branch = branch.below.setdefault(token, cls())
                branch.count += 1
        return root


def fuse(draft: DraftTree, retrieved: Branch, plausible: Mapping[int, float], most: int) -> DraftTree:
    """A draft with retrieved paths added: each follows the draft as far as they agree, and the rest hangs on there.

    Retrieved nodes go in best first, by the probability of their path's first token times the share of retrieved
    texts that run through them. They stand behind the draft's nodes, so among siblings behind what was drawn.

    Args:
        draft: kept whole.
        retrieved: the prefix tree of what was retrieved.
        plausible: first tokens that stay, with their probability under the draft model.
        most: nodes of the result, at most.
    """
    tokens, parents = list(draft.tokens), list(draft.parents)
    nodes = {step: node for node, step in enumerate(zip(parents, tokens, strict=True))}
    # Score negated, serial number, first token's probability, parent, token, branch.
    heap: list[tuple[float, int, float, int, int, Branch]] = []
    for token, branch in retrieved.below.items():
        if token in plausible:
            heap.append((-plausible[token] * branch.count, len(heap), plausible[token], ROOT, token, branch))
    heapq.heapify(heap)
    serial = len(heap)
    while heap:
        _, _, first, parent, token, branch = heapq.heappop(heap)
        node = nodes.get((parent, token), len(tokens))
        if node == len(tokens):
            if node >= most:
                break
            nodes[parent, token] = node
            tokens.append(token)
            parents.append(parent)
        for following, below in branch.below.items():
            heapq.heappush(heap, (-first * below.count, serial, first, node, following, below))
            serial += 1
    proposals = (*draft.proposals, *[None] * (len(tokens) - len(draft))) if draft.proposals else ()
    return DraftTree(tuple(tokens), tuple(parents), draft.source, proposals)


class RasdDrafter(Drafter):
    """RASD (seed 149, RASD: Retrieval-Augmented Speculative Decoding).

    Retrieves what followed the longest suffix of the context, 16 down to 2 tokens, in this request's own text and in
    the tenant's earlier answers. Paths the draft model finds implausible at their first token are dropped, the others
    join its tree. Fixed candidates: its most probable paths. Drawn ones: children of the root drawn without
    replacement, one child below each node; the retrieved nodes come after them and count as chosen. How many are
    drawn depends on the distributions and the room alone.
    """

    Params = RasdParams
    seeds = (149,)
    beside = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    depth = 16
    nodes = 60
    params: RasdParams

    def __init__(self, params: RasdParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._own = SuffixIndex()

    async def propose(self, model: Model, seq: Sequence, room: Room, length: LengthPolicy) -> DraftTree:
        """The draft model's tree, and what was retrieved as far as there is room."""
        params = self.params
        mine = replace(room, depth=min(room.depth, params.model_depth), nodes=min(room.nodes, params.model_nodes))
        want = Want(draw=None, top=params.plausible)
        if self.candidates is Candidates.DRAWN:
            draft, root = await draw_tree(model, seq, mine, params.branch, want)
        else:
            grown = await grow_top_tree(model, seq, mine, params.branch, want)
            draft, root = grown.tree, grown.root
        plausible = {token: math.exp(logprob) for token, logprob in root.top[: params.plausible]}
        return fuse(draft, self._retrieve(model, seq, room.depth), plausible, room.nodes)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: Verdict) -> None:
        """Keep a finished answer, with what led to it."""
        if seq.finished:
            _texts(model, seq).add(seq.tokens[max(seq.num_prompt_tokens - SuffixIndex.longest, 0) :])

    def _retrieve(self, model: Model, seq: Sequence, depth: int) -> Branch:
        self._own.add(seq.tokens[len(self._own) :])
        context = seq.tokens[-SuffixIndex.longest :]
        found = longest_of([self._own.find(context, depth), _texts(model, seq).find(context, depth)])
        return Branch.of(found.continuations)


async def draw_tree(model: Model, seq: Sequence, room: Room, branch: int, root_want: Want) -> tuple[DraftTree, Row]:
    """Chains under children of the root that are drawn without replacement; one forward a level.

    Args:
        model: what is drawn from.
        seq: what the tree continues.
        room: where it does not do for all chains, the first go on.
        branch: children of the root.
        root_want: what else to read at the root.

    Returns:
        The tree, and what was read at the root.
    """
    want = Want(draw=None, probs=True)
    growing = GrowingTree(model, seq)
    root = await growing.read_root(want | root_want)
    seed = round_seed(seq.seed, len(seq))
    level, rows = [ROOT], [root]
    for depth in range(room.depth):
        probs = [probs_of(row) for row in rows]
        most = min(branch, room.nodes) if depth == 0 else 1
        drawn = draw_without_replacement(probs, most, seed, len(seq) + depth, list(range(len(rows))))
        below = []
        for parent, q, draws in zip(level, probs, drawn, strict=True):
            tokens = [token for token, _ in draws]
            proposals = sibling_proposals(q, tokens)
            below += [growing.add(*child) for child in zip(tokens, [parent] * len(tokens), proposals, strict=True)]
        level = below[: room.nodes - len(growing)]
        if not level or depth + 1 == room.depth:
            break
        rows = await growing.read(level, want)
    return growing.drawn(), root


def _texts(model: Model, seq: Sequence) -> RecentTexts:
    return model.stores.open("rasd", seq.tenant, RecentTexts)


PART = RasdDrafter
