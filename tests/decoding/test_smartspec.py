"""Goodput: the depth of the most expected tokens per second, under the load of the moment."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.fakes import TableModel, markov
from decoding.lengths.base import Round
from decoding.lengths.smartspec import Acceptance, SmartSpecLength, SmartSpecParams
from decoding.model import Busy
from decoding.sequence import Sequence
from decoding.tree import DraftTree, ExtraRows
from decoding.verifiers.base import VerifyResult
from tests.properties import cases
from turnout.types import SamplingParams, Token, TokenKind


class TimedModel(TableModel):
    """A model under a load of our choosing, with forwards of known length."""

    def __init__(self, name: str, fixed_s: float, per_token_s: float, per_attended_s: float = 0.0) -> None:
        super().__init__(name, lambda _: torch.zeros(4), 4)
        self.times = (fixed_s, per_token_s, per_attended_s)
        self.load = Busy(1, 10)

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        fixed, per_token, per_attended = self.times
        return fixed + per_token * fed + per_attended * attended

    def busy(self) -> Busy:
        return self.load


class Scene:
    """The card's two models."""

    def __init__(self) -> None:
        self.draft = TimedModel("small", 1.0, 0.01)
        self.target = TimedModel("large", 10.0, 0.1)

    def depth(
        self, policy: SmartSpecLength, sequences: int, free=False, drafter="model_chain", tenant="t", judge=""
    ) -> int:
        self.draft.load = self.target.load = Busy(sequences, sequences * 10)
        # So long that it is no matter what the first draft has to read.
        seq = Sequence([0] * 10, SamplingParams(max_tokens=100_000), 0, tenant=tenant)
        return policy.before_round(Round(seq, self.draft, self.target, free, drafter, judge=judge))


def smart(acceptance: float = 0.7, most: int = 16, **params) -> SmartSpecLength:
    """Goodput alone: drafts may lose any time."""
    rule = {"allowance": 1.0, "margin": 0.0}
    return SmartSpecLength(SmartSpecParams(acceptance=acceptance, most=most, **{**rule, **params}))


def judged(num_accepted: int, num_rejected: int = 0) -> tuple[DraftTree, VerifyResult]:
    kind = TokenKind.RECOVERED if num_rejected else TokenKind.BONUS
    tokens = [Token(0, "small", TokenKind.ACCEPTED)] * num_accepted + [Token(0, "large", kind)]
    nodes = num_accepted + num_rejected
    return DraftTree.chain([0] * nodes, "small"), VerifyResult(tuple(range(num_accepted)), tuple(tokens))


UNDRAFTED = DraftTree.empty("large"), judged(0)[1]


@pytest.mark.parametrize(
    ("acceptance", "sequences", "depth"),
    [(0.7, 1, 4), (0.7, 32, 2), (0.7, 128, 1), (0.7, 512, 0), (0.3, 1, 1), (0.3, 16, 1), (0.3, 32, 0), (0.3, 64, 0)],
)
def test_the_worked_examples(acceptance, sequences, depth):
    assert Scene().depth(smart(acceptance), sequences) == depth


@cases(200)
@given(
    rate=st.floats(0.01, 1.0),
    sequences=st.integers(1, 600),
    width=st.floats(1.0, 20.0),
    found=st.floats(0.0, 1.0),
    overhead_s=st.floats(0.0, 30.0),
    most=st.integers(1, 40),
    free=st.booleans(),
)
def test_no_depth_beyond_the_last_one_looked_at_is_better(rate, sequences, width, found, overhead_s, most, free):
    scene, policy = Scene(), smart(rate, most=most)
    scene.draft.load = scene.target.load = Busy(sequences, sequences * 10)
    known = Acceptance(rate, width=width, found=found)
    known.drafting.seconds = overhead_s
    round = Round(Sequence([0] * 10, SamplingParams(), 0), scene.draft, scene.target, free, "x")

    def goodput(depth: int) -> float:
        times = round.target_s(1.0 + depth * width), round.target_s(1.0)
        tokens = sum(rate**level for level in range(depth + 1))
        mean_s = depth * round.draft_s(width) * found + found * times[0] + (1.0 - found) * times[1] + overhead_s
        return (found * tokens + 1.0 - found) / (mean_s if depth else round.target_s(1.0))

    found = max(found, 0.01)
    depth, most_goodput = policy._best(round, known, found)
    assert depth <= most
    assert goodput(depth) == pytest.approx(max(map(goodput, range(most + 1))))
    if depth:
        assert most_goodput == pytest.approx(goodput(depth) / goodput(0))


