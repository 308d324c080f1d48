"""Speculative decoding rounds: choose a drafter, draft, verify in one forward of the target, learn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

from decoding.decode_loop import LONGEST_STRETCH, stretch_lengths
from decoding.drafters.base import NOTHING, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy, Round
from decoding.model import Decision, Model, ModelPool, Readout, ReadSpec, Request, StopCondition, StopRule
from decoding.parts import Part
from decoding.selectors.base import Gain, Selector
from decoding.sequence import Sequence
from decoding.state import Stateful
from decoding.switching.base import BackgroundReader
from decoding.tree import DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, as_verified, with_rejected
from turnout.types import Segment

# Tokens a draft model may lack before it reads along: few forwards, and a short catch-up at the next draft.
WARM_AFTER = 32
LEAST_S = 1e-6  # of a round: 0.0 would mean an unknown time
# Choice of a round: the arm that drafted and the depth it was allowed, 0 where there was no draft to verify; for a
# stretch of plain decoding, `STRETCH` and its tokens.
Choice = tuple[int, int]
STRETCH = -1


@dataclass
class Arm:
    """Arm: a drafter, its length policy, and its most nodes (None: the drafter's own, or equal to the depth)."""

    drafter: Drafter
    length: LengthPolicy
    nodes: int | None = None

    @cached_property
    def drafts(self) -> str:
        """Key of the drafter, its parameters and its nodes: equal for arms that draft alike."""
        return f"{named(self.drafter)} {self.nodes}"

    def nodes_of(self, depth: int) -> int:
        """Return the most nodes of a draft of `depth`: in proportion to the deepest one's."""
        most = self.length.params.most
        return -(-depth * (self.nodes or self.drafter.nodes or most) // most)

    @property
    def width(self) -> float:
        """Nodes of a level."""
        return self.nodes_of(self.length.params.most) / self.length.params.most

    @property
    def name(self) -> str:
        """Key of the arm, policy included: equal for arms that do the same."""
        return f"{self.drafts} {named(self.length)}"


@dataclass(slots=True)
class Draft:
    """Draft of a round.

    Attributes:
        tree: the draft; may be empty.
        asked: arms that were asked, in this order; the last one drafted it, unless it is empty.
        depth: the deepest it could have been.
        seconds: the time it took.
        plain: whether a stretch of plain decoding may follow: no arm was asked for a draft but `watchers`.
        watchers: arms that were asked for a draft, had none, and report when they have one.
        wanted: depth that the length policy allowed.
        declined: arms whose policies wanted no draft, and whose drafters have one for nothing.
    """

    tree: DraftTree
    asked: list[int]
    depth: int
    seconds: float
    plain: bool = False
    watchers: list[Arm] = field(default_factory=list)
    wanted: int = 0
    declined: list[Arm] = field(default_factory=list)

    @property
    def arm(self) -> int:
        """Arm that drafted it; the one asked first, if none did."""
        return self.asked[-1 if self.tree.fed_tokens else 0]


@runtime_checkable
class RunsHere(Protocol):
    """Model of this process: its decoding runs the caller's own rules, which keep what they observed.

    A model in another process runs copies of the rules, and the tensors they observe stay there.

    Attributes:
        runs_here: marks such a model.
    """

    runs_here: bool

    def reading_seconds(self) -> float:
        """Return the time that prefill has added so far to its steps through all layers, in seconds."""
        ...


class _Shown(Stateful):
    """Stop rule that ends nothing, and keeps the target's readouts for drafters.

    Args:
        want: what the drafters want read.
    """

    name = "shown"
    changing = ("rows",)

    def __init__(self, want: ReadSpec) -> None:
        self.want = want
        self.rows: list[Readout] = []

    def observe(self, token: int, row: Readout) -> Decision:
        """See `decoding.model.StopRule`."""
        self.rows.append(row)
        return Decision.GO_ON


class _Watch:
    """Stop rule that ends a stretch when a drafter has a proposal; it reads live state, so only for local models.

    Args:
        seq: what is decoded.
        drafters: those that have no proposal before it.
    """

    name = "found"
    want = NOTHING
    is_constant = True  # it has no state of its own

    def __init__(self, seq: Sequence, drafters: list[Drafter]) -> None:
        self._seq = seq
        self._drafters = drafters

    def observe(self, token: int, row: Readout) -> Decision:
        """See `decoding.model.StopRule`."""
        ready = [drafter.ready(self._seq, token) for drafter in self._drafters]  # each of them reads every token
        return Decision.STOP if any(ready) else Decision.GO_ON


class Speculation:
    """Speculative decoding of a sequence to its end; lossless if the verifier is.

    Every drafter learns from every round, also from others' drafts, so that none is stale when its turn comes; a draft
    model that has drafted before and is not asked for a while reads along in spare batch room. Where no draft is
    wanted, the target decodes some tokens at once, as it would alone, and drafters learn from all of them afterwards;
    likewise where a draft is wanted and no drafter has one, until one has. If the target is in another process, which
    cannot see the drafters' state and keeps what it reads for them, each of these tokens is a round of its own.

    Policies and selectors get the time of a round without the time in which the target read prompts meanwhile, so that
    another request's prompt does not make a draft look slow.

    Args:
        request: what to answer.
        models: `large` verifies; drafters run next to the model of `runs_on`.
        arms: drafters with their policies.
        selector: chooses the arm of a round.
        verifier: decides which draft tokens stay.
        repeated: choices of another run's rounds, to be made again; once they are used up, or where they do not fit,
            selector and policies choose.

    Attributes:
        choices: of the rounds so far.
    """

    def __init__(
        self,
        request: Request,
        models: ModelPool,
        arms: list[Arm],
        selector: Selector,
        verifier: Verifier,
        repeated: Iterable[Choice] = (),
    ) -> None:
        self.choices: list[Choice] = []
        self._repeated: Iterator[Choice] = iter(repeated)
        self._seq = request.sequence
        self._notes = request.notes
        self._sizes = models.sizes
        self._models = models
        self._target = models.large
        self._here = models.large if isinstance(models.large, RunsHere) else None
        # Whether a round without a draft has the token of plain decoding, and not only one of the same law.
        self._draws_alike = verifier.want.draw is not None or self._seq.sampling.greedy
        self._clock = models.clock
        self._arms = arms
        self._selector = selector
        self._verifier = verifier
        self._judge = f"{named(verifier)} {'greedy' if self._seq.sampling.greedy else 'drawn'}"
        self._stretches = stretch_lengths()
        self._reader = BackgroundReader()
        self._read_s = 0.0  # how long the target had read prompts when the round began
        self._read_to: int | None = None  # where the draft model was last asked to read; None: it never drafted
        selector.begin(self._seq, [arm.name for arm in arms], self._target.stores)

    @property
    def is_timed(self) -> bool:
        """True if its choices may depend on measured times, or on other answers."""
        return any(arm.length.abstains for arm in self._arms) or self._selector.learns

    async def run(self) -> AsyncGenerator[Segment, None]:
        """Yield segments, one per round."""
        seq = self._seq
        try:
            while not seq.finished:
                self._read_s = self._here.reading_seconds() if self._here else 0.0
                draft = await self._draft(seq)
                want = NOTHING
                for arm in self._arms:
                    want = want | arm.drafter.want
                if draft.plain and (want == NOTHING or self._here) and self._verifier.lossless:
                    yield await self._decode(seq, draft, want)
                else:
                    yield await self._verify(seq, draft, want)
                self._keep_warm(seq)
        finally:
            await self._reader.stop()
        self._notes += [arm.drafter.note for arm in self._arms if arm.drafter.note]

    async def _verify(self, seq: Sequence, draft: Draft, want: ReadSpec) -> Segment:
        """Verify the draft in one forward; return its accepted tokens, and one of the target's own."""
        started = self._clock()
        verdict = self._reported(draft.tree, await self._target.verify(seq, draft.tree, self._verifier, want))
        emitted = seq.extend(verdict.tokens, self._sizes)
        verify_s = self._clock() - started
        self.choices.append((draft.arm, draft.wanted if draft.tree.fed_tokens else 0))
        seq.meter.speculation.add_round(
            depths=draft.tree.depths(),
            num_accepted=min(verdict.num_accepted_tokens, len(emitted)),
            num_emitted=len(emitted),
            draft_s=draft.seconds,
            verify_s=verify_s,
        )
        self._teach(seq, draft.tree, verdict)
        seconds = self._undisturbed_s(draft, verify_s, 1)
        self._tell(draft, verdict, seconds)
        self._selector.observe(draft.arm, Gain(len(verdict.tokens), draft.depth + 1, seconds))
        return Segment(emitted, "finish" if seq.finished else "round")

    async def _decode(self, seq: Sequence, draft: Draft, want: ReadSpec) -> Segment:
        """Decode a stretch without drafts: one round for each token."""
        started = self._clock()
        shown, most = _Shown(want), draft.wanted or next(self._stretches)
        rules: list[StopRule] = [] if want == NOTHING else [shown]
        if draft.watchers and self._here:
            rules.append(_Watch(seq, [arm.drafter for arm in draft.watchers]))
            for arm in draft.watchers:
                arm.length.defer()
        elif draft.watchers:  # watchers of a remote target are asked again after every token, which takes time
            most = 1
        untried = [(arm.length, await self._untried(arm, seq)) for arm in draft.declined]
        segment = await self._target.decode(seq, StopCondition(tuple(rules), most))
        for length, tokens in untried:
            if tokens:
                length.observe_untried(*as_verified(tokens, segment.tokens, self._target.name))
        rounds, verify_s = len(segment.tokens), self._clock() - started
        self.choices.append((STRETCH, rounds))
        seq.meter.speculation.add_plain(rounds, draft.seconds, verify_s)
        tree, taught = draft.tree, VerifyResult((), segment.tokens)
        if shown.rows:  # what was read is what a round reads that accepts all but the last token
            tree = DraftTree.chain([token.id for token in segment.tokens[:-1]], self._target.name)
            taught = VerifyResult(tuple(range(len(tree))), segment.tokens, shown.rows)
        self._teach(seq, tree, taught)
        seconds = self._undisturbed_s(draft, verify_s, rounds)
        self._tell(draft, VerifyResult((), segment.tokens), seconds)
        self._selector.observe(draft.arm, Gain(1, 1, seconds / rounds))
        return Segment(segment.tokens, "finish" if seq.finished else "round")

    async def _untried(self, arm: Arm, seq: Sequence) -> tuple[int, ...]:
        """Return what a free drafter would propose, as far as a stretch of plain decoding could confirm it."""
        room = DraftBudget(LONGEST_STRETCH, LONGEST_STRETCH)
        return (await arm.drafter.propose(self._target, seq, room, arm.length)).tokens

    def _undisturbed_s(self, draft: Draft, verify_s: float, steps: int) -> float:
        """Return the time of a round, draft and verification, as if the target had read no prompts meanwhile.

        Prefill is counted when its step ends, and may have overlapped with a draft on another device: a floor of half
        the step times keeps an arm from looking more than about twice as fast because of it.
        """
        seconds = draft.seconds + verify_s
        if self._here is None:  # not known in time
            return seconds
        least_s = steps * self._target.step_seconds()
        if self._arms[draft.arm].drafter.runs_on == "small":
            least_s += draft.depth * self._models.small.step_seconds()
        reading_s = self._here.reading_seconds() - self._read_s
        return max(seconds - reading_s, min(seconds, 0.5 * least_s), LEAST_S)

    def _rounds(self, seq: Sequence) -> list[Round]:
        """Return the coming round as each arm's policy sees it; what they predict of the target they share."""
        predicted_s: dict[float, float] = {}
        rounds = []
        for arm in self._arms:
            share, model = arm.drafter.share, self._model_of(arm)
            free, width = share == 0.0, arm.width
            rounds.append(Round(seq, model, self._target, free, arm.drafts, share, self._judge, width, predicted_s))
        return rounds

    def _order(self, seq: Sequence, rounds: list[Round]) -> list[int]:
        """Return the arms in the order in which they are asked."""
        if self._selector.weighs and len(self._arms) > 1:
            promises = (arm.length.promise(round) for arm, round in zip(self._arms, rounds, strict=True))
            self._selector.weigh(list(promises))
        return self._selector.order(seq, len(self._arms))

    async def _draft(self, seq: Sequence) -> Draft:
        started = self._clock()
        rounds = self._rounds(seq)
        order = self._order(seq, rounds)
        repeated = next(self._repeated, None)
        stretch = repeated[1] if repeated is not None and repeated[0] == STRETCH else 0
        if repeated is not None and not stretch:
            order = [repeated[0]]
        plain, watchers, declined = repeated is None or stretch > 0, list[Arm](), list[Arm]()
        for place, index in enumerate(order):
            arm = self._arms[index]
            if arm.drafter.abstains:
                order = order[: place + 1]
                break
            model = self._model_of(arm)
            wanted = arm.length.before_round(rounds[index])
            if repeated is not None:
                wanted = 0 if stretch else repeated[1]
            if wanted > 0 and arm.drafter.watches and self._draws_alike:
                watchers.append(arm)
            elif self._here and self._draws_alike and arm.drafter.watches and repeated is None:
                declined.append(arm)
            plain = plain and (wanted <= 0 or arm in watchers)
            # One place is the target's own token's.
            depth = min(wanted, seq.num_remaining - 1)
            if depth > 0:
                if arm.drafter.runs_on == "small":
                    await self._reader.stop()
                    self._read_to = len(seq)
                # All nodes lie in the cache at once, which may hold no more than one sequence of the longest kind.
                spare = self._target.max_length - len(seq)
                if not self._models.vocabularies.differs(model.name):
                    spare = min(spare, model.max_length - len(seq))
                nodes = min(arm.nodes_of(wanted), spare)
                room = DraftBudget(depth, nodes, max(self._target.busy().sequences, 1))
                tree = await model.propose(seq, arm.drafter, room, arm.length)
                tree = tree.within(self._target.vocab_size)
                if len(tree.fed_tokens) > spare:
                    tree = replace(tree, extra=None)
                if len(tree) or tree.extra is not None:
                    return Draft(tree, order[: place + 1], depth, self._clock() - started, wanted=wanted)
                rounds = self._rounds(seq)  # others may work on the models by now
        nothing = DraftTree.empty(self._target.name)
        return Draft(nothing, order, 0, self._clock() - started, plain, watchers, stretch, declined)

    def _reported(self, tree: DraftTree, verdict: VerifyResult) -> VerifyResult:
        """Return the verdict with only the alternatives that the request asked for; others were read for drafters."""
        asked = self._seq.sampling
        tokens = with_rejected(tree, verdict) if asked.token_details else verdict.tokens
        most = asked.logprobs or 0
        return replace(verdict, tokens=tuple(token._replace(top=token.top[:most]) for token in tokens))

    def _teach(self, seq: Sequence, tree: DraftTree, verdict: VerifyResult) -> None:
        """Let every drafter learn from the target's readouts."""
        for arm in self._arms:
            self._model_of(arm).observe(seq, arm.drafter, tree, verdict)

    def _tell(self, draft: Draft, verdict: VerifyResult, seconds: float) -> None:
        """Let the length policies that were asked observe the outcome of the round."""
        nothing = DraftTree.empty(self._target.name)
        for index in draft.asked:
            if not self._arms[index].drafter.abstains:
                mine = index == draft.arm or not draft.tree.fed_tokens
                tree = draft.tree if mine else nothing
                self._arms[index].length.observe(tree, verdict, seconds if mine else 0.0)

    def _keep_warm(self, seq: Sequence) -> None:
        """Let a draft model that has drafted before read ahead, if it lacks much of the sequence."""
        if self._read_to is not None and not seq.finished and len(seq) - self._read_to >= WARM_AFTER:
            if self._models.vocabularies.differs(self._models.small.name):
                return
            self._reader.start(self._models.small, seq)
            self._read_to = len(seq)

    def _model_of(self, arm: Arm) -> Model:
        return self._models.by_role("small" if arm.drafter.runs_on == "small" else "large")


def named(part: Part) -> str:
    """Return a part's name with all its parameters."""
    return f"{part.name}{part.params.model_dump_json()}"
