"""What a method leaves for the usage of its request: candidates that answers were chosen from, and measured doubt."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Items

from decoding.aggregators.base import LIKELIHOOD, Aggregator, AnswerSet, Candidate
from decoding.model import Request
from decoding.parts import Part
from turnout.candidate_sets import CandidateSet, Doubt, ReportedCandidate, bounded

# Lists in `Request.extra`, of `CandidateSet` and `Doubt`.
CANDIDATES, DOUBTS = "candidates", "doubts"


def report_candidates(request: Request, found: CandidateSet) -> None:
    """Leave the candidates of a choice, within bounds; make them only where `request.candidates`."""
    request.extra.setdefault(CANDIDATES, []).extend(bounded([found]))


def report_doubt(request: Request, doubt: Doubt) -> None:
    """Leave a measured doubt, in place of what is known of the same one."""
    doubts = request.extra.setdefault(DOUBTS, [])
    doubts[:] = [*(each for each in doubts if each.part != doubt.part), doubt]


def chosen_from(
    aggregator: Aggregator, group: AnswerSet, chosen: int, cancelled: Collection[Candidate] = ()
) -> CandidateSet:
    """The answers that an aggregator chose from, as clients see them.

    Args:
        aggregator: with `group` after its choice.
        group: the answers.
        chosen: place of the one that is shown.
        cancelled: answers that were not written to their end.
    """
    known = len(group.answers)
    nothing: list[float | None] = [None] * known
    scores, votes = group.scores or nothing, group.votes or nothing
    groups = [each.final for each in group.answers] if group.votes else [""] * known
    found = [
        reported(each, score, of, vote, (0,) if place == chosen else ())
        for place, (each, score, of, vote) in enumerate(zip(group.answers, scores, groups, votes, strict=True))
    ]
    found += [reported(each, ended=False) for each in cancelled]
    score = aggregator.score if group.scores else ""
    return CandidateSet("aggregators", aggregator.name, aggregator.summary(), score, (0,), tuple(found))


def sampled(part: Part, group: AnswerSet) -> CandidateSet:
    """The samples that an estimator of uncertainty looked at, as clients see them."""
    nothing: list[float | None] = [None] * len(group.answers)
    scores, groups = group.scores or nothing, group.groups or [""] * len(group.answers)
    found = [reported(each, score, of) for each, score, of in zip(group.answers, scores, groups, strict=True)]
    score = LIKELIHOOD if group.scores else ""
    return CandidateSet("uncertainty", part.name, part.summary(), score, (0,), tuple(found))


def reported(
    candidate: Candidate,
    score: float | None = None,
    group: str = "",
    votes: float | None = None,
    answers: Items[int] = (),
    ended: bool = True,
) -> ReportedCandidate:
    """A candidate as clients see it; see `ReportedCandidate`."""
    count = len(candidate.ids) or candidate.num_tokens
    logprob = sum(candidate.logprobs) if candidate.logprobs and len(candidate.logprobs) == count else None
    return ReportedCandidate(
        candidate.text, count, _finite(logprob), _finite(score), group, votes, tuple(answers), ended
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
