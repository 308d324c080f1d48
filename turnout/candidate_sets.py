"""Candidates of an answer, as clients see them: what was written to choose from, what a search found, and doubt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

MOST_CANDIDATES = 1024  # of a call; all that are shown, where these are more
MOST_CHARS = 1 << 18  # of all their texts
MOST_TEXT = 1 << 12  # characters of one
MOST_NODES = 1 << 12  # of a call's graphs
MOST_EDGES = 4 * MOST_NODES  # likewise
MOST_PLACES = 1 << 16  # of all paths of a call

Slot = Literal["aggregators", "search", "uncertainty"]
# What became of a measured doubt: no limit was set, the answer was given, a text stands in its place, or another model
# answered.
Outcome = Literal["reported", "kept", "abstained", "deferred"]


@dataclass(frozen=True, slots=True)
class ReportedCandidate:
    """Candidate for an answer.

    Attributes:
        text: what it says, or its beginning, see `bounded`.
        tokens: how many it has; 0: not known.
        logprob: of all its tokens, nats: the model's own; of a search, in the law that it scores; None: unknown.
        score: what it was chosen by, see `CandidateSet.score`; None: by nothing of the kind.
        group: its final answer, or the meaning it shares with others; "": none.
        votes: weight of its vote for its group; None: there was no vote.
        answers: indices of the answers that are this one; () where it is not shown.
        ended: whether it was written to its end.
        cut: whether the text is only the beginning.
        path: places of its tokens in the graph's nodes; () without a graph, and where the path is left out.
    """

    text: str
    tokens: int = 0
    logprob: float | None = None
    score: float | None = None
    group: str = ""
    votes: float | None = None
    answers: tuple[int, ...] = ()
    ended: bool = True
    cut: bool = False
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphNode:
    """Token in a graph of hypotheses: its id, and the text of it alone."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Step between two nodes, by place, with the log-probability of the second after the first, nats."""

    before: int
    after: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenGraph:
    """Acyclic graph of tokens: a tree of hypotheses, or a lattice, in which some were merged.

    Attributes:
        nodes: the first is the start, the prompt's end, with id -1 and no text; each comes after those before it.
        edges: between them; of more than `MOST_EDGES`, those on paths of candidates first.
        ends: places of nodes at which an answer may end, in order.
        paths: ways from the start to an end, also through nodes left out, up to 10^15.
        omitted: nodes left out.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    ends: tuple[int, ...]
    paths: int
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Candidates of one choice.

    Attributes:
        slot: kind of the part that they were for.
        part: its name.
        rule: what it is, in a sentence.
        score: what the scores of candidates are, with their unit; "": they have none.
        answers: indices of the answers that were chosen from them, or that they tell of.
        candidates: the best first where a search found them, else in the order in which they were drawn.
        omitted: candidates left out.
        graph: of their tokens; None: there is none.
    """

    slot: Slot
    part: str
    rule: str
    score: str
    answers: tuple[int, ...]
    candidates: tuple[ReportedCandidate, ...]
    omitted: int = 0
    graph: TokenGraph | None = None

    def numbered(self, first: int) -> CandidateSet:
        """Return it with its answers numbered from `first`, not from 0."""
        if not first:
            return self
        candidates = tuple(replace(each, answers=_moved(each.answers, first)) for each in self.candidates)
        return replace(self, answers=_moved(self.answers, first), candidates=candidates)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Measured doubt about an answer: the greater, the more.

    Attributes:
        answer: index of the answer.
        part: the estimator's name.
        value: of the estimator.
        unit: of the value.
        meaning: what the value is, in a sentence.
        least: it can have; None: not known.
        greatest: it can have; None: not known.
        limit: above which the answer is not given; None: there is none.
        outcome: what became of the answer.
    """

    answer: int
    part: str
    value: float
    unit: str = ""
    meaning: str = ""
    least: float | None = None
    greatest: float | None = None
    limit: float | None = None
    outcome: Outcome = "reported"

    def numbered(self, first: int) -> Doubt:
        """Return it with its answer numbered from `first`, not from 0."""
        return replace(self, answer=self.answer + first)


CLASSES = (ReportedCandidate, GraphNode, GraphEdge, TokenGraph, CandidateSet, Doubt)


def _moved(answers: tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(first + each for each in answers)


def values_of(each: Any) -> Any:
    """Return what `asdict` does, with lists for tuples; tens of thousands of values take it far longer."""
    if isinstance(each, tuple):
        return list(each) if each and isinstance(each[0], int) else [values_of(one) for one in each]
    if isinstance(each, CLASSES):
        return {name: values_of(getattr(each, name)) for name in each.__slots__}
    return each


def bounded(sets: Iterable[CandidateSet]) -> tuple[CandidateSet, ...]:
    """Return the sets of a call within the bounds of this module: fewer candidates, shorter texts, smaller graphs.

    Each set has the same share; candidates that are shown stay, and nodes on their paths stay before others.
    """
    found = tuple(sets)
    if not found:
        return ()
    kept = [_fewer(each, max(MOST_CANDIDATES // len(found), 1)) for each in found]
    longest = longest_text(sum(len(each.candidates) for each in kept))
    nodes, edges, places = (most // len(found) for most in (MOST_NODES, MOST_EDGES, MOST_PLACES))
    drawn = (_smaller(_shorter(each, longest), nodes) for each in kept)
    return tuple(_fewer_edges(_fewer_paths(each, places), edges) for each in drawn)


def longest_text(count: int) -> int:
    """Return how many characters each text of that many candidates may have."""
    return min(MOST_TEXT, MOST_CHARS // max(count, 1))


def _fewer(each: CandidateSet, most: int) -> CandidateSet:
    candidates = each.candidates
    if len(candidates) <= most:
        return each
    order = _shown_first(each)
    most = max(most, sum(bool(one.answers) for one in candidates))
    kept = tuple(candidates[place] for place in sorted(order[:most]))
    return replace(each, candidates=kept, omitted=each.omitted + len(candidates) - len(kept))


def _shown_first(each: CandidateSet) -> list[int]:
    """Places of candidates in the order in which they are kept."""
    return sorted(range(len(each.candidates)), key=lambda place: (not each.candidates[place].answers, place))


def _shorter(each: CandidateSet, longest: int) -> CandidateSet:
    if all(len(one.text) <= longest and len(one.group) <= longest for one in each.candidates):
        return each
    candidates = tuple(
        replace(one, text=one.text[:longest], group=one.group[:longest], cut=one.cut or len(one.text) > longest)
        for one in each.candidates
    )
    return replace(each, candidates=candidates)


def _fewer_paths(each: CandidateSet, most: int) -> CandidateSet:
    """A set whose paths have at most that many places together: whole ones, of candidates that are shown first."""
    if sum(len(one.path) for one in each.candidates) <= most:
        return each
    kept, left = set[int](), most
    for place in _shown_first(each):
        length = len(each.candidates[place].path)
        if length <= left:
            kept.add(place)
            left -= length
    candidates = tuple(one if place in kept else replace(one, path=()) for place, one in enumerate(each.candidates))
    return replace(each, candidates=candidates)


def _fewer_edges(each: CandidateSet, most: int) -> CandidateSet:
    graph = each.graph
    if graph is None or len(graph.edges) <= most:
        return each
    walked = {step for one in each.candidates for step in pairwise((0, *one.path))}
    order = sorted(graph.edges, key=lambda edge: (edge.before, edge.after) not in walked)
    kept = sorted(order[:most], key=lambda edge: (edge.after, edge.before))
    return replace(each, graph=replace(graph, edges=tuple(kept)))


def _smaller(each: CandidateSet, most: int) -> CandidateSet:
    """A set whose graph has at most that many nodes: whole paths of candidates, of those that are shown first."""
    graph = each.graph
    if graph is None or len(graph.nodes) <= most:
        return each
    kept: dict[int, None] = {0: None} if most else {}
    for one in (each.candidates[place] for place in _shown_first(each)):
        new = [place for place in one.path if place not in kept]
        if len(kept) + len(new) <= most:
            kept |= dict.fromkeys(new)
    places = {old: new for new, old in enumerate(sorted(kept))}
    edges = tuple(
        GraphEdge(places[edge.before], places[edge.after], edge.logprob)
        for edge in graph.edges
        if edge.before in places and edge.after in places
    )
    smaller = TokenGraph(
        tuple(graph.nodes[old] for old in places),
        edges,
        tuple(places[end] for end in graph.ends if end in places),
        graph.paths,
        graph.omitted + len(graph.nodes) - len(places),
    )
    candidates = tuple(
        replace(one, path=tuple(places[at] for at in one.path) if all(at in places for at in one.path) else ())
        for one in each.candidates
    )
    return replace(each, candidates=candidates, graph=smaller if places else None)
