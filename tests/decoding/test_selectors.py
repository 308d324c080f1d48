"""Bandits over arms: what they choose, how their regret grows, and that they change nothing of what is emitted."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from decoding.drafter_state import Stores
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.rsd_c import RsdCDrafter, RsdCParams
from decoding.drafters.rsd_s import RsdSDrafter, RsdSParams
from decoding.fakes import TableModel
from decoding.lengths.base import LengthPolicy
from decoding.model import Model
from decoding.selectors._bandit import Bandit
from decoding.selectors.base import Gain
from decoding.selectors.exp3 import Exp3, Exp3Params
from decoding.selectors.ucb import Ucb, UcbParams
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.markov_rounds import FAR, SMALL, p_value
from turnout.types import SamplingParams, Token

ARMS = [{"drafter": "model_chain", "length": {"name": "fixed", "most": most}} for most in (1, 2, 3, 4)]

Rewards = Callable[[int], tuple[float, ...]]


def ucb(**params) -> Ucb:
    return Ucb(UcbParams(**{"reward": "tokens", **params}))


def exp3(**params) -> Exp3:
    return Exp3(Exp3Params(**{"reward": "tokens", **params}))


def new_sequence(seed: int = 0, tenant: str = "default") -> Sequence:
    return Sequence([0], SamplingParams(max_tokens=1_000_000), seed, tenant=tenant)


def play(bandit: Bandit, rewards: Rewards, rounds: int, seed: int = 0) -> list[int]:
    """Pulls, with gains of 0 or 1; `rewards` gives each arm's chance of a 1."""
    seq, chance = new_sequence(seed), random.Random(seed)
    num_arms = len(rewards(0))
    bandit.begin(seq, [str(arm) for arm in range(num_arms)], Stores())
    pulls = []
    for now in range(rounds):
        arm = bandit.order(seq, num_arms)[0]
        pulls.append(arm)
        bandit.observe(arm, Gain(1 + (chance.random() < rewards(now)[arm]), 2, 1.0))
        seq.append(Token(0, "m"))
    return pulls


def test_ucb_by_hand():
    bandit, seq = ucb(exploration=2.0), new_sequence()
    bandit.begin(seq, ["a", "b"], Stores())
    for arm, tokens in ((0, 3), (1, 5)):
        assert bandit.order(seq, 2)[0] == arm
        bandit.observe(arm, Gain(tokens, 5, 1.0))
    # Gains 2 and 4 of at most 4, one pull each: bounds 2 + 4 sqrt(2 ln 2) and 4 + 4 sqrt(2 ln 2).
    assert bandit.order(seq, 2) == [1, 0]
    for _ in range(6):
        bandit.observe(1, Gain(5, 5, 1.0))
    # 2 + 4 sqrt(2 ln 8 / 1) = 10.2 is above 4 + 4 sqrt(2 ln 8 / 7) = 7.1: the arm seen once is seen again.
    assert bandit.order(seq, 2) == [0, 1]


def test_the_radii_are_the_papers_and_shrink_with_an_arms_own_pulls():
    assert ucb(exploration=6.0).radius(4, 100, 3) == pytest.approx(math.sqrt(6 * math.log(100) / 4))
    bound = 0.5 * math.sqrt(5 / 16 * (1 + 2 * math.log(3 * 100**2 * math.sqrt(5) / 0.05)))
    assert ucb(radius="self_normalised").radius(4, 100, 3) == pytest.approx(bound)
    for bandit in (ucb(), ucb(radius="self_normalised")):
        assert bandit.radius(50, 100, 2) < 0.5 * bandit.radius(5, 100, 2)


@pytest.mark.parametrize("radius", ["ucb1", "self_normalised"])
def test_pulls_of_worse_arms_grow_with_the_logarithm(radius):
    def worse(rounds: int) -> float:
        runs = [play(ucb(radius=radius), lambda _: (0.3, 0.9, 0.5), rounds, seed) for seed in range(4)]
        return sum(run.count(0) + run.count(2) for run in runs) / 4

    few, many = worse(500), worse(4_000)
    assert 0 < few < 150
    # Eight times the rounds: ln grows by a third, far below the 8 of a fixed share and the 2.8 of a square root.
    assert few < many < 2.4 * few


