"""Automatic choice of drafters: which of them a request tries that names none, and which sit out for a while."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from decoding.drafters.base import NOTHING
from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.model import ModelPool
from decoding.sequence import Sequence
from decoding.speculation import Arm
from turnout.part_choice import PartChoice

# Of each group the first that the pool can run: a copy costs nothing, a draft model gains most, and trained heads are
# there because they are meant to be used. No more of them, for each costs a little where it never drafts.
GROUPS = (("copyspec",), ("model_chain", "text_chain"), ("medusa", "redrafter", "eesd", "kangaroo"))
LONGEST_REST = 31  # answers


def offered(models: ModelPool | None) -> tuple[PartChoice, ...]:
    """Return the drafters that are tried on these models where a request names none, the cheapest first.

    Args:
        models: the pool; None: not known yet, so those that run on any.
    """
    if models is None:
        return (PartChoice(name=GROUPS[0][0]),)
    found = (next((name for name in group if _can_run(name, models)), None) for group in GROUPS)
    return tuple(PartChoice(name=name) for name in found if name is not None)


def _can_run(name: str, models: ModelPool) -> bool:
    choice = PartChoice(name=name)
    part = choice.find(DRAFTERS, "drafter")
    artifact = getattr(part.Params(), "artifact", None)
    if artifact is not None and artifact not in models.artifacts.names:
        return False
    drafter = choice.make(DRAFTERS, "drafter")
    if drafter.runs_on == "small":
        small, large = models.small, models.large
        apart = models.vocabularies.differs(small.name) and not drafter.across_vocabularies
        if apart or small.num_parameters >= large.num_parameters:
            return False
    try:
        drafter.check(models)
    except Exception:  # made for other models, or damaged: a request that names it is refused
        return False
    return True


@dataclass(slots=True)
class Rest:
    """Rest of a drafter that does not pay.

    Attributes:
        left: answers that it still sits out.
        last: answers of its last rest; 0: it paid in the last answer in which it took part.
    """

    left: int = 0
    last: int = 0


@dataclass(slots=True)
class Rests:
    """Rests of one tenant's drafters, by the name of their arm."""

    by_arm: dict[str, Rest] = field(default_factory=dict)


class Roster:
    """Roster of an answer's drafters: those that cost time where they never draft sit out most answers.

    A draft model and trained heads must be kept up with what the target writes, or read it at every token, also where
    their length policies decline all drafts. One that was not wanted once in a whole answer sits out the next one, then
    two, four and so on, up to `LONGEST_REST`, until it is wanted again.

    Args:
        arms: all that the request may use.
        seq: of the answer.
        models: `large` keeps what was learned.
    """

    def __init__(self, arms: Items[Arm], seq: Sequence, models: ModelPool) -> None:
        self._rests = models.large.stores.open("automatic", seq.learner, Rests).by_arm
        self.arms = [arm for arm in arms if self._takes_part(arm)]

    def _takes_part(self, arm: Arm) -> bool:
        if is_free(arm):
            return True
        rest = self._rests.setdefault(arm.name, Rest())
        rest.left, sits_out = max(rest.left - 1, 0), rest.left > 0
        return not sits_out

    def close(self, tokens: int) -> None:
        """Send those to rest that were not wanted in an answer of `tokens`; a short one tells nothing."""
        for arm in self.arms:
            if is_free(arm) or (tokens < LONGEST_REST and not arm.length.wanted_rounds):
                continue
            rest = self._rests.setdefault(arm.name, Rest())
            rest.last = 0 if arm.length.wanted_rounds else min(2 * rest.last + 1, LONGEST_REST)
            rest.left = rest.last


def is_free(arm: Arm) -> bool:
    """Return whether an arm costs next to nothing while it does not draft: no forwards, and nothing to be read."""
    return arm.drafter.share == 0.0 and arm.drafter.want == NOTHING
