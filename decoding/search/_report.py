"""Hypotheses of a search as clients see them: texts, scores, and the graph of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from decoding.model import TokenText
from decoding.search._graph import Lattice
from decoding.search.base import Hypothesis, Search
from turnout.candidate_sets import (
    MOST_CANDIDATES,
    CandidateSet,
    GraphEdge,
    GraphNode,
    ReportedCandidate,
    TokenGraph,
)
from turnout.utf8 import name_of_part, split_complete


def found_by(
    search: Search, found: list[Hypothesis], shown: Mapping[int, Items[int]], count: int, tokens: TokenText
) -> CandidateSet:
    """What a search found, the best first: hypotheses that have ended, then those that had not.

    Args:
        search: after it has run.
        found: its best hypotheses.
        shown: of those that are shown, by place, the indices of the answers.
        count: how many answers there are.
        tokens: gives texts.
    """
    best = found[:MOST_CANDIDATES]
    lattice = search.lattice or tree_of(best)
    nodes = lattice.in_order()
    places = {node: place for place, node in enumerate(nodes)}
    candidates = tuple(
        ReportedCandidate(
            tokens.decode(token for token in each.tokens if token not in search.task.end_ids),
            each.length,
            each.logp,
            each.score if each.ended else None,
            answers=tuple(shown.get(place, ())),
            ended=each.ended,
            path=tuple(places[node] for node in way(lattice, each)),
        )
        for place, each in enumerate(best)
    )
    edges = (
        GraphEdge(places[before], places[node], round(logprob, 6))
        for node in nodes
        for before, logprob in lattice.before[node].items()
    )
    graph = TokenGraph(
        (GraphNode(-1, ""), *(GraphNode(node.token, text_of(node.token, tokens)) for node in nodes[1:])),
        tuple(edges),
        tuple(sorted(places[end] for end in lattice.ends)),
        lattice.num_paths(),
    )
    omitted = len(found) - len(best)
    rule = search.summary()
    return CandidateSet("search", search.name, rule, search.score, tuple(range(count)), candidates, omitted, graph)


def tree_of(found: Iterable[Hypothesis]) -> Lattice:
    """The tree of hypotheses: what they have in common stands there once; all of them are ends."""
    tree = Lattice(Hypothesis(None))
    for each in found:
        here = tree.start
        for node in each.path:
            after = next((one for one in tree.after[here] if one.token == node.token), None)
            if after is None:
                after = Hypothesis(here, node.token, node.logp, node.length)
                tree.add(after)
            here = after
        tree.ends[here] = None
    return tree


def way(lattice: Lattice, each: Hypothesis) -> list[Hypothesis]:
    """Return the nodes that spell a hypothesis; no two nodes after the same one hold the same token."""
    found = [lattice.start]
    for token in each.tokens:
        after = next((one for one in lattice.after[found[-1]] if one.token == token), None)
        if after is None:
            return []
        found.append(after)
    return found[1:]


def text_of(token: int, tokens: TokenText) -> str:
    """Return the text of a token alone; of a part of a character, its bytes."""
    data = tokens.token_bytes(token)
    text, rest = split_complete(data)
    return name_of_part(text + "\ufffd" * bool(rest), data if rest or "\ufffd" in text else None)
