"""Length policies that are not trained: where each stops, and that none changes what is emitted."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.drafters.base import DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.fakes import TableModel, markov
from decoding.lengths.base import LengthPolicy, Round, Step
from decoding.lengths.confidence import ConfidenceLength, ConfidenceParams
from decoding.lengths.svip import SvipLength, SvipParams
from decoding.lengths.thompson import ThompsonLength, ThompsonParams
from decoding.logits import entropy_bits
from decoding.model import Readout
from decoding.noise import Purpose, noise_key, uniform
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.many_runs import many_runs
from turnout.types import SamplingParams, Token, TokenKind

POLICIES = [
    {"name": "svip"},
    {"name": "svip", "threshold": 0.0},
    {"name": "confidence", "threshold": 0.5},
    {"name": "thompson"},
    {"name": "thompson", "control": "calibrated", "half": 2.0},
    {"name": "smartspec", "most": 5},
]


def a_round(tokens=(1, 2), seed=0, eos=()) -> Round:
    seq = Sequence(tokens, SamplingParams(), seed, eos)
    model = TableModel("m", lambda _: torch.zeros(4), 4)
    return Round(seq, model, model, free=False, drafter="model_chain")


def length_of(policy: LengthPolicy, rows: list[Readout], tokens: list[int] | None = None) -> int:
    """How many of the given readings become a draft."""
    tokens = tokens or [0] * len(rows)
    path: list[Step] = []
    for token, row in zip(tokens, rows, strict=True):
        if len(path) == policy.params.most:
            break
        path.append(Step(token, row))
        if not policy.continues(path):
            break
    return len(path)


def nats(*entropies: float) -> list[Readout]:
    return [Readout(entropy_bits=entropy / math.log(2)) for entropy in entropies]


def sharpest(*probabilities: float) -> list[Readout]:
    return [Readout(top=((0, math.log(probability)),)) for probability in probabilities]


def outcome(num_accepted: int, kind: TokenKind) -> tuple[DraftTree, VerifyResult]:
    tokens = [Token(0, "small", TokenKind.ACCEPTED)] * num_accepted + [Token(0, "large", kind)]
    return DraftTree.chain([0] * max(num_accepted, 1), "small"), VerifyResult(tuple(range(num_accepted)), tuple(tokens))


def test_svip_stops_above_0_6_nats_and_keeps_the_unsure_token():
    policy = SvipLength()
    policy.before_round(a_round())
    assert length_of(policy, nats(0.2, 0.5, 0.7, 0.1)) == 3
    assert length_of(policy, nats(0.59, 0.599, 0.601, 0.1)) == 3
    assert length_of(policy, nats(0.61, 0.1)) == 1


def test_svip_at_its_limits():
    strict, lax = SvipLength(SvipParams(threshold=0.0)), SvipLength(SvipParams(threshold=1000.0, most=7))
    for policy in (strict, lax):
        policy.before_round(a_round())
    assert length_of(strict, nats(1e-6, 0.0)) == 1
    assert length_of(strict, nats(0.0, 0.0, 0.0, 1e-6, 0.0)) == 4
    assert length_of(lax, nats(*[9.0] * 20)) == 7


def test_svip_drafts_nothing_below_an_end():
    policy = SvipLength()
    policy.before_round(a_round(eos=(3,)))
    assert length_of(policy, nats(0.1, 0.1, 0.1, 0.1), tokens=[0, 1, 3, 0]) == 3


def test_svip_reads_the_entropy_of_the_raw_distribution():
    """Sharpened by temperature, the sampling distribution is nearly one-hot; the entropy is still the model's own."""
    logits = torch.tensor([1.0, 0.0, 0.0])
    raw = float(torch.special.entr(logits.softmax(-1)).sum())
    for threshold, length in ((math.sqrt(0.15 * raw) - 1e-3, 1), (math.sqrt(0.15 * raw) + 1e-3, 6)):
        policy = SvipLength(SvipParams(threshold=threshold))
        assert len(draft_of(policy, logits, temperature=0.05)) == length


