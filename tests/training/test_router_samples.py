"""What samples are worth by hand: to whoever can tell a right one, and as the method `best_of` shows one."""

from __future__ import annotations

import numpy as np
import pytest

from training.router_outcomes import Outcome, Sample
from training.router_samples import PICKS, answered_by, shown_by


def row(*samples: tuple[str, float, float]) -> Outcome:
    """A prompt with samples of the small model: final answer, reward, mean log-probability."""
    drawn = tuple(Sample(reward=reward, answer=answer, logprob=logprob) for answer, reward, logprob in samples)
    return Outcome(prompt="?", samples_small=drawn, correct_large=True)


def test_what_is_shown_is_less_than_what_is_there():
    """One right answer among three is outvoted by two wrong ones that agree, and may be the least likely."""
    drawn = row(("7", 0.0, -0.5), ("8", 1.0, -0.2), ("7", 0.0, -0.1))
    [there] = answered_by([drawn], "small")
    assert there.tolist() == pytest.approx([1 / 3, 2 / 3, 1.0])
    [majority] = shown_by([drawn], "small", "majority")
    assert majority.tolist() == pytest.approx([1 / 3, 1 / 3, 0.0])  # of a pair that disagrees the likelier one is shown
    [likeliest] = shown_by([drawn], "small", "logprob")
    assert likeliest.tolist() == pytest.approx([1 / 3, 1 / 3, 0.0])


def test_a_majority_that_is_right_wins_over_the_likeliest():
    drawn = row(("7", 1.0, -0.5), ("8", 0.0, -0.1), ("7", 1.0, -0.4))
    [majority] = shown_by([drawn], "small", "majority")
    [likeliest] = shown_by([drawn], "small", "logprob")
    assert (majority[2], likeliest[2]) == (1.0, 0.0)


def test_of_many_samples_some_picks_are_drawn_the_same_ones_always():
    many = row(*(("7", 1.0, -0.5) if n % 2 else (f"{n}", 0.0, -0.1) for n in range(20)))
    first, second = shown_by([many], "small", "majority"), shown_by([many], "small", "majority")
    assert np.array_equal(first, second)
    assert first[0, 0] == pytest.approx(0.5)  # all 20 of them
    assert 0.9 < first[0, 7] <= 1.0  # of 125,970 some
    assert (first[0, 7] * PICKS) % 1 == 0.0


@pytest.mark.parametrize("lacking", [{"answer": None}, {"logprob": None}])
def test_a_file_that_does_not_say_what_was_answered_has_no_such_figure(lacking: dict[str, None]):
    whole = row(("7", 1.0, -0.5), ("8", 0.0, -0.1))
    drawn = tuple(each.model_copy(update=lacking) for each in whole.samples("small"))
    partly = whole.model_copy(update={"samples_small": drawn})
    assert shown_by([whole, partly], "small", "majority") is None
    assert shown_by([whole], "small", "majority") is not None
    assert (shown_by([partly], "small", "logprob") is None) == ("logprob" in lacking)