def test_what_promises_hardly_more_than_plain_decoding_is_left_out():
    """At 32 sequences one drafted token promises 1.7 / 17.72 over 1 / 13.2, 1.27 times as much; two promise 1.30."""
    assert [Scene().depth(smart(margin=margin), 32) for margin in (0.0, 0.25, 0.29, 0.31)] == [2, 2, 2, 0]


def test_depth_falls_with_load_and_rises_with_acceptance():
    rates = [0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0]
    loads = [1, 4, 16, 64, 256, 1024]
    depths = [[Scene().depth(smart(rate), load) for load in loads] for rate in rates]
    assert all(row == sorted(row, reverse=True) for row in depths)
    assert all(list(column) == sorted(column) for column in zip(*depths, strict=True))
    assert depths[-1][0] == 16
    assert depths[0][-1] == 0


def test_a_free_drafter_pays_for_verification_only():
    scene = Scene()
    assert scene.depth(smart(), 1, free=True) > scene.depth(smart(), 1, free=False) > 0
    # Nothing but the target's time per token stands against more: 1 + a + .. over 10 + 0.1 (k + 1).
    goodput = [sum(0.7**i for i in range(k + 1)) / (10 + 0.1 * (k + 1)) for k in range(17)]
    assert scene.depth(smart(), 1, free=True) == max(range(17), key=goodput.__getitem__)


def test_long_contexts_make_verification_dearer():
    short, long = Scene(), Scene()
    for scene, attended in ((short, 1e-6), (long, 1e-2)):
        scene.target.times = (10.0, 0.1, attended)
    assert long.depth(smart(), 32) < short.depth(smart(), 32)


def test_the_average_of_a_round():
    scene, policy = Scene(), smart(update=0.15)
    scene.depth(policy, 1)
    policy.observe(*judged(1), 0.1)
    rate = scene.target.stores.open("smartspec/model_chain//small/0.7", "t", lambda: None).rate
    assert rate == pytest.approx(0.85 * 0.7 + 0.15 * 1.0)


def test_the_acceptance_estimate_is_not_biased_by_draft_length():
    """Tokens accepted with 0.7 each, drafts of five: the mean of the rounds' own ratios would tend to 0.5."""
    known, chance = Acceptance(0.5), torch.Generator().manual_seed(0)
    rates = []
    for _ in range(6_000):
        draws = (torch.rand(5, generator=chance) < 0.7).tolist()
        accepted = draws.index(False) if False in draws else 5
        tree = DraftTree.chain([0] * 5, "small")
        known.observe(tree, judged(accepted, accepted < 5)[1], 0.02)
        rates.append(known.rate)
    assert sum(rates[1000:]) / len(rates[1000:]) == pytest.approx(0.7, abs=0.02)


def test_a_trees_width_counts_at_the_target():
    scene, policy = Scene(), smart(update=0.9)
    narrow = scene.depth(policy, 32)
    bush = DraftTree(tuple(range(8)), (-1,) * 8, "small")
    verdict = VerifyResult((0,), (Token(0, "small", TokenKind.ACCEPTED), Token(0, "large", TokenKind.BONUS)))
    for _ in range(3):
        policy.observe(bush, verdict, 0.1)
    # Everything is accepted now, but eight nodes a level are fed for it.
    assert scene.depth(policy, 32) < narrow


def test_a_trees_width_counts_at_the_draft_model():
    def depth_of(per_token_s: float, nodes: int) -> int:
        scene, policy = Scene(), smart(0.8)
        scene.draft.times = (1.0, per_token_s, 0.0)
        scene.target.times = (10.0, 0.0, 0.0)
        scene.depth(policy, 1)
        policy._known.width = nodes
        return scene.depth(policy, 1)

    # A level of eight nodes takes 5 s instead of 1.5, and what the target reads costs nothing.
    assert depth_of(0.0, 8) == depth_of(0.0, 1)
    assert depth_of(0.5, 8) < depth_of(0.5, 1)
    tokens = [sum(0.8**i for i in range(k + 1)) for k in range(17)]
    assert depth_of(0.5, 8) == max(range(17), key=lambda k: tokens[k] / (10.0 + 5.0 * k))


def test_the_first_draft_shows_its_shape():
    """Nothing was believed of it before: eight nodes a level and ninety rows are known at once."""
    scene, policy = Scene(), smart()
    scene.depth(policy, 8)
    tree, verdict = windowed(1, 8, 90)
    policy.observe(replace(tree, parents=(-1,) * 8), verdict, 0.1)
    assert (policy._known.width, policy._known.extra) == (8.0, 90.0)


def windowed(num_accepted: int, nodes: int, rows: int) -> tuple[DraftTree, VerifyResult]:
    """A draft with rows besides, as Lookahead's."""
    tree, verdict = judged(num_accepted, nodes - num_accepted)
    extra = ExtraRows(tokens=(0,) * rows, depths=(0,) * rows, mask=torch.ones(rows, nodes + rows, dtype=torch.bool))
    return replace(tree, extra=extra), verdict


