"""Answers of a tenant that learn together, under EXP3: whose draw each of them pulls, and what a pull counts."""

import pytest

from decoding.drafter_state import Stores
from decoding.selectors.base import Gain
from decoding.selectors.exp3 import Exp3
from decoding.sequence import Sequence
from tests.decoding.test_selectors import exp3, new_sequence
from turnout.types import FinishReason, Token


def several(num_answers: int, stores: Stores) -> list[tuple[Exp3, Sequence]]:
    """Answers of a tenant that have begun, with the bandit of each."""
    answers = [(exp3(memory=0), new_sequence(seed)) for seed in range(num_answers)]
    for bandit, seq in answers:
        bandit.begin(seq, list("abcd"), stores)
    return answers


def test_answers_that_learn_together_pull_what_one_of_them_drew():
    """A step of a batch is as long as its slowest draft: those that wait for one might as well draft alike."""
    answers = several(3, Stores())
    draws = []
    for _ in range(60):
        [arm] = {bandit.order(seq, 4)[0] for bandit, seq in answers}
        draws.append(answers[0][0].state.draw)
        for bandit, seq in answers:
            bandit.observe(arm, Gain(2, 5, 1.0))
            seq.append(Token(0, "m"))
        assert (draws[-1].arm, draws[-1].seen) == (arm, 3)
    assert len(set(draws)) == 60
    assert {draw.arm for draw in draws} == {0, 1, 2, 3}
    assert answers[0][0].state.rounds == 60


def test_who_has_pulled_a_draw_makes_the_next_and_others_go_on_with_the_newest():
    (fast, seq), (slow, other), _ = several(3, Stores())
    fast.order(seq, 4)
    fast.order(seq, 4)
    newest = fast.state.draw
    assert slow.order(other, 4)[0] == newest.arm
    assert slow.state.draw is newest
    slow.order(other, 4)
    assert slow.state.draw is not newest


def test_pulls_of_a_draw_are_one_round_with_the_mean_of_their_losses_by_the_chance_it_had():
    (first, seq), (second, other) = several(2, Stores())
    state = first.state
    arm = first.order(seq, 4)[0]
    second.order(other, 4)
    first.observe(arm, Gain(2, 5, 1.0))
    assert (state.weights[arm], state.losses[arm], state.rounds) == (4.0, 0.75 / 0.25, 1)
    # Seen when the next one was drawn already, with another chance: it belongs to its own all the same.
    chance = first.probabilities()
    drawn = first.order(seq, 4)[0]
    second.observe(arm, Gain(4, 5, 1.0))
    assert (state.weights[arm], state.losses[arm], state.rounds) == (4.0, (0.75 + 0.25) / 2 / 0.25, 1)
    first.observe(drawn, Gain(3, 5, 1.0))
    expected = (4.0 if drawn == arm else 0.0) + 1.0 / chance[drawn]
    assert (state.weights[drawn], state.rounds) == (pytest.approx(expected), 2)


def test_an_answer_that_is_faster_than_others_makes_no_rounds_of_theirs():
    """One takes two rounds where seven take one: draws of 8 pulls and of 1, by turns, and each is one round."""
    answers = several(8, Stores())
    for turn in range(400):
        for bandit, seq in answers if turn % 2 == 0 else answers[:1]:
            arm = bandit.order(seq, 4)[0]
            bandit.observe(arm, Gain(2, 5, 1.0))
            seq.append(Token(0, "m"))
    state = answers[0][0].state
    assert state.rounds == 400
    # Gains are all the same, so every arm is expected to be drawn once in four, with a chance of about that.
    assert sum(state.weights) / 4 == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize("rounds", [4, 20])
def test_short_answers_learn_as_long_ones_do(rounds):
    """What their first rounds are left out of must not tell for arms that are rarely drawn."""
    stores, pulls = Stores(), []
    for seed in range(6_000 // rounds):
        bandit, seq = exp3(reward="speed"), new_sequence(seed)
        bandit.begin(seq, list("abcd"), stores)
        for _ in range(rounds):
            arm = bandit.order(seq, 4)[0]
            pulls.append(arm)
            bandit.observe(arm, Gain(2, 5, 1.0 if arm == 2 else 2.0))
            seq.append(Token(0, "m"))
    assert pulls[-1_500:].count(2) > 1_350


def test_what_an_answer_drew_that_has_ended_is_nobodys():
    """Answers one after the other draw in every round, as the paper's single one does."""
    stores, kept, draws = Stores(), [], []
    for seed in range(4):
        bandit, seq = exp3(), new_sequence(seed)
        bandit.begin(seq, list("abcd"), stores)
        for _ in range(3):
            bandit.order(seq, 4)
            draws.append(bandit.state.draw)
            seq.append(Token(0, "m"))
        if seed % 2:
            seq.finish_reason = FinishReason.LENGTH
            kept.append(bandit)
        # The others are given up: nobody has them any more.
    assert len(set(draws)) == 12


@pytest.mark.parametrize("num_answers", [1, 2])
def test_an_answer_that_speculates_in_several_stretches_never_pulls_a_draw_twice(num_answers):
    """Where steps of another model lie between, the same bandit begins again and again with the same answer."""
    stores = Stores()
    answers = several(num_answers, stores)
    draws = []
    for _ in range(12):
        for bandit, seq in answers:
            bandit.begin(seq, list("abcd"), stores)
            bandit.order(seq, 4)
            draws.append(bandit.state.draw)
            seq.append(Token(0, "m"))
    assert [draws.count(draw) for draw in draws] == [num_answers] * len(draws)


@pytest.mark.parametrize("apart", ["tenant", "scope"])
def test_answers_that_learn_apart_draw_apart(apart):
    stores, seqs = Stores(), [new_sequence(seed, f"{apart} {seed}" if apart == "tenant" else "a") for seed in range(2)]
    bandits = [exp3(scope="tenant" if apart == "tenant" else "request") for _ in seqs]
    for bandit, seq in zip(bandits, seqs, strict=True):
        bandit.begin(seq, list("abcd"), stores)
    differed = 0
    for _ in range(20):
        arms = [bandit.order(seq, 4)[0] for bandit, seq in zip(bandits, seqs, strict=True)]
        differed += arms[0] != arms[1]
        for seq in seqs:
            seq.append(Token(0, "m"))
    assert differed > 5
