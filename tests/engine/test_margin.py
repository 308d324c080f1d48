"""The comparison helper itself: it excuses ties and nothing else."""

import pytest
import torch

from tests.engine.margin import TIE_NATS, assert_best, assert_same_tokens, excused

# Token 2 is best everywhere; token 3 is a tie at place 1 only.
SCORES = torch.tensor([[0.0, 1.0, 5.0, 1.0], [0.0, 1.0, 5.0, 5.0 - TIE_NATS / 2], [0.0, 1.0, 5.0, 5.0 - 2 * TIE_NATS]])


@pytest.fixture(autouse=True)
def _leave_no_trace():
    before = len(excused)
    yield
    del excused[before:]


def test_equal_answers_pass_without_a_look_at_scores():
    assert_same_tokens([2, 2, 2], [2, 2, 2], lambda place: pytest.fail("asked for scores"))
    assert not excused[len(excused) :]


def test_a_tie_is_excused_and_counted():
    before = len(excused)
    assert_same_tokens([2, 2, 2], [2, 3, 0], lambda place: SCORES[place])
    assert len(excused) == before + 1


@pytest.mark.parametrize("wrong", [[1, 2, 2], [2, 1, 2], [2, 2, 3], [2, 2, 0]])
def test_a_planted_wrong_token_is_never_excused(wrong):
    with pytest.raises(AssertionError, match="nats behind 2"):
        assert_same_tokens([2, 2, 2], wrong, lambda place: SCORES[place])
    with pytest.raises(AssertionError, match="nats behind 2"):
        assert_same_tokens(wrong, [2, 2, 2], lambda place: SCORES[place])


def test_a_missing_or_extra_token_is_never_excused():
    for got in ([2, 2], [2, 2, 2, 2], []):
        with pytest.raises(AssertionError, match="expected 3"):
            assert_same_tokens([2, 2, 2], got, lambda place: SCORES[place])


def test_best_needs_a_number():
    assert_best(2, SCORES[0])
    with pytest.raises(AssertionError):
        assert_best(2, torch.tensor([0.0, 0.0, float("nan")]))