@pytest.mark.parametrize(("found", "drafts"), [(1.0, True), (0.05, False)])
def test_rows_besides_are_paid_in_every_round_that_looks_for_a_draft(found: float, drafts: bool):
    """Twenty rows make a step half as long again: more than they are worth where one round of twenty has a draft."""
    scene, policy = Scene(), smart(0.9, probe=0)
    scene.target.times = (10.0, 0.25, 0.0)
    for number in range(400):
        if scene.depth(policy, 1, free=True) == 0:
            break
        hit = (number + 1) * found % 1.0 < found
        policy.observe(*windowed(4 if hit else 0, 5 if hit else 0, 20), 0.1)
    assert (scene.depth(policy, 1, free=True) > 0) is drafts


def test_a_batch_that_finds_nothing_at_first_counts_as_what_it_is():
    """Thirty-two sequences of one step: each is one of as many, not one of the last few."""
    scene, policy = Scene(), smart(0.9, probe=0)
    scene.target.times = (10.0, 0.01, 0.0)
    found = []
    for number in range(32):
        scene.depth(policy, 32, free=True)
        policy.observe(*windowed(4 if number % 2 else 0, 5 if number % 2 else 0, 3), 0.1)
        found.append(policy._known.found)
    assert found[-1] == pytest.approx(0.5, abs=0.1)
    assert policy._known.extra == pytest.approx(3.0, rel=0.1)


def test_before_the_last_token_nobody_looks_for_a_draft():
    scene, policy = Scene(), smart(0.9)
    seq = Sequence([0] * 10, SamplingParams(max_tokens=1), 0)
    assert policy.before_round(Round(seq, scene.draft, scene.target, True, "lookahead")) > 0
    policy.observe(*UNDRAFTED, 0.1)
    assert policy._known.found == 1.0


def test_a_draft_that_costs_nothing_besides_is_tried_however_rarely_it_is_found():
    scene, policy = Scene(), smart(0.9, probe=0)
    for _ in range(400):
        assert scene.depth(policy, 1, free=True) > 0
        policy.observe(*UNDRAFTED, 0.1)


def test_what_one_verifier_accepts_says_nothing_of_another():
    scene = Scene()
    policy = smart()
    scene.depth(policy, 1, judge="match greedy")
    for _ in range(40):
        policy.observe(*judged(0, 1), 0.1)
    assert scene.depth(smart(), 1, judge="match greedy") == 0
    assert scene.depth(smart(), 1, judge="typical drawn") == 4


def test_what_was_learned_outlives_the_request_by_drafter_and_tenant():
    scene, policy = Scene(), smart()
    scene.depth(policy, 1)
    for _ in range(40):
        policy.observe(*judged(0, 1), 0.1)
    assert scene.depth(smart(), 1) == 0
    assert scene.depth(smart(), 1, drafter="lookahead") == 4
    assert scene.depth(smart(), 1, tenant="other") == 4


def test_no_drafting_is_left_again_when_the_load_falls_and_forgets_nothing():
    scene, policy = Scene(), smart(probe=0)
    assert scene.depth(policy, 512) == 0
    for _ in range(500):
        policy.observe(DraftTree.empty("large"), judged(0)[1], 0.1)
        assert scene.depth(policy, 512) == 0
    assert scene.depth(policy, 1) == 4


def test_a_drafter_that_failed_is_tried_again():
    scene, policy = Scene(), smart(probe=10)
    scene.depth(policy, 1)
    for _ in range(40):
        policy.observe(*judged(0, 1), 0.1)
    depths = []
    for _ in range(200):
        depth = scene.depth(policy, 1)
        depths.append(depth)
        policy.observe(*(judged(depth) if depth else (DraftTree.empty("large"), judged(0)[1])), 0.1)
    assert depths[:11] == [0] * 10 + [1]
    assert depths[-1] > 4


def test_a_drafter_that_finds_nothing_is_not_held_to_one_token():
    scene, policy = Scene(), smart(probe=10)
    for _ in range(50):
        assert scene.depth(policy, 1, free=True) > 4
        policy.observe(DraftTree.empty("large"), judged(0)[1], 0.1)


def test_where_no_time_is_known_drafts_are_as_deep_as_allowed():
    model, seq = TableModel("m", lambda _: torch.zeros(4), 4), Sequence([0], SamplingParams(), 0)
    assert smart(most=7).before_round(Round(seq, model, model, False, "model_chain")) == 7