def test_exp3_by_hand():
    bandit, seq = exp3(), new_sequence()
    bandit.begin(seq, ["a", "b"], Stores())
    assert bandit.probabilities() == [0.5, 0.5]
    arm = bandit.order(seq, 2)[0]
    bandit.observe(arm, Gain(2, 5, 1.0))
    # Loss (5 - 2) / 4, weighted by 1 / 0.5; in round 2 the rate is sqrt(ln 2 / (2 * 2)).
    weight = math.exp(-math.sqrt(math.log(2) / 4) * 0.75 / 0.5)
    assert bandit.probabilities()[arm] == pytest.approx(weight / (1 + weight))


def test_exp3_draws_arms_with_its_probabilities():
    bandit = exp3()
    bandit.begin(new_sequence(), ["a", "b", "c"], Stores())
    bandit.state.losses[:] = [0.0, 1.0, 2.0]
    bandit.state.rounds = 3
    drawn = [bandit.order(new_sequence(seed), 3) for seed in range(4_000)]
    for arm, prob in enumerate(bandit.probabilities()):
        assert sum(order[0] == arm for order in drawn) / 4_000 == pytest.approx(prob, abs=0.03)
    assert all(sorted(order) == [0, 1, 2] for order in drawn)
    assert {tuple(order[1:]) for order in drawn if order[0] == 1} == {(0, 2)}


def against_ucb(rounds: int) -> list[tuple[float, float]]:
    """Gains set against UCB, which is deterministic: nothing for the arm it pulls, all for the other."""
    bandit, seq, gains = ucb(exploration=2.0), new_sequence(), []
    bandit.begin(seq, ["a", "b"], Stores())
    for _ in range(rounds):
        arm = bandit.order(seq, 2)[0]
        gains.append((float(arm == 1), float(arm == 0)))
        bandit.observe(arm, Gain(1, 2, 1.0))
    return gains


def test_exp3_keeps_its_regret_at_the_square_root_where_ucb_cannot():
    rounds = 4_000
    gains = against_ucb(rounds)
    best = max(sum(pair[arm] for pair in gains) for arm in (0, 1))
    assert best >= rounds / 2
    theirs = play(ucb(exploration=2.0), gains.__getitem__, rounds)
    assert sum(gains[now][arm] for now, arm in enumerate(theirs)) == 0
    for seed in range(3):
        ours = play(exp3(), gains.__getitem__, rounds, seed)
        regret = best - sum(gains[now][arm] for now, arm in enumerate(ours))
        assert regret < 2 * math.sqrt(rounds * 2 * math.log(2))


def test_exp3_follows_a_change_of_the_best_arm():
    pulls = play(exp3(), lambda now: (0.9, 0.1) if now < 500 else (0.1, 0.9), 3_000)
    assert pulls[250:500].count(0) > 200
    assert pulls[-250:].count(1) > 200


def test_speed_is_the_gain_where_tokens_mislead():
    """Arm 1 always brings more tokens but takes three times as long."""

    def chosen(bandit: Bandit) -> int:
        seq = new_sequence()
        bandit.begin(seq, ["short", "long"], Stores())
        pulls = []
        for _ in range(600):
            arm = bandit.order(seq, 2)[0]
            pulls.append(arm)
            bandit.observe(arm, Gain((2, 4)[arm], 5, (0.01, 0.03)[arm]))
            seq.append(Token(0, "m"))
        return max((0, 1), key=pulls[-200:].count)

    for make in (ucb, exp3):
        assert chosen(make(reward="tokens")) == 1
        assert chosen(make(reward="speed")) == 0


def test_an_arms_first_round_of_an_answer_says_nothing_of_its_speed():
    bandit, seq = ucb(reward="speed"), new_sequence()
    bandit.begin(seq, ["a"], Stores())
    for seconds in (9.0, 0.5):
        bandit.order(seq, 1)
        bandit.observe(0, Gain(2, 5, seconds))
    assert (bandit.state.pulls, bandit.state.gains) == ([1], [4.0])


@pytest.mark.parametrize("make", [ucb, exp3])
def test_the_arm_asked_first_is_credited_even_where_another_drafted(make):
    bandit, seq = make(), new_sequence()
    bandit.begin(seq, ["silent", "model"], Stores())
    first, second = bandit.order(seq, 2)
    bandit.observe(second, Gain(2, 5, 1.0))
    counts = bandit.state.pulls if make is ucb else bandit.state.weights
    assert counts[first] > 0
    assert counts[second] == 0