def draft_of(policy: LengthPolicy, logits: torch.Tensor, **sampling: float) -> DraftTree:
    """A chain of at most six from a model that always says the same; run to its end by hand."""
    model = TableModel("m", lambda _: logits, len(logits))
    seq = Sequence([0], SamplingParams(**sampling), 0)
    depth = min(policy.before_round(Round(seq, model, model, False, "model_chain")), 6)
    drafting = ModelChainDrafter().propose(model, seq, DraftBudget(depth, depth), policy)
    return run_now(drafting)


def run_now(coroutine):
    while True:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value


def test_confidence_keeps_the_unsure_token():
    policy = ConfidenceLength()
    assert length_of(policy, sharpest(0.9, 0.7 + 1e-9, 0.69, 0.99)) == 3
    assert length_of(ConfidenceLength(ConfidenceParams(threshold=0.0, most=5)), sharpest(*[1e-6] * 9)) == 5
    assert length_of(ConfidenceLength(ConfidenceParams(threshold=1.01)), sharpest(1.0, 1.0)) == 1


def test_a_policy_without_its_reading_says_so():
    for policy in (SvipLength(), ConfidenceLength(), ThompsonLength(ThompsonParams(control="calibrated"))):
        policy.before_round(a_round())
        with pytest.raises(ValueError, match="must read"):
            policy.continues([Step(0, Readout())])


def test_the_beta_posterior_counts_accepted_and_rejected_tokens():
    policy = ThompsonLength(ThompsonParams(abstains=False))
    assert policy.mean == 1 / 2
    policy.observe(*outcome(5, TokenKind.RECOVERED), 0.1)
    policy.observe(*outcome(3, TokenKind.RECOVERED), 0.1)
    assert policy.mean == 9 / 12
    policy.observe(*outcome(4, TokenKind.BONUS), 0.1)
    assert policy.mean == 13 / 16


def test_one_bernoulli_has_the_law_of_a_drawn_rate():
    """20,000 decisions against rates drawn from the Beta posterior, by a two-sample test."""
    policy, runs = ThompsonLength(ThompsonParams(abstains=False)), 20_000
    for accepted in (2, 1):
        policy.observe(*outcome(accepted, TokenKind.RECOVERED), 0.1)
    ours = 0
    for seed in range(runs):
        policy.before_round(a_round(seed=seed))
        ours += policy.continues([Step(0, Readout())])
    draw = np.random.default_rng(0)
    theirs = int((draw.random(runs) < draw.beta(4, 3, runs)).sum())
    table = [[ours, runs - ours], [theirs, runs - theirs]]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert stats.binomtest(ours, runs, 4 / 7).pvalue > 1e-3


def test_thompson_draws_anew_at_every_depth_and_round():
    policy = ThompsonLength()
    decisions = []
    for root in range(2, 40):
        policy.before_round(a_round(tokens=[0] * root))
        decisions.append(tuple(policy.continues([Step(0, Readout())] * depth) for depth in range(1, 9)))
        policy.before_round(a_round(tokens=[0] * root))
        assert decisions[-1] == tuple(policy.continues([Step(0, Readout())] * depth) for depth in range(1, 9))
    assert len(set(decisions)) > 30
    # The same place of the text, drafted in two rounds, is decided independently: keyed by position only, it would
    # agree always.
    again = [one[1] == two[0] for one, two in itertools.pairwise(decisions)]
    assert 0.2 < sum(again) / len(again) < 0.8


def test_calibration_moves_from_confidence_to_the_posterior():
    policy = ThompsonLength(ThompsonParams(control="calibrated", half=10.0, abstains=False))

    def share(confidence: float) -> float:
        going = 0
        for seed in range(2_000):
            policy.before_round(a_round(seed=seed))
            going += policy.continues([Step(0, sharpest(confidence)[0])])
        return going / 2_000

    assert (share(1.0), share(1e-9)) == (1.0, 0.0)
    for _ in range(9):
        policy.observe(*outcome(1, TokenKind.BONUS), 0.1)
    policy.observe(*outcome(0, TokenKind.RECOVERED), 0.1)
    # Ten judged tokens: half posterior mean 10/12, half confidence.
    assert share(0.2) == pytest.approx(0.5 * 10 / 12 + 0.5 * 0.2, abs=0.04)


