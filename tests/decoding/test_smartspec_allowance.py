"""What drafts may lose: a bound on the time of a whole tenant, whatever is believed of its drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from decoding.lengths.base import Round
from decoding.lengths.smartspec import GRANT, SmartSpecLength, SmartSpecParams
from decoding.model import Busy
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from tests.decoding.test_smartspec import UNDRAFTED, Scene, judged
from turnout.types import SamplingParams, Token

ANSWER = 64  # tokens
ALLOWANCE = SmartSpecParams().allowance


@dataclass
class Tenant:
    """Answers of one tenant that decode in step, so many at once, on the card's two models.

    Attributes:
        accepts: whether all drafted tokens are accepted, or none.
        draft_s: of a round with a draft, beyond what is predicted.
        free: whether the drafter needs no forwards.
        prompt: tokens of each.
        tokens_each: of an answer.
        factor: of what forwards take, of what is predicted.
        took_s: all steps but those that read prompts.
        drafted: of all rounds.
    """

    sequences: int = 1
    accepts: bool = False
    draft_s: float = 0.0
    free: bool = False
    prompt: int = 10
    tokens_each: int = ANSWER
    factor: float = 1.0
    params: SmartSpecParams = field(default_factory=lambda: SmartSpecParams(most=8, probe=16))
    scene: Scene = field(default_factory=Scene)
    took_s: float = 0.0
    tokens: int = 0
    drafted: list[bool] = field(default_factory=list)

    @property
    def plain_s(self) -> float:
        """Of a step without drafts."""
        return self.scene.target.forward_seconds(self.sequences, 0, self.sequences)

    def answer(self) -> None:
        """One answer of each, from beginning to end."""
        policies = [SmartSpecLength(self.params) for _ in range(self.sequences)]
        seqs = [
            Sequence([0] * self.prompt, SamplingParams(max_tokens=self.tokens_each), 0, tenant="t") for _ in policies
        ]
        entered = [False] * self.sequences
        for step in range(10 * self.tokens_each):
            if seqs[0].finished:
                return
            seconds = self._step(policies, seqs, entered, reads=step == 0)
            self.took_s += seconds * (step > 0)
        raise AssertionError("an answer came to no end")

    def _step(self, policies: list[SmartSpecLength], seqs: list[Sequence], entered: list[bool], reads: bool) -> float:
        draft, target = self.scene.draft, self.scene.target
        draft.load = target.load = Busy(self.sequences, self.sequences * self.prompt)
        depths = []
        for policy, seq in zip(policies, seqs, strict=True):
            wanted = policy.before_round(Round(seq, draft, target, self.free, "d"))
            depths.append(min(wanted, seq.num_remaining - 1))
        seconds = target.forward_seconds(sum(depths) + self.sequences, 0, self.sequences) + 1e3 * reads
        if any(depths):
            seconds += self.draft_s
        if not self.free:
            for level in range(max(depths)):
                seconds += draft.forward_seconds(sum(depth > level for depth in depths), 0, 1)
            begin = [place for place, depth in enumerate(depths) if depth and not entered[place]]
            seconds += sum(draft.forward_seconds(self.prompt, 0, 1) for _ in begin)
            for place in begin:
                entered[place] = True
        seconds *= self.factor
        for policy, seq, depth in zip(policies, seqs, depths, strict=True):
            tree, verdict = (judged(depth) if self.accepts else judged(0, 1)) if depth else UNDRAFTED
            if depth and not self.accepts:
                tree, verdict = DraftTree.chain([0] * depth, "small"), VerifyResult((), verdict.tokens)
            seq.extend([Token(0, "large")] * len(verdict.tokens), {"large": 1, "small": 1})
            policy.observe(tree, verdict, seconds)
            self.tokens += len(verdict.tokens) * (not reads)
            self.drafted.append(depth > 0)
        return seconds

    @property
    def lost_steps(self) -> float:
        """Plain steps that the answers took longer than plain decoding."""
        return self.took_s / self.plain_s - self.tokens / self.sequences

    def answers(self, number: int) -> Tenant:
        """So many, one after the other."""
        for _ in range(number):
            self.answer()
        return self


@pytest.mark.parametrize("sequences", [1, 32])
@pytest.mark.parametrize("draft_s", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("free", [True, False])
def test_a_drafter_that_is_always_wrong_loses_little(sequences: int, draft_s: float, free: bool) -> None:
    """Also one whose rounds take much longer than anybody predicts."""
    tenant = Tenant(sequences, draft_s=draft_s, free=free).answers(20)
    assert any(tenant.drafted)
    surprise = 2 * draft_s / tenant.plain_s  # of the round that is under way when it shows
    assert 0.0 < tenant.lost_steps < 2 * GRANT + surprise + 1.5 * ALLOWANCE * 20 * ANSWER


@pytest.mark.parametrize("sequences", [1, 8])
def test_the_bound_holds_where_nothing_else_does(sequences: int) -> None:
    """One that is to try again after every step."""
    bounded, unbounded = (
        Tenant(sequences, draft_s=5.0, params=SmartSpecParams(most=8, probe=1, allowance=allowance)).answers(20)
        for allowance in (ALLOWANCE, 1.0)
    )
    assert unbounded.lost_steps > 0.2 * 20 * ANSWER
    assert bounded.lost_steps < 2 * GRANT + 1.5 * ALLOWANCE * 20 * ANSWER


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("free", [True, False])
def test_a_drafter_that_is_right_is_used_nearly_always(sequences: int, free: bool) -> None:
    tenant = Tenant(sequences, accepts=True, free=free).answers(20)
    late = tenant.drafted[len(tenant.drafted) // 2 :]
    assert sum(late) / len(late) > 0.8
    unbounded = SmartSpecParams(most=8, probe=16, allowance=1.0)
    assert tenant.lost_steps < 0.8 * Tenant(sequences, accepts=True, free=free, params=unbounded).answers(20).lost_steps


def test_who_becomes_wrong_is_stopped_and_who_becomes_right_is_found() -> None:
    tenant = Tenant(8, accepts=True).answers(5)
    tenant.accepts, before_s, tokens = False, tenant.took_s, tenant.tokens
    tenant.answers(20)
    lost = (tenant.took_s - before_s) / tenant.plain_s - (tenant.tokens - tokens) / 8
    assert lost < 32 + 2 * GRANT + 1.5 * ALLOWANCE * 20 * ANSWER  # what it had saved up, at most, and the bound
    tenant.accepts, first = True, len(tenant.drafted)
    tenant.answers(40)
    late = tenant.drafted[(first + len(tenant.drafted)) // 2 :]
    assert sum(late) / len(late) > 0.8


def test_what_was_saved_up_pays_for_probes() -> None:
    """A text that is hard for a while is no reason to give up for long: the bound above holds all the same."""
    tries = []
    for right in (False, True):
        tenant = Tenant(accepts=right, params=SmartSpecParams(most=8)).answers(5)
        tenant.accepts = False
        tenant.answers(2)  # until nobody believes in it any more
        tenant.drafted.clear()
        tries.append(sum(tenant.answers(5).drafted))
    assert tries[1] > 2 * tries[0] > 0


def test_one_slow_moment_does_not_end_drafting_for_good() -> None:
    tenant = Tenant(accepts=True).answers(5)
    known = tenant.scene.target.stores.open("smartspec/d//small/0.7", "t", lambda: pytest.fail("nothing kept"))
    known.drafting.seconds = 40 * tenant.plain_s  # more than can be saved up
    tenant.answers(80)
    late = tenant.drafted[-100:]
    assert sum(late) / len(late) > 0.8


@pytest.mark.parametrize("prompt", [1000, 3000])
def test_long_prompts_that_must_be_read_can_be_saved_up_for(prompt: int) -> None:
    """The draft model reads 3,000 tokens in 31 s, and eight of them take as long as eight steps of the target each."""
    tenant = Tenant(8, accepts=True, prompt=prompt, tokens_each=300).answers(30)
    late = tenant.drafted[-(len(tenant.drafted) // 4) :]
    assert sum(late) / len(late) > 0.6


@pytest.mark.parametrize(("busy_s", "quiet_s"), [(0.5, 1.0), (3.0, 1.0)])
def test_what_plain_steps_took_under_load_is_no_licence_later(busy_s: float, quiet_s: float) -> None:
    """Forwards that are half, or three times, as long as predicted, and then as predicted."""
    tenant = Tenant(8, factor=busy_s).answers(5)
    tenant.factor, tenant.took_s, tenant.tokens = quiet_s, 0.0, 0
    tenant.answers(20)
    assert tenant.lost_steps < 4 * GRANT + 1.5 * ALLOWANCE * 20 * ANSWER


def test_in_a_crowd_nobody_drafts_before_the_first_token() -> None:
    """Whoever asks first seems to be alone, and would draft as deep as one alone may."""
    for sequences, drafts in ((1, True), (8, False)):
        tenant = Tenant(sequences, accepts=True).answers(3)
        tenant.drafted.clear()
        tenant.answer()
        assert tenant.drafted[0] == drafts
        assert any(tenant.drafted)


def test_a_first_draft_must_pay_within_the_tokens_that_are_left() -> None:
    """The drafter reads 10,000 tokens for it, which takes as long as ten steps of the target."""
    scene = Scene()
    for remaining, drafts in ((8, False), (200, True)):
        seq = Sequence([0] * 10_000, SamplingParams(max_tokens=remaining), 0, tenant="t")
        policy = SmartSpecLength(SmartSpecParams(allowance=1.0))
        assert (policy.before_round(Round(seq, scene.draft, scene.target, False, "d")) > 0) == drafts
        assert policy.before_round(Round(seq, scene.draft, scene.target, True, "f")) > 0  # a free one reads nothing
