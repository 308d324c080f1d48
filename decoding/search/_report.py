"""Hypotheses of a search as clients see them: texts, scores, and the graph of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from decoding.model import TokenText
from decoding.search._graph import Lattice
from decoding.search.base import Hypothesis, Search
from turnout.candidate_sets import (
    MOST_CANDIDATES,
    MOST_NODES,
    CandidateSet,
    GraphEdge,
    GraphNode,
    ReportedCandidate,
    TokenGraph,
    bounded,
    longest_text,
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
    lattice, left_out, paths = search.lattice, 0, 0
    if lattice is None:
        order = sorted(range(len(best)), key=lambda place: (place not in shown, place))
        lattice, left_out, paths = tree_of([best[place] for place in order], MOST_NODES)
    nodes, longest = lattice.in_order(), longest_text(len(best))
    places = {node: place for place, node in enumerate(nodes)}
    candidates = tuple(
        replace(
            _reported(each, [token for token in each.tokens if token not in search.task.end_ids], tokens, longest),
            answers=tuple(shown.get(place, ())),
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
        paths or lattice.num_paths(),
        left_out,
    )
    omitted = len(found) - len(best)
    rule, answers = search.summary(), tuple(range(count))
    [held] = bounded([CandidateSet("search", search.name, rule, search.score, answers, candidates, omitted, graph)])
    return held


def _reported(each: Hypothesis, ids: Items[int], tokens: TokenText, longest: int) -> ReportedCandidate:
    """A hypothesis with the text of these tokens, of which no more are decoded than it may have characters."""
    text, score = tokens.decode(ids[:longest]), each.score if each.ended else None
    cut = len(ids) > longest
    return ReportedCandidate(
        text.rstrip("\ufffd") if cut else text, each.length, each.logp, score, ended=each.ended, cut=cut
    )


def tree_of(found: Iterable[Hypothesis], most: int) -> tuple[Lattice, int, int]:
    """The tree of hypotheses: what they have in common stands there once; all of them are ends.

    Args:
        found: the hypotheses; one that does not fit is left out, whole.
        most: nodes that the tree may have.

    Returns:
        The tree, how many nodes are left out, and how many hypotheses there are.
    """
    tree, left, held, count = Lattice(Hypothesis(None)), set[Hypothesis](), set[Hypothesis](), 0
    for each in found:
        here, path, place, count = tree.start, each.path, 0, count + 1
        while place < len(path) and (after := _after(tree, here, path[place].token)) is not None:
            here, place = after, place + 1
        new = path[place:]
        if len(tree.before) + len(new) > most:
            left.update(new)
            continue
        held.update(new)
        for node in new:
            after = Hypothesis(here, node.token, node.logp, node.length)
            tree.add(after)
            here = after
        tree.ends[here] = None
    return tree, len(left - held), count


def _after(lattice: Lattice, node: Hypothesis, token: int) -> Hypothesis | None:
    """The node with a token after another one; no two after the same one hold the same token."""
    return next((one for one in lattice.after[node] if one.token == token), None)


def way(lattice: Lattice, each: Hypothesis) -> list[Hypothesis]:
    """Return the nodes that spell a hypothesis; none where some are left out."""
    found = [lattice.start]
    for token in each.tokens:
        after = _after(lattice, found[-1], token)
        if after is None:
            return []
        found.append(after)
    return found[1:]


def text_of(token: int, tokens: TokenText) -> str:
    """Return the text of a token alone; of a part of a character, its bytes."""
    data = tokens.token_bytes(token)
    text, rest = split_complete(data)
    return name_of_part(text + "\ufffd" * bool(rest), data if rest or "\ufffd" in text else None)
