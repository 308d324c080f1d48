"""Continuations of a context found in earlier text, and how they join a draft."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decoding.ngrams import RecentTexts, SuffixIndex, longest_of
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from decoding.model import Model


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


class Retrieval:
    """Retrieval of the tokens that followed the longest suffix of the context, 16 down to 2 tokens, in two places.

    These are the request's own text, and what the tenant's earlier requests to this model were answered.
    """

    def __init__(self) -> None:
        self._own = SuffixIndex()

    def find(self, model: Model, seq: Sequence, depth: int) -> Branch:
        """The prefix tree of what followed, that deep; without branches where nothing is found."""
        self._own.add(seq.tokens[len(self._own) :])
        context = seq.tokens[-SuffixIndex.longest :]
        found = longest_of([self._own.find(context, depth), _texts(model, seq).find(context, depth)])
        return Branch.of(found.continuations)

    def keep(self, model: Model, seq: Sequence) -> None:
        """Keep an answer, once it is finished, with what led to it."""
        if seq.finished:
            _texts(model, seq).add(seq.tokens[max(seq.num_prompt_tokens - SuffixIndex.longest, 0) :])


def _texts(model: Model, seq: Sequence) -> RecentTexts:
    return model.stores.open("rasd", seq.learner, RecentTexts)