@pytest.mark.parametrize("make", [ucb, exp3])
def test_state_is_the_requests_or_the_tenants(make):
    stores = Stores()

    def state(scope: str, tenant: str, arms: list[str]):
        bandit = make(scope=scope)
        bandit.begin(new_sequence(tenant=tenant), arms, stores)
        return bandit.state

    assert state("request", "a", ["x", "y"]) is not state("request", "a", ["x", "y"])
    shared = state("tenant", "a", ["x", "y"])
    assert state("tenant", "a", ["x", "y"]) is shared
    assert state("tenant", "b", ["x", "y"]) is not shared
    assert state("tenant", "a", ["x", "z"]) is not shared


@pytest.mark.parametrize("make", [ucb, exp3])
def test_an_answer_that_begins_again_has_learned_what_it_has(make):
    bandit, seq = make(scope="request"), new_sequence()
    bandit.begin(seq, ["x", "y"], Stores())
    learned = bandit.state
    bandit.begin(seq, ["x", "y"], Stores())
    assert bandit.state is learned
    bandit.begin(new_sequence(), ["x", "y"], Stores())
    assert bandit.state is not learned


@pytest.mark.parametrize("scope", ["request", "tenant"])
@pytest.mark.parametrize("reward", ["tokens", "speed"])
@pytest.mark.parametrize("name", ["ucb", "exp3"])
async def test_output_is_plain_decoding_whatever_is_chosen(run, make_model, name, reward, scope):
    small, large = make_model("small", 1), make_model("large", 2)
    select = {"name": name, "reward": reward, "scope": scope}
    for seed in range(10):
        sampling = {"seed": seed, "temperature": float(seed % 2)}
        plain = await run("plain", small, large, **sampling)
        drafted = await run("speculative", small, large, {"drafter": ARMS, "select": select}, **sampling)
        assert drafted.ids == plain.ids


async def test_a_tenants_bandit_finds_the_longest_of_free_arms(run):
    """A draft that is always right: every token more is a gain, and a second answer starts where the first ended."""
    models = [TableModel(name, lambda tokens: -abs(_ring(tokens)), 4) for name in ("small", "large")]
    select = {"name": "ucb", "reward": "tokens", "scope": "tenant", "exploration": 0.5}
    params = {"drafter": ARMS, "select": select}
    first = await run("speculative", *models, params, prompt=(0,), max_tokens=200)
    second = await run("speculative", *models, params, prompt=(0,), max_tokens=200)
    lengths = [len(segment.tokens) for segment in second.segments]
    assert max(set(lengths), key=lengths.count) == 5
    assert len(second.segments) < len(first.segments)


def _ring(tokens: list[int]) -> torch.Tensor:
    return (torch.arange(4) - (tokens[-1] + 1) % 4).float() * 50.0


class Chosen(Drafter):
    """Each round the tree that a bandit chooses; what it learns outlives the answer."""

    kinds = frozenset({Candidates.DRAWN})

    def __init__(self, bandit: Bandit) -> None:
        super().__init__()
        self._bandit, self._stores = bandit, Stores()
        self._arms = [RsdCDrafter(RsdCParams(branching=(2, 2))), RsdSDrafter(RsdSParams(beam=3)), RsdCDrafter()]
        self._seq: Sequence | None = None
        self.pulls = [0] * len(self._arms)

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        if seq is not self._seq:
            self._seq = seq
            self._bandit.begin(seq, ["two and two", "beam", "as it comes"], self._stores)
        self._arm = self._bandit.order(seq, len(self._arms))[0]
        self.pulls[self._arm] += 1
        return await self._arms[self._arm].propose(model, seq, room, length)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        self._bandit.observe(self._arm, Gain(len(verdict.tokens), 3, 1.0))


@pytest.mark.parametrize("make", [ucb, exp3])
@pytest.mark.parametrize("runs", [700, pytest.param(200_000, marks=pytest.mark.exactness)])
def test_the_law_with_any_sequence_of_arms_is_the_targets(make, runs):
    drafter = Chosen(make())
    assert p_value(drafter, RejectionVerifier(), runs, SMALL, FAR) > 1e-3
    assert min(drafter.pulls) > 10


class Peeking(Chosen):
    """Planted: goes over to another arm, which drafts nothing, where the draft does not begin with token 0."""

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        tree = await super().propose(model, seq, room, length)
        return tree if tree.tokens[0] == 0 else DraftTree.empty(tree.source)


@pytest.mark.parametrize("make", [ucb, exp3])
def test_an_arm_that_is_chosen_by_its_draft_is_caught(make):
    assert p_value(Peeking(make()), RejectionVerifier(), 2_000, SMALL, FAR) < 1e-6
