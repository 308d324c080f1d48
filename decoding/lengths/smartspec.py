"""The draft length with the most expected tokens per second, under what the models work on now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from decoding.lengths.base import LengthParams, LengthPolicy, Round
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.types import TokenKind

# Judged drafts after which the averages consist mostly of what was seen.
TRUSTED = 8
FARTHEST = 4.0  # times what a round was to take
FADING = 0.1  # of an average's update: how much a measured overhead is believed less for each untried draft
LEAST_FOUND = 0.01  # of rounds with a draft: so that depths differ
# Plain steps of every sequence that drafts may lose before anything was earned, and that they may save up.
GRANT, SAVINGS = 2.0, 32.0
# Of the steps between probes, what is left of them where as much as may be is saved up.
OFTENEST = 0.125
# Of a predicted step: by how much one stretch moves what plain steps are held to take, and how much less that may be.
PACE, LEAST_USUAL = 0.05, -0.5


class SmartSpecParams(LengthParams):
    """Parameters of `smartspec`."""

    acceptance: Annotated[FiniteFloat, Field(gt=0, le=1, description="acceptance rate before anything was seen")] = 0.7
    update: Annotated[FiniteFloat, Field(gt=0, lt=1, description="weight of the newest round in the averages")] = 0.15
    probe: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="undrafted steps after which one token is drafted as a probe, fewer where drafts have"
            " saved time; 0: never",
        ),
    ] = 64
    allowance: Annotated[
        FiniteFloat,
        Field(ge=0, le=1, description="part of plain decoding's time that drafts may lose; 1: any"),
    ] = 0.01
    margin: Annotated[
        FiniteFloat,
        Field(ge=0, le=1, description="by how much of plain decoding's goodput a draft's must be larger"),
    ] = 0.1


@dataclass(slots=True)
class Overhead:
    """Moving average of measured times beyond predicted ones, `seconds`, of `count` rounds."""

    seconds: float = 0.0
    count: int = 0

    def observe(self, seconds: float, expected_s: float, weight: float) -> None:
        """Take note of one round. One that waited for another's prompt is no rule: it counts no more than `FARTHEST`.

        Args:
            seconds: that it took.
            expected_s: that it was to take.
            weight: of it in the average.
        """
        self.count += 1
        off, most = seconds - expected_s - self.seconds, FARTHEST * expected_s
        self.seconds = max(self.seconds + weight * min(max(off, -most), most), 0.0)

    def fade(self, weight: float) -> None:
        """Take note of a round of the other kind: what is not measured any more is believed the less."""
        self.seconds *= 1.0 - weight


@dataclass(slots=True)
class Acceptance:
    """Moving averages over the rounds of one drafter: rates begin with a belief, a draft's shape with the first seen.

    Attributes:
        accepted: accepted tokens of a round.
        judged: judged ones: the accepted, and one more where a candidate was rejected.
        width: nodes of a draft for each of its levels.
        extra: rows fed along that are no nodes.
        found: part of the rounds that were to draft and had a draft.
        idle: undrafted steps since a draft was judged.
        seen: drafts judged so far.
        sought: rounds so far that were to draft.
        drafting: what such a round takes beyond the forwards that are predicted for it.
        plain: likewise a step that is not to draft, while no sequence drafts.
        usual: the same in predicted steps, about the median; it is not updated while no sequence decodes plainly.
        earned_s: what drafts may lose, see `SmartSpecLength`.
        crowd: sequences that decoded in the last round.
        changes: how often a round that was to draft has begun or ended.
    """

    accepted: float
    judged: float = 1.0
    width: float = 1.0
    extra: float = 0.0
    found: float = 1.0
    idle: float = 0.0
    seen: int = 0
    sought: int = 0
    drafting: Overhead = field(default_factory=Overhead)
    plain: Overhead = field(default_factory=Overhead)
    usual: float = 0.0
    earned_s: float = 0.0
    crowd: int = 0
    changes: int = 0

    @property
    def rate(self) -> float:
        """Acceptance rate of a token that is judged."""
        return self.accepted / self.judged

    def observe_search(self, draft: DraftTree, update: float) -> None:
        """Take note of a round that was to draft, whether it has a draft or not."""
        self.sought += 1
        self.extra += max(update, 1.0 / self.sought) * (len(draft.fed_tokens) - len(draft) - self.extra)
        self.found += update * (bool(len(draft)) - self.found)

    def observe(self, draft: DraftTree, verdict: VerifyResult, update: float) -> None:
        """Take note of a round that had a draft."""
        self.idle = 0.0
        self.seen += 1
        accepted = verdict.num_accepted_tokens
        judged = accepted + (verdict.tokens[-1].kind is TokenKind.RECOVERED)
        levels = max(draft.depths()) + 1
        self.accepted += update * (accepted - self.accepted)
        self.judged += update * (judged - self.judged)
        self.width += max(update, 1.0 / self.seen) * (len(draft) / levels - self.width)


@dataclass(frozen=True, slots=True)
class Times:
    """Predicted times of forwards in a round, in seconds; plain numbers, for a policy travels with its drafter.

    Attributes:
        plain_s: of a step without drafts.
        node_s: what the target takes longer for each row besides.
        level_s: of drafting a level.
    """

    plain_s: float
    node_s: float
    level_s: float

    @classmethod
    def of(cls, round: Round, known: Acceptance, depth: int) -> Times:
        """Of a round that may draft so deep."""
        rows = max(depth, 1) * known.width + known.extra
        plain_s = round.target_s(1.0)
        return cls(plain_s, (round.target_s(1.0 + rows) - plain_s) / rows, round.draft_s(known.width))

    def of_draft(self, draft: DraftTree) -> float:
        """Of the round that verifies it."""
        return self.of_shape(max(draft.depths(), default=-1) + 1, len(draft.fed_tokens))

    def of_shape(self, levels: float, rows: float) -> float:
        """Return the time of a round with a draft of `levels`, and `rows` fed in addition to the last token."""
        return self.plain_s + rows * self.node_s + levels * self.level_s


class SmartSpecLength(LengthPolicy):
    """Goodput decides, each round anew (paper #197, SmartSpec).

    For k = 0 .. `most`, goodput is (1 - a^(k+1)) / (1 - a) expected tokens over k draft steps and one verification,
    all sequences the models hold taken to draft alike. Step times are the models' own predictions for their live
    batch and context, measured on this machine; a free drafter's steps are no forwards. k = 0 decodes plainly.

    The acceptance rate a is the ratio of two moving averages, accepted and judged tokens: the average of the
    rounds' own ratios would be too low for long drafts, because short failures weigh as much as long successes. One
    step's drafts of a whole batch weigh together as much as one alone: else the averages would follow the luck of the
    last few sequences, and a batch that stopped for bad luck is long without a draft to learn better from. It is kept
    by tenant, drafter, verifier and pair of models beyond a request, and does not change while nothing is drafted.
    For trees, k is the depth; what a level costs draft and target follows the trees seen. Where a drafter feeds the
    target rows besides (Lookahead), these are paid in every round that is to draft, also in one without a candidate.

    What rounds and plain steps take beyond these predictions is measured as well, for it may decide where forwards are
    short: trained heads, look-ups and searches for a tree take time as well, and a round is more than its forward. What
    an answer's first draft takes to read what stands there must pay within the answer's remaining tokens.

    Times are known no better than to some percent, those of plain steps least while all draft: what promises less than
    `margin` more than plain decoding is left out. And goodput is a belief, and trying costs time, most in a batch,
    where one draft keeps all others waiting. So what drafts may lose is bounded: every token earns them `allowance` of
    a plain step, rounds with a draft and those that waited for one add what they saved or lost by the clock, up to
    twice what they were to take, and no sequence drafts deeper than all together can afford if nothing is
    accepted. A drafter that is right soon earns what it needs; one that is wrong, or slower than predicted, costs
    little more than the allowance.
    """

    Params = SmartSpecParams
    params: SmartSpecParams
    papers = (197,)
    abstains = True

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._timed = self._drafted = False
        self._entry_s = self._reading_s = 0.0
        self._part_of_risk = 1.0

    def share_risk(self, num_arms: int) -> None:
        """See `LengthPolicy.share_risk`."""
        self._part_of_risk = 1.0 / num_arms

    def promise(self, round: Round) -> float:
        """See `LengthPolicy.promise`."""
        self._look(round)
        return self._best(round, self._known, found=1.0)[1]

    def _look(self, round: Round) -> None:
        """Recall what is known of the drafter, and predict what a round takes."""
        kind = f"smartspec/{round.drafter}/{round.judge}/{round.draft.name}/{self.params.acceptance}"
        self._known = round.target.stores.open(
            kind, round.seq.learner, lambda: Acceptance(self.params.acceptance, width=round.width)
        )
        self._sequences = round.sequences
        # Where all begin to draft, each waits until all have read.
        self._reading_s = self._sequences * round.entry_s
        self._entry_s = 0.0 if self._drafted else self._reading_s
        self._times = Times.of(round, self._known, 1)

    def before_round(self, round: Round) -> int:
        """The depth of the largest goodput, the smallest such; `most` where no time is known."""
        self._look(round)
        able = self._affordable(1) > 0
        best = self._best(round, self._known, max(self._known.found, LEAST_FOUND))[0]
        self.wanted_rounds += best > 0
        depth = best if able else 0
        every = self._probe_every
        probes = depth == 0 and 0 < every <= self._known.idle
        self._spent = 0.0
        if probes and able:
            self._spent, depth = every, 1
        elif probes and self._risk_s(1) > self._most_s:
            # So much is never saved up: else one slow moment would end it for good.
            self._spent = every
            self._known.drafting.fade(self.params.update)
        elif depth > 1:
            self._times = Times.of(round, self._known, depth)
            wanted, depth = depth, self._affordable(depth)
            if depth != wanted:  # rows cost otherwise where there are fewer
                self._times = Times.of(round, self._known, depth)
        self._known.idle -= self._spent  # at once, so that not all requests of a batch probe together
        self._drafting = self._sequences if depth and not probes else 1  # of one step; a probe is alone
        self._wanted, self._asked = depth, depth > 0 and round.seq.num_remaining > 1  # nothing before the last token
        self._known.changes += self._asked
        self._begun = self._known.changes
        return depth

    @property
    def _probe_every(self) -> float:
        """Undrafted steps between probes: the fewer, the more is saved up that they may lose."""
        if self.params.allowance == 1.0:
            return float(self.params.probe)
        full_s = self._sequences * SAVINGS * self._plain_s
        saved = min(max(self._known.earned_s / full_s, 0.0), 1.0) if full_s > 0.0 else 0.0
        return self.params.probe * (1.0 - saved * (1.0 - OFTENEST))

    def defer(self) -> None:
        """It is as if no draft had been wanted: looking for one cost next to nothing, and a probe is still owed."""
        self._known.changes -= self._asked
        self._known.idle += self._spent
        self._begun, self._wanted, self._asked, self._drafting = self._known.changes, 0, False, 1

    def _affordable(self, depth: int) -> int:
        """The depth, or the largest below it that every sequence may draft even if nothing of it is accepted."""
        known, times = self._known, self._times
        if self.params.allowance == 1.0 or times.plain_s <= 0.0:
            return depth
        if not self._timed and known.crowd != 1:  # as others may begin at the same time that are not counted yet
            return 0
        spare_s = known.earned_s / self._sequences + GRANT * self._part_of_risk * times.plain_s
        while depth and self._risk_s(depth) > spare_s:
            depth -= 1
        return depth

    def _risk_s(self, depth: int) -> float:
        """Return the additional time of a round with a draft over a step without one."""
        known = self._known
        round_s = self._times.of_shape(depth, depth * known.width + known.extra) + known.drafting.seconds
        return round_s + self._entry_s - self._plain_s

    @property
    def _most_s(self) -> float:
        """Most time that may be saved up for each sequence."""
        return SAVINGS * self._plain_s + self._reading_s

    @property
    def _plain_s(self) -> float:
        """Time of a step without drafts."""
        return self._times.plain_s * (1.0 + self._known.usual)

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Update what is known of the drafter; a round without a draft says nothing about acceptance."""
        if self._asked and seconds > 0.0:
            self._known.observe_search(draft, min(self.params.update, self._weight(self._known.sought)))
        if seconds > 0.0 and self._times.plain_s > 0.0:
            self._earn(draft, seconds, len(verdict.tokens))
            self._time(draft, seconds, len(verdict.tokens))
        self._known.changes += self._asked
        if len(draft):
            self._known.observe(draft, verdict, min(self.params.update, self._weight(self._known.seen)))
        else:
            # Under load a probe disturbs many: then steps of the whole batch count, once acceptance is no mere guess.
            self._known.idle += len(verdict.tokens) / (self._sequences if self._known.seen >= TRUSTED else 1)

    def observe_untried(self, draft: DraftTree, verdict: VerifyResult) -> None:
        """See `LengthPolicy.observe_untried`: it says what a probe would, and costs nothing."""
        part = 1.0 - (1.0 - self.params.update) ** (1.0 / self._sequences)
        self._known.observe(draft, verdict, min(self.params.update, max(part, 1.0 / (self._known.seen + 1))))
        # Nothing is measured meanwhile of what rounds take beyond the forwards.
        self._known.drafting.fade(part * FADING)

    def _earn(self, draft: DraftTree, seconds: float, tokens: int) -> None:
        """Enter a round, or a stretch without drafts, into what drafts may lose."""
        known, plain_s = self._known, self._plain_s
        earned_s = self.params.allowance * self._part_of_risk * tokens * plain_s
        if self._asked and not self._timed:  # it has read the prompt as well: the draft's own time is unknown
            earned_s += (tokens - 1) * plain_s - self._risk_s(self._wanted)
        elif self._timed and (self._asked or known.changes != self._begun):  # has drafted, or waited for who did
            expected_s = self._times.of_draft(draft) + self._entry_s if self._asked else tokens * plain_s
            # One that waited for another's prompt is no rule: it is paid for like one of twice its time.
            earned_s += tokens * plain_s - min(seconds, 2.0 * (expected_s + known.drafting.seconds))
        known.crowd = self._sequences
        least_s = -GRANT * self._part_of_risk * self._sequences * plain_s
        most_s = self._sequences * self._most_s
        known.earned_s = min(max(known.earned_s + earned_s, least_s), most_s)

    def _time(self, draft: DraftTree, seconds: float, steps: int) -> None:
        """Compare a round, or the steps of a stretch without drafts, with what its forwards were to take."""
        known, times = self._known, self._times
        first = not self._timed or (times.level_s > 0.0 and len(draft) > 0 and not self._drafted)
        self._timed, self._drafted = True, self._drafted or len(draft) > 0
        if first:  # it has read the prompt, as the first draft has where drafting is forwards
            return
        if self._asked:
            known.drafting.observe(seconds, times.of_draft(draft), self._weight(known.drafting.count))
            # Otherwise steps would count as slow forever; a draft is tried again, see `probe` and `allowance`.
            known.plain.fade(self._part)
        elif self._wanted == 0 and known.changes == self._begun:  # no sequence has waited for another's draft
            known.plain.observe(seconds / steps, times.plain_s, self._weight(known.plain.count))
            off = seconds / steps / times.plain_s - 1.0 - known.usual
            known.usual = max(known.usual + min(max(off, -PACE), PACE), LEAST_USUAL)

    def _weight(self, seen: int) -> float:
        """Of one round in an average: its part of a step's, or of what was seen so far while that is little."""
        return max(self._part, 1.0 / (seen + 1))

    @property
    def _part(self) -> float:
        part: float = 1.0 - (1.0 - self.params.update) ** (1.0 / self._drafting)
        return part

    def _best(self, round: Round, known: Acceptance, found: float) -> tuple[int, float]:
        """Return the depth of the largest goodput, 0 where plain decoding has it, and the largest over plain's.

        Args:
            round: the coming one.
            known: of the drafter.
            found: part of such rounds that have a draft.
        """
        plain_s, level_s = round.target_s(1.0), round.draft_s(known.width)
        if plain_s <= 0.0:
            return self.params.most, 1.0
        plain_s += known.plain.seconds
        best, best_goodput, most_goodput = 0, (1.0 + self.params.margin) / plain_s, 0.0
        nothing_s = round.target_s(1.0 + known.extra)
        entry_s = self._entry_s / max(round.seq.num_remaining, 1)
        tokens, chance = 1.0, 1.0
        for depth in range(1, self.params.most + 1):
            chance *= known.rate
            tokens += chance
            draft_s = depth * level_s + round.target_s(1.0 + depth * known.width + known.extra)
            round_s = found * draft_s + (1.0 - found) * nothing_s + known.drafting.seconds
            goodput = 1.0 / (round_s / (found * tokens + 1.0 - found) + entry_s)
            most_goodput = max(most_goodput, goodput)
            if goodput > best_goodput:
                best, best_goodput = depth, goodput
            # A round takes no less time for being deeper, and however deep, it has fewer tokens than this.
            if known.rate < 1.0 and (found / (1.0 - known.rate) + 1.0 - found) / round_s <= best_goodput:
                break
        return best, most_goodput * plain_s


PART = SmartSpecLength
