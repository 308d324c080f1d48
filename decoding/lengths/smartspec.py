"""The draft length with the most expected tokens per second, under what the models work on now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.lengths.base import LengthParams, LengthPolicy, Round
from decoding.tree import DraftTree
from decoding.verifiers.base import Verdict
from turnout.types import TokenKind

# Judged drafts after which the averages consist mostly of what was seen.
TRUSTED = 8
LEAST_FOUND = 0.01  # of rounds with a draft: so that depths are told apart


class SmartSpecParams(LengthParams):
    """Parameters of `smartspec`."""

    acceptance: Annotated[FiniteFloat, Field(gt=0, le=1, description="acceptance rate before anything was seen")] = 0.7
    update: Annotated[FiniteFloat, Field(gt=0, lt=1, description="weight of the newest round in the averages")] = 0.15
    probe: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="after so many undrafted steps one token is drafted, to see again; 0: never",
        ),
    ] = 64


@dataclass(slots=True)
class Acceptance:
    """Moving averages over the rounds of one drafter.

    Attributes:
        accepted: accepted tokens of a round.
        judged: judged ones: the accepted, and one more where a candidate was rejected.
        width: nodes of a draft for each of its levels.
        extra: rows fed along that are no nodes.
        found: part of the rounds that were to draft and had a draft.
        idle: undrafted steps since a draft was judged.
        seen: drafts judged so far.
        sought: rounds so far that were to draft.
    """

    accepted: float
    judged: float = 1.0
    width: float = 1.0
    extra: float = 0.0
    found: float = 1.0
    idle: float = 0.0
    seen: int = 0
    sought: int = 0

    @property
    def rate(self) -> float:
        """Acceptance rate of a token that is judged."""
        return self.accepted / self.judged

    def observe_search(self, draft: DraftTree, update: float) -> None:
        """Take note of a round that was to draft, whether it has a draft or not."""
        self.sought += 1
        self.extra += update * (len(draft.fed_tokens) - len(draft) - self.extra)
        self.found += update * (bool(len(draft)) - self.found)

    def observe(self, draft: DraftTree, verdict: Verdict, update: float) -> None:
        """Take note of a round that had a draft."""
        self.idle = 0.0
        self.seen += 1
        accepted = verdict.num_accepted_tokens
        judged = accepted + (verdict.tokens[-1].kind is TokenKind.RECOVERED)
        levels = max(draft.depths()) + 1
        self.accepted += update * (accepted - self.accepted)
        self.judged += update * (judged - self.judged)
        self.width += update * (len(draft) / levels - self.width)


class SmartSpecLength(LengthPolicy):
    """Goodput decides, each round anew (seed 197, SmartSpec).

    For k = 0 .. `most`, goodput is (1 - a^(k+1)) / (1 - a) expected tokens over k draft steps and one verification,
    all sequences the models hold taken to draft alike. Step times are the models' own predictions for their live
    batch and context, measured on this machine; a free drafter's steps take no time. k = 0 decodes plainly.

    The acceptance rate a is the ratio of two moving averages, accepted and judged tokens: the average of the
    rounds' own ratios would be too low for long drafts, because short failures weigh as much as long successes. One
    step's drafts of a whole batch weigh together as much as one alone: else the averages would follow the luck of the
    last few sequences, and a batch that stopped for bad luck is long without a draft to learn better from. It is kept
    by tenant, drafter, verifier and pair of models beyond a request, and does not change while nothing is drafted.
    For trees, k is the depth; what a level costs draft and target follows the trees seen. Where a drafter feeds the
    target rows besides (Lookahead), these are paid in every round that is to draft, also in one without a candidate.
    """

    Params = SmartSpecParams
    params: SmartSpecParams
    seeds = (197,)
    abstains = True

    def before_round(self, round: Round) -> int:
        """The depth of the largest goodput, the smallest such; `most` where no time is known."""
        kind = f"smartspec/{round.drafter}/{round.judge}/{round.draft.name}/{self.params.acceptance}"
        self._known = round.target.stores.open(kind, round.seq.learner, lambda: Acceptance(self.params.acceptance))
        self._sequences = max(round.target.busy().sequences, 1)
        depth = self._best(round, self._known)
        self._drafting = self._sequences if depth else 1  # of one step; a probe is alone
        self._asked = depth > 0 and round.seq.num_remaining > 1  # no draft is looked for before the last token
        if depth == 0 and 0 < self.params.probe <= self._known.idle:
            self._known.idle -= self.params.probe  # at once, so that not all requests of a batch probe together
            self._asked = round.seq.num_remaining > 1
            return 1
        return depth

    def observe(self, draft: DraftTree, verdict: Verdict, seconds: float) -> None:
        """Update what is known of the drafter; a round without a draft says nothing about acceptance."""
        if self._asked and seconds > 0.0:
            self._known.observe_search(draft, self._weight(self._known.sought))
        if len(draft):
            self._known.observe(draft, verdict, self._weight(self._known.seen))
        else:
            # Under load a probe disturbs many: then steps of the whole batch count, once acceptance is no mere guess.
            self._known.idle += len(verdict.tokens) / (self._sequences if self._known.seen >= TRUSTED else 1)

    def _weight(self, seen: int) -> float:
        """Of one round in the averages: its part of a step's, or of what was seen so far while that is little."""
        part: float = 1.0 - (1.0 - self.params.update) ** (1.0 / self._drafting)
        return min(self.params.update, max(part, 1.0 / (seen + 1)))

    def _best(self, round: Round, known: Acceptance) -> int:
        plain_s, level_s = round.target_s(1.0), round.draft_s(known.width)
        if plain_s <= 0.0:
            return self.params.most
        best, best_goodput = 0, 1.0 / plain_s
        # Without extra rows a round that finds nothing costs what plain decoding does: only the others count.
        found = max(known.found, LEAST_FOUND) if known.extra else 1.0
        nothing_s = round.target_s(1.0 + known.extra) if known.extra else plain_s
        tokens, chance = 1.0, 1.0
        for depth in range(1, self.params.most + 1):
            chance *= known.rate
            tokens += chance
            draft_s = depth * level_s + round.target_s(1.0 + depth * known.width + known.extra)
            goodput = (found * tokens + 1.0 - found) / (found * draft_s + (1.0 - found) * nothing_s)
            if goodput > best_goodput:
                best, best_goodput = depth, goodput
        return best


PART = SmartSpecLength
