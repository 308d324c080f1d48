"""Whether a decision made again is the one that was recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.decision import Decision

CHOSEN = ("method", "params", "policy", "arm", "sampling", "suffix")
NUMBERS = ("features", "scores", "limits")
TOLERANCE = 1e-3  # relative; readings move a little with the other rows of a forward


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded decision and the decision on the same request now.

    Attributes:
        recorded: then.
        replayed: now.
        differences: what is not the same, a sentence each; empty where the request is answered as it was.
        notes: what may be why, a sentence each.
    """

    recorded: Decision
    replayed: Decision
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether the request would be answered in the same way."""
        return not self.differences


def compare(recorded: Decision, replayed: Decision) -> Replay:
    """Compare two decisions about one request.

    Args:
        recorded: from an answer or the log; its features, scores and limits are compared where it has them.
        replayed: made now.
    """
    differences = [
        f"{name}: {then!r} then, {now!r} now"
        for name in CHOSEN
        if (then := getattr(recorded, name)) != (now := getattr(replayed, name))
    ]
    notes = []
    if recorded.version != replayed.version:
        notes.append(
            f"version: {recorded.version} then, {replayed.version} now: the rules or the artifact have changed since"
        )
    if recorded.kept_from:
        notes.append(f"then, the session kept what was decided for request {recorded.kept_from}; now it is made anew")
    notes += [
        f"{kind}.{name}: {then:g} then, {'absent' if now is None else format(now, 'g')} now"
        for kind in NUMBERS
        for name, then in getattr(recorded, kind).items()
        if (now := getattr(replayed, kind).get(name)) is None
        or not math.isclose(then, now, rel_tol=TOLERANCE, abs_tol=1e-6)
    ]
    return Replay(recorded, replayed, tuple(differences), tuple(notes))