async def test_better_drafts_become_longer_under_thompson(run):
    lengths = {}
    for rate in (0.3, 0.9):
        target = torch.full((4, 4), 1e-9)
        target[:, 1] = 1.0
        draft = torch.full((4, 4), (1 - rate) / 3)
        draft[:, 1] = rate
        small, large = TableModel("small", markov(draft), 4), TableModel("large", markov(target), 4)
        params = {"length": "thompson", "verifier": "rejection"}
        done = await run("speculative", small, large, params, prompt=(0,), max_tokens=400)
        speculation = done.seq.meter.speculation
        lengths[rate] = speculation.draft_tokens / speculation.rounds
    assert lengths[0.9] > 1.5 * lengths[0.3]


@pytest.mark.parametrize("length", POLICIES, ids=str)
async def test_output_is_plain_decoding_token_by_token(run, make_model, length):
    small, large = make_model("small", 1), make_model("large", 2)
    for seed in range(12):
        temperature = 0.0 if seed % 2 else 1.0
        sampling = {"seed": seed, "temperature": temperature, "prompt": (seed % 12, 3)}
        plain = await run("plain", small, large, **sampling)
        drafted = await run("speculative", small, large, {"length": length}, **sampling)
        assert drafted.ids == plain.ids


TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.4, 0.3]])
DRAFT = torch.tensor([[0.05, 0.9, 0.05], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]])
TARGET_ROWS = [Readout(probs=probs) for probs in TARGET]
DRAFT_ROWS = [
    Readout(probs=q, entropy_bits=entropy_bits(q[None].log()).item(), top=((int(q.argmax()), float(q.max().log())),))
    for q in DRAFT
]
FIRST_THREE = (TARGET[0][:, None, None].double() * TARGET[:, :, None] * TARGET).flatten().numpy()


def chain_of(policy: LengthPolicy, seq: Sequence, least: float) -> DraftTree:
    """A drawn chain as long as the policy says; tokens with a probability below `least` are dropped: a fault."""
    model = TableModel("m", lambda _: torch.zeros(3), 3)
    depth = policy.before_round(Round(seq, model, model, False, "model_chain"))
    path: list[Step] = []
    last = seq.tokens[-1]
    while len(path) < depth:
        key = noise_key(seq.seed, len(seq) + len(path), Purpose.DRAFT)
        below = DRAFT[last].double().cumsum(0) / DRAFT[last].double().sum() <= uniform(key)
        row, last = DRAFT_ROWS[last], int(below.sum())
        if row.probs[last] < least:
            break
        path.append(Step(last, row))
        if not policy.continues(path):
            break
    return DraftTree.chain([step.token for step in path], "small", [step.row.probs for step in path])


@many_runs()
def p_value(make: Callable[[], LengthPolicy], runs: int, least: float = 0.0) -> float:
    """Chi-square of the first three tokens of so many answers against the target's law."""
    counts = np.zeros(27)
    verifier = RejectionVerifier()
    for seed in range(runs):
        seq, policy = Sequence([0], SamplingParams(max_tokens=64), seed), make()
        while len(seq) <= 3:
            tree = chain_of(policy, seq, least)
            rows = [TARGET_ROWS[seq.tokens[-1]], *(TARGET_ROWS[token] for token in tree.tokens)]
            verdict = verifier.judge(seq, tree, rows, "large")
            seq.extend(verdict.tokens, {"small": 0, "large": 0})
            policy.observe(tree, verdict, 0.1)
        first, second, third = seq.tokens[1:4]
        counts[9 * first + 3 * second + third] += 1
    return stats.chisquare(counts, FIRST_THREE / FIRST_THREE.sum() * runs).pvalue


SAMPLED = {
    "svip": lambda: SvipLength(SvipParams(threshold=0.35, most=4)),
    "confidence": lambda: ConfidenceLength(ConfidenceParams(threshold=0.5, most=4)),
    "thompson": lambda: ThompsonLength(ThompsonParams(control="calibrated", most=4)),
}


@pytest.mark.parametrize("name", list(SAMPLED))
def test_the_law_stays_the_targets(name):
    assert p_value(SAMPLED[name], 1_500) > 1e-3


@pytest.mark.exactness
@pytest.mark.parametrize("name", list(SAMPLED))
def test_the_law_stays_the_targets_over_many_runs(name):
    assert p_value(SAMPLED[name], 200_000) > 1e-3


def test_dropping_a_drawn_token_is_caught():
    assert p_value(SAMPLED["svip"], 1_000, least=0.35) < 1e-6