async def test_under_load_a_request_is_decoded_plainly(run):
    draft, target = TimedModel("small", 1.0, 0.01), TimedModel("large", 10.0, 0.1)
    chain = torch.full((4, 4), 0.1)
    chain[:, 1] = 0.7
    draft.next_logits = target.next_logits = markov(chain)
    params = {"length": {"name": "smartspec", "probe": 0, "allowance": 1.0}}
    plain = await run("plain", draft, target, prompt=(0,), max_tokens=30)
    for sequences, drafted in ((512, False), (1, True)):
        draft.load = target.load = Busy(sequences, sequences * 10)
        done = await run("speculative", draft, target, params, prompt=(0,), max_tokens=30)
        assert done.ids == plain.ids
        assert (done.seq.meter.speculation.draft_tokens > 0) is drafted


def test_one_request_of_a_batch_probes_and_under_load_steps_of_the_batch_count():
    scene = Scene()

    def undrafted(policies: list[SmartSpecLength], rounds: int) -> int:
        """Drafts among 64 requests that would draft nothing but for probes; none is accepted."""
        drafted = 0
        for _ in range(rounds):
            depths = [scene.depth(policy, 64) for policy in policies]
            drafted += sum(depths)
            for policy, depth in zip(policies, depths, strict=True):
                policy.observe(*(judged(0, 1) if depth else (DraftTree.empty("large"), judged(0)[1])), 0.1)
        return drafted

    policies = [smart(acceptance=0.01, probe=10) for _ in range(64)]
    # Not judged yet: every token counts, and after a step of 64 tokens there are six probes, not 64. Later there is one
    # about every ten steps of the batch.
    assert undrafted(policies, 2) == 6
    assert 4 <= undrafted(policies, 1) <= 6
    assert 4 <= undrafted(policies, 50) <= 6


def served(loads: list[int], fixed: int | None = None, acceptance: float = 0.7) -> float:
    """Tokens a second of steps under these loads, in the card's time; every sequence has a policy of its own.

    Args:
        loads: sequences of each step.
        fixed: how far all draft; None: as their policies say, from a first guess of acceptance that is wrong.
        acceptance: of a drafted token.
    """
    scene, chance = Scene(), random.Random(0)
    policies = [smart(acceptance=0.4, most=8) for _ in range(max(loads))]
    emitted, seconds = 0, 0.0
    for sequences in loads:
        batch = policies[:sequences]
        depths = [scene.depth(policy, sequences) if fixed is None else fixed for policy in batch]
        for level in range(max(depths)):
            drafting = sum(depth > level for depth in depths)
            seconds += scene.draft.forward_seconds(drafting, 0, drafting)
        seconds += scene.target.forward_seconds(sequences + sum(depths), 0, sequences)
        for policy, depth in zip(batch, depths, strict=True):
            accepted = 0
            while accepted < depth and chance.random() < acceptance:
                accepted += 1
            emitted += accepted + 1
            if fixed is None:
                policy.observe(*(judged(accepted, int(accepted < depth)) if depth else UNDRAFTED), 0.1)
    return emitted / seconds


@cache
def served_at(sequences: int, steps: int, depth: int) -> float:
    """Tokens a second under one load where all draft one length."""
    return served([sequences] * steps, depth)


@pytest.mark.parametrize(
    ("sequences", "steps", "idle", "plain", "best"),
    # Against the best depth of an idle server, against plain decoding, and against the best depth of this load.
    [(1, 2_000, 0.98, 1.8, 0.98), (32, 200, 1.05, 1.2, 0.98), (96, 300, 1.2, 1.05, 0.98), (512, 20, 1.5, 0.99, 0.99)],
)
def test_goodput_is_that_of_the_best_fixed_depth_at_every_load(sequences, steps, idle, plain, best):
    """So that it is above both plain decoding and what is best for one request, where neither is right."""
    fixed, alone = ([served_at(*load, depth) for depth in range(6)] for load in ((sequences, steps), (1, 2_000)))
    ours = served([sequences] * steps)
    assert ours > idle * fixed[alone.index(max(alone))]
    assert ours > plain * fixed[0]
    assert ours > best * max(fixed)


def test_one_sequence_of_a_batch_moves_the_averages_little():
    """But what is first seen moves them as much as that of a sequence alone."""
    scene, policy = Scene(), smart(acceptance=0.7, update=0.15)
    moved = []
    for _ in range(300):
        assert scene.depth(policy, 32) > 0
        known = scene.target.stores.open("smartspec/model_chain//small/0.7", "t", lambda: None)
        before = known.accepted
        policy.observe(*judged(5, 1), 0.1)
        moved.append((known.accepted - before) / (5 - before))
    assert moved[:3] == pytest.approx([0.15] * 3)
    # Together the drafts of a step move them as one draft alone does.
    assert 1 - (1 - moved[-1]) ** 32 == pytest.approx(0.15)
