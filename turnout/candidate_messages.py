"""Messages of candidates and doubts, both ways."""

from __future__ import annotations

from typing import Any, cast

from turnout.candidate_sets import (
    CandidateSet,
    Doubt,
    GraphEdge,
    GraphNode,
    Outcome,
    ReportedCandidate,
    Slot,
    TokenGraph,
    values_of,
)
from turnout.proto import generation_pb2 as pb


def candidate_set_message(each: CandidateSet) -> pb.CandidateSet:
    """The message of the candidates of one choice."""
    return pb.CandidateSet(**_given(values_of(each)))


def doubt_message(doubt: Doubt) -> pb.Doubt:
    """The message of a doubt."""
    return pb.Doubt(**_given(values_of(doubt)))


def _given(value: Any) -> Any:
    """Plain values of a message, without what is absent."""
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list) else value


def candidate_set(message: pb.CandidateSet) -> CandidateSet:
    """Candidates of one choice."""
    return CandidateSet(
        slot=cast("Slot", message.slot),
        part=message.part,
        rule=message.rule,
        score=message.score,
        answers=tuple(message.answers),
        candidates=tuple(_candidate(each) for each in message.candidates),
        omitted=message.omitted,
        graph=_graph(message.graph) if message.HasField("graph") else None,
    )


def _candidate(message: pb.Candidate) -> ReportedCandidate:
    return ReportedCandidate(
        text=message.text,
        tokens=message.tokens,
        logprob=message.logprob if message.HasField("logprob") else None,
        score=message.score if message.HasField("score") else None,
        group=message.group,
        votes=message.votes if message.HasField("votes") else None,
        answers=tuple(message.answers),
        ended=message.ended,
        cut=message.cut,
        path=tuple(message.path),
    )


def _graph(message: pb.TokenGraph) -> TokenGraph:
    return TokenGraph(
        nodes=tuple(GraphNode(node.id, node.text) for node in message.nodes),
        edges=tuple(GraphEdge(edge.before, edge.after, edge.logprob) for edge in message.edges),
        ends=tuple(message.ends),
        paths=message.paths,
        omitted=message.omitted,
    )


def doubt(message: pb.Doubt) -> Doubt:
    """A doubt about an answer."""
    bounds = {name: getattr(message, name) for name in ("least", "greatest", "limit") if message.HasField(name)}
    outcome = cast("Outcome", message.outcome)
    return Doubt(message.answer, message.part, message.value, message.unit, message.meaning, outcome=outcome, **bounds)
