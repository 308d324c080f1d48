"""Phi-decoding: which steps get a rollout, what they are worth, how they are drawn, and what it costs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

from decoding.fakes import ListText, TableModel, pair
from decoding.methods.phi_decoding import (
    Candidate,
    cluster_shares,
    combined,
    drawn_without_replacement,
    final_choice,
    pruned_in_width,
)
from decoding.model import Request, StopCondition
from decoding.rollouts import branches_of
from decoding.sequence import Sequence
from decoding.text_clusters import MOST_WORDS, k_means, tf_idf
from turnout.errors import TurnoutError
from turnout.registry import get_method
from turnout.types import SamplingParams

TEXTS = ["<end>", "good", "bad", ";", " yes", " maybe", " perhaps", " possibly"]
END, GOOD, BAD, MARK = 0, 1, 2, 3
VOCAB = len(TEXTS)


def dead_end(name: str = "large", shortest: int = 12) -> TableModel:
    """The likelier first step, `bad`, leads to lines of words by chance; after `good` each line is the same word."""

    def logits(tokens: list[int]) -> torch.Tensor:
        probs = torch.zeros(VOCAB)
        last = tokens[-1]
        if len(tokens) >= shortest:
            probs[END] = 1.0
        elif GOOD not in tokens and BAD not in tokens:
            probs[GOOD], probs[BAD] = 0.4, 0.6
        elif last in (GOOD, BAD) or last > MARK:
            probs[MARK] = 1.0
        elif GOOD in tokens:
            probs[4] = 1.0
        else:
            probs[4:8] = 0.25
        return probs.log().clamp_min(-60.0)

    return TableModel(name, logits, VOCAB)


def table(seed: int) -> TableModel:
    rows = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed))
    return TableModel("large", lambda tokens: rows[tokens[-2], tokens[-1]], VOCAB)


async def write(
    made: TableModel,
    params: Any = None,
    seed: int = 5,
    method: str = "phi_decoding",
    small: Any = None,
    **sampling: Any,
) -> tuple[Sequence, Request]:
    asked = SamplingParams.model_validate({"max_tokens": 16, **sampling})
    seq, info = Sequence([3, 3], asked, seed, (END,)), get_method(method)
    request = Request("r", seq)
    given = {"separators": [";"], **(params or {})} if method == "phi_decoding" else {}
    running = info.run(request, pair(small or made, made, ListText(TEXTS)), info.parse(given))
    segments = [each async for each in running]
    assert [token for each in segments for token in each.tokens] == seq.generated
    assert list(made.cached) == [seq]
    assert small is None or list(small.cached) in ([], [seq])
    made.release(seq)
    return seq, request


@pytest.mark.parametrize("seed", range(3))
async def test_at_temperature_0_it_is_plain_decoding(seed: int) -> None:
    plain, _ = await write(table(seed), method="plain", temperature=0.0)
    assert (await write(table(seed), temperature=0.0))[0].tokens == plain.tokens


async def test_without_pruning_every_step_of_every_beam_gets_a_rollout() -> None:
    open_ended = {
        "sigma": 1e6,
        "agreement": 2.0,
        "beams": 3,
        "samples": 2,
        "max_steps": 3,
        "min_steps": 1,
        "max_step_tokens": 8,
    }
    for seed in range(2):
        _, request = await write(table(seed), open_ended, ignore_eos=True, max_tokens=40, seed=seed)
        found = request.extra["phi_decoding"]
        assert found["pruned"] == 0
        assert found["rollouts"] == found["steps"] * 3 * 2
        _, request = await write(table(seed), {**open_ended, "sigma": 1.0}, ignore_eos=True, max_tokens=40, seed=seed)
        found = request.extra["phi_decoding"]
        assert found["rollouts"] + found["pruned"] == found["steps"] * 3 * 2
        assert found["pruned"] > 0


async def test_a_seed_gives_the_same_answer_and_another_seed_another() -> None:
    params = {"beams": 2, "samples": 2, "max_steps": 2}
    answers = [(await write(table(1), params, seed))[0].tokens for seed in range(6)]
    assert answers == [(await write(table(1), params, seed))[0].tokens for seed in range(6)]
    assert len(set(map(tuple, answers))) > 3


async def test_a_first_step_that_leads_nowhere_is_seen_by_looking_ahead() -> None:
    """By its own probability, `bad` is better; by what follows, `good` is."""
    runs, chosen, plain = 12, 0, 0
    for seed in range(runs):
        seq, _ = await write(dead_end(), {"beams": 2, "samples": 4, "max_steps": 3, "sigma": 2.0}, seed)
        chosen += seq.answer[0] == GOOD
        plain += (await write(dead_end(), seed=seed, method="plain"))[0].answer[0] == GOOD
    assert plain < 0.7 * runs
    assert chosen > 0.8 * runs


async def test_all_work_is_charged_and_what_is_not_shown_is_discarded() -> None:
    for roller in (None, "small"):
        made, small = dead_end(), dead_end("small")
        params = {"beams": 2, "samples": 3, "max_steps": 2, "roller": roller}
        seq, request = await write(made, params, small=small)
        meters = seq.meter.models
        assert meters["large"].generated_tokens == len(seq.generated)
        assert meters["large"].discarded_tokens > 0
        assert {token.source for token in seq.generated} == {"large"}
        assert meters["large"].forwards == made.forwards
        assert request.extra["phi_decoding"]["rollouts"] > 0
        if roller:
            assert meters["small"].generated_tokens == 0
            assert meters["small"].forwards == small.forwards > 0
        else:
            assert small.forwards == 0


@pytest.mark.parametrize("fails_at", [3, 20, 60])
async def test_a_fault_anywhere_releases_all(fails_at: int) -> None:
    made = dead_end()
    whole, calls = made.next_logits, []

    def fails(tokens: list[int]) -> torch.Tensor:
        calls.append(tokens)
        if len(calls) > fails_at:
            raise ZeroDivisionError
        return whole(tokens)

    made.next_logits = fails
    seq, info = Sequence([3, 3], SamplingParams(max_tokens=16), 0, (END,)), get_method("phi_decoding")
    with pytest.raises(ZeroDivisionError):
        async for _ in info.run(
            Request("r", seq), pair(made, made, ListText(TEXTS)), info.parse({"separators": [";"]})
        ):
            pass
    assert list(made.cached) == [seq]
    assert seq.meter.models["large"].forwards == made.forwards


# How steps are chosen


def test_steps_that_are_improbable_for_their_place_are_left_out() -> None:
    values = [-1.0, -1.1, -0.9, -5.0]  # mean -2, deviation 1.73
    assert pruned_in_width(values, 1.0, 2, 7) == [0, 1, 2]
    assert pruned_in_width(values, 2.0, 2, 7) == [0, 1, 2, 3]
    assert pruned_in_width(values, 1.0, 4, 7) == [0, 1, 2, 3]  # filled up
    assert pruned_in_width([-1.0] * 3, 0.0, 2, 7) in ([0, 1], [0, 2], [1, 2])  # none is above the mean
    assert pruned_in_width([-1.0] * 3, 1.0, 1, 7) in ([0], [1], [2])


def test_steps_are_drawn_by_the_mean_of_two_distributions() -> None:
    advantages, shares = [0.1, 0.2, 0.1], cluster_shares([0, 1, 0])
    assert shares == pytest.approx([2 / 3, 1 / 3, 2 / 3])
    e, a = math.e, math.exp(2 / 3) * 2 + math.exp(1 / 3)
    expected = [
        (1 / (2 + e) + math.exp(2 / 3) / a) / 2,
        (e / (2 + e) + math.exp(1 / 3) / a) / 2,
        (1 / (2 + e) + math.exp(2 / 3) / a) / 2,
    ]
    assert combined(advantages, shares).tolist() == pytest.approx(expected)
    assert sum(expected) == pytest.approx(1.0)


def test_draws_without_replacement_have_the_law_of_one_after_the_other() -> None:
    weights, runs = [0.5, 0.3, 0.2], 2000
    logits = torch.tensor(weights, dtype=torch.float64).log()
    counts = Counter(tuple(drawn_without_replacement(logits, 2, key * 7919)) for key in range(runs))
    for first, second in permutations(range(3), 2):
        chance = weights[first] * weights[second] / (1 - weights[first])
        assert abs(counts[first, second] / runs - chance) < 4 * math.sqrt(chance / runs)
    assert sorted(drawn_without_replacement(logits, 9, 1)) == [0, 1, 2]


def test_the_last_choice_is_of_the_larger_cluster_of_those_with_an_advantage() -> None:
    def candidate(text: str, advantage: float) -> Candidate:
        seq = Sequence([1], SamplingParams(), 0)
        return Candidate(seq, -1.0, 0.0, "", -1.0 + advantage, text, True)

    alike = [candidate("so it is seven", 0.1), candidate("so it is seven", 0.2)]
    other, worse = candidate("never mind", 0.9), [candidate("so it is seven", -0.1)] * 3
    drawn = [final_choice([other, *worse, *alike], key * 7919) for key in range(60)]
    assert {id(each) for each in drawn} == {id(each) for each in alike}
    share = sum(each is alike[1] for each in drawn) / 60
    assert abs(share - math.e / (1 + math.e)) < 0.22  # softmax of 1 and 2: the sign of an advantage matters
    none = [candidate("one", -2.0), candidate("two", -0.1)]
    assert all(final_choice(none, key * 7919) is none[1] for key in range(20))


# Clusters


def test_vectors_are_those_of_scikit_learn() -> None:
    texts = ["The cat sat on the mat.", "a cat, a dog", "", "Dogs sit; cats sat_on mats", "x y z"]
    expected = torch.from_numpy(TfidfVectorizer().fit_transform(texts).toarray())
    assert torch.allclose(tf_idf(texts), expected)
    assert tf_idf(["", ""]).shape == (2, 1)


def test_of_many_words_those_in_most_texts_count() -> None:
    texts = [f"{' '.join(f'{name}{place}' for place in range(3000))} common shared {name}" for name in "abc"]
    vectors = tf_idf(texts)
    assert vectors.shape == (3, MOST_WORDS)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3, dtype=torch.float64))
    in_all = vectors[:, (vectors > 0).all(0)]
    assert in_all.shape == (3, 2)


def test_clusters_are_the_best_partition() -> None:
    """By enumeration: no partition into as many parts has less squared distance to its means."""
    for seed in range(8):
        points = torch.randn((6, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

        def cost(labels: Any, points: torch.Tensor = points) -> float:
            parts = [points[[place for place, each in enumerate(labels) if each == label]] for label in set(labels)]
            return sum(float((part - part.mean(0)).square().sum()) for part in parts)

        best = min(cost([number >> place & 1 for place in range(6)]) for number in range(1 << 6))
        labels = k_means(points, 2, seed)
        assert cost(labels) == pytest.approx(best)
        assert labels[0] == 0
        assert labels == k_means(points, 2, seed)


def test_equal_texts_are_one_cluster() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert k_means(tf_idf(["same words"] * 4), 3, 1) == [0, 0, 0, 0]
        assert k_means(tf_idf(["", "", "words"]), 3, 1) == [0, 0, 1]
        assert k_means(tf_idf(["words"]), 3, 1) == [0]


# Branches


async def test_branches_of_branches_are_charged_once() -> None:
    made = dead_end()
    seq = Sequence([3, 3], SamplingParams(max_tokens=16), 0, (END,))
    until = StopCondition(max_tokens=2)
    with branches_of(seq) as branches:
        first = await branches.write(made, [seq] * 2, [1, 2], until)
        second = await branches.write(made, [first[0]] * 2, [3, 4], until)
        branches.drop([first[0]])
        segment = branches.show(second[1], pair(made, made))
    assert [token.id for token in segment.tokens] == seq.answer == second[1].answer
    meter = seq.meter.models["large"]
    assert (meter.generated_tokens, meter.discarded_tokens) == (4, 8 - 4)
    assert meter.forwards == made.forwards
    assert made.cached == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beams", 0),
        ("samples", 99),
        ("samples", 17),
        ("sigma", math.nan),
        ("agreement", -0.1),
        ("separators", []),
        ("rollout_tokens", 0),
    ],
)
async def test_bad_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method("phi_decoding").parse({name: value})
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"method.params.{name}")
    with pytest.raises(TurnoutError, match="role"):
        await write(dead_end(), {"roller": "unknown"})
