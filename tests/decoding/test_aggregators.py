"""Aggregators: hand-computed choices, and what each becomes at the limits of its parameters."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from decoding.aggregators.base import AnswerSet, Candidate, best, make_aggregator
from decoding.aggregators.complexity import num_steps
from decoding.aggregators.daemon import draw
from decoding.aggregators.self_certainty import CertaintyRule, borda
from decoding.alignment import MOST_INPUTS, Alignment, kendall, pearson, recommended, spearman
from decoding.fakes import ListText, TableModel, markov, pair
from decoding.logits import certainty
from decoding.metric_matching import diversity, fit_coefficients, metrics_of, seq_rep, tilt, token_rep
from decoding.model import ReadSpec, Request, StopCondition
from decoding.noise import derive_seed
from decoding.packed_reading import branches, packs
from decoding.sequence import Sequence
from decoding.similarity import (
    MOST_CHARACTERS,
    chrf,
    common_subsequence,
    exact,
    rouge_l,
    similarity_matrix,
    token_f1,
)
from decoding.state import twin
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams


def answers(*texts: str, likely: tuple[float, ...] = (), certain: tuple[float, ...] = ()) -> AnswerSet:
    """Answers whose final answer is their last word."""
    made = []
    for place, text in enumerate(texts):
        rule = CertaintyRule()
        rule.total, rule.count = (certain[place] if certain else 0.0), 1
        logprobs = (likely[place] if likely else -1.0,)
        made.append(Candidate(text, text, (text.split() or [""])[-1], tuple(map(ord, text)), logprobs, rule))
    return AnswerSet(made)


async def chosen(group: AnswerSet, name: str, **params: Any) -> int:
    return await make_aggregator(PartChoice.of(name, **params)).choose(group)


# Self-certainty (paper #215).


def test_certainty_is_the_divergence_of_the_uniform_law() -> None:
    rows = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [1.0, 0.0, 0.0, 0.0]]).log()
    found = certainty(rows).tolist()
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[1] == pytest.approx(0.4298, abs=1e-4)
    assert found[2] == pytest.approx(75.0 - math.log(4))  # three impossible tokens of e^-100


async def test_the_certainty_of_an_answer_is_read_where_it_is_written() -> None:
    """Of raw laws: temperature and truncation change what is drawn, and no certainty."""
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.2, 0.2, 0.6], [0.3, 0.3, 0.4]])
    model = TableModel("large", markov(probs), 3)
    for sampling in ({"temperature": 1.0}, {"temperature": 0.3, "top_k": 2}, {"temperature": 0.0}):
        seq, rule = Sequence([0], SamplingParams(max_tokens=9, **sampling), 1), CertaintyRule()
        await model.decode(seq, StopCondition((rule,)))
        rows = [-probs[token].log().mean() - math.log(3) for token in seq.tokens[:-1]]
        assert rule.count == 9
        assert rule.mean == pytest.approx(float(torch.stack(rows).mean()), abs=1e-5)
        assert twin(rule).mean == rule.mean
    [row] = await model.extend(Sequence([0], SamplingParams(max_tokens=1), 0), want=ReadSpec(draw=None))
    assert row.certainty is None


@pytest.mark.parametrize(
    ("exponent", "shown"),
    [
        (0.0, 1),  # a majority vote: b has three of five; the most certain of them is shown
        (1.0, 1),  # a: 5; b: 4 + 2 + 1 = 7; c: 3
        (2.0, 0),  # a: 25; b: 16 + 4 + 1 = 21; c: 9
        (100.0, 0),
    ],
)
async def test_borda_votes(exponent: float, shown: int) -> None:
    group = answers("x a", "x b", "y b", "x c", "z b", certain=(5.0, 4.0, 1.0, 3.0, 0.5))
    assert await chosen(group, "self_certainty", exponent=exponent) == shown
    assert group.measures["self_certainty"] == (5.0, 4.0)[shown]
    assert await chosen(group, "self_certainty", vote=False) == 0


def test_an_answer_that_says_nothing_has_no_vote_unless_all_say_nothing() -> None:
    assert borda([3.0, 2.0, 1.0], ["", "", "a"], 1.0) == 2
    assert borda([1.0, 2.0], ["", ""], 1.0) == 1


# Complexity vote (paper #120).

CHAINS = ["1\n2\n3\n4\nA", "1\n2\n3\nA", "1\nB", "1\nB", "2\nB"]


@pytest.mark.parametrize(("keep", "final"), [(1, "A"), (2, "A"), (5, "B"), (64, "B"), (None, "A")])
async def test_only_the_most_complex_chains_vote(keep: int | None, final: str) -> None:
    """Steps 5, 4, 2, 2, 2 with answers A, A, B, B, B; three quarters of five are four, where the two ties go to A."""
    group = answers(*CHAINS, likely=(-1.0, -1.5, -2.0, -2.0, -2.0))
    assert group.answers[await chosen(group, "complexity", keep=keep)].final == final
    if keep == 5:
        assert await chosen(group, "complexity", keep=5) == await chosen(group, "majority")


def test_steps_are_lines_or_sentences_that_say_something() -> None:
    assert num_steps("a. b\n\n \nc") == 2
    assert num_steps("a. b\n\n \nc. D! e", "sentence") == 5
    assert num_steps("3.5 is one") == num_steps("3.5 is one", "sentence") == 1


# First finish (paper #155), and answers that are cancelled.


def chance_of_end(share: float, name: str = "large") -> TableModel:
    """Token 0 again and again, and with this chance the end, 1."""
    return TableModel(name, markov(torch.tensor([[1 - share, share], [0.5, 0.5]])), 2)


async def test_the_first_to_end_is_shown_and_the_others_are_freed_within_a_step() -> None:
    lengths = set()
    for seed in range(12):
        model, seq = chance_of_end(0.05), Sequence([0], SamplingParams(max_tokens=400), seed, (1,))
        alone = []
        info = get_method("best_of")
        params = info.parse({"k": 8, "rerank": "first_finish"})
        models = pair(model, model, ListText(["a", ""]))
        held = [len(model.cached) async for _ in info.run(Request("r", seq), models, params)]
        for index in range(8):
            other = Sequence([0], SamplingParams(max_tokens=400), derive_seed(seed, index), (1,))
            await model.decode(other)
            model.release(other)
            alone.append(len(other.generated))
        meter = seq.meter.models["large"]
        assert len(seq.generated) == min(alone)
        assert meter.generated_tokens == min(alone)
        # Seven others, at most as many steps further as turns of the event loop pass until they are cancelled.
        assert 7 * (min(alone) - 1) <= meter.discarded_tokens <= 7 * (min(alone) + 2)
        assert held == [1]
        lengths.add(min(alone))
    assert len(lengths) > 3


async def test_answers_of_one_step_are_told_apart_by_likelihood() -> None:
    assert await chosen(answers("abc", "ab", "xy", likely=(-0.1, -2.0, -1.0)), "first_finish") == 2


async def test_a_vote_that_is_decided_ends_the_answers_still_being_written() -> None:
    """Two short answers of three agree; the third would take 300 tokens."""
    part = make_aggregator(PartChoice.of("majority", early=True))
    ended = answers("a", "a", "b").answers
    assert part.stops_early
    assert part.decided(ended[:2], 1)
    assert not part.decided(ended[:2], 2)
    assert not part.decided(ended[1:], 1)
    assert not part.decided([Candidate("", "", "")] * 3, 1)  # says nothing: no vote
    assert not make_aggregator(PartChoice.of("majority")).stops_early


# Utilities and minimum Bayes risk (paper #57).


def test_chrf_is_that_of_sacrebleu() -> None:
    """Worked by hand: "ab c" and "abd". n=1: 2 of 3 and 2 of 3; n=2: 1 of 2 and 1 of 2; n=3: 0 of 1 and 0 of 1."""
    mean = (2 / 3 + 1 / 2 + 0) / 3
    assert chrf("ab c", "abd") == pytest.approx(mean)  # precision = recall, so F is both
    # "a" and "ab": n=1 alone counts, precision 1, recall 1/2: F2 = 5 * 0.5 / (4 + 0.5).
    assert chrf("a", "ab") == pytest.approx(2.5 / 4.5)
    assert chrf("ab", "a") == pytest.approx(5 * 0.5 / (4 * 0.5 + 1.0))
    assert chrf("the cat sat", "the cat sat") == pytest.approx(1.0)
    assert chrf("abc", "xyz") == chrf("", "a") == chrf("", "") == 0.0


def test_similarities_of_words() -> None:
    assert token_f1("The cat", "cat sat down") == pytest.approx(2 * 1 / 5)
    assert rouge_l("a b c d", "a c x d") == pytest.approx(2 * 3 / 8)
    assert rouge_l("b a", "a b") == pytest.approx(0.5)
    assert token_f1("", " ") == rouge_l("", "") == 1.0
    assert similarity_matrix(["a", "b", "a"], ["a"], "exact") == [[1.0], [0.0], [1.0]]
    assert exact("a", "A") == 0.0


def counted_chrf(text: str, reference: str) -> float:
    """As the definition reads, with the n-grams of one pair."""
    mine, theirs = "".join(text.split()), "".join(reference.split())
    shares = []
    for n in range(1, 7):
        found, wanted = (Counter(each[at : at + n] for at in range(len(each) - n + 1)) for each in (mine, theirs))
        if found and wanted:
            common = (found & wanted).total()
            shares.append((common / found.total(), common / wanted.total()))
    precision, recall = (sum(column) / len(shares) for column in zip(*shares, strict=True)) if shares else (0.0, 0.0)
    return 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


def test_all_pairs_at_once_are_each_pair_alone() -> None:
    rng = random.Random(2)
    texts = ["".join(rng.choice("ab c\u00e9\U0001f600\ud800") for _ in range(rng.randrange(25))) for _ in range(25)]
    for kind, one in (("chrf", counted_chrf), ("token_f1", token_f1), ("rouge_l", rouge_l)):
        matrix = similarity_matrix(texts, texts[:9], kind)  # type: ignore[arg-type]
        for text, row in zip(texts, matrix, strict=True):
            assert row == pytest.approx([one(text, reference) for reference in texts[:9]])
        assert similarity_matrix([], [], kind) == []  # type: ignore[arg-type]


def test_common_subsequences_are_those_of_the_table() -> None:
    rng = random.Random(3)
    for _ in range(60):
        first, second = (rng.choices("abcd", k=rng.randrange(30)) for _ in range(2))
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
        assert common_subsequence(first, second) == table[-1][-1]


@pytest.mark.parametrize("kind", ["chrf", "token_f1", "rouge_l"])
def test_of_long_texts_the_ends_are_compared(kind: Any) -> None:
    """All that one request can ask for is 64 texts of this size with each other."""
    end = "the end is the same " * (MOST_CHARACTERS // 20 + 1)
    assert similarity_matrix(["a " * 50_000 + end], ["b c " * 90_000 + end], kind) == [[pytest.approx(1.0)]]


async def test_minimum_bayes_risk() -> None:
    group = answers("x a", "y a", "z b", likely=(-3.0, -2.0, -1.0))
    assert await chosen(group, "mbr", utility="exact") == await chosen(group, "majority") == 1
    assert group.measures["expected_utility"] == pytest.approx(2 / 3)
    texts = answers("the cat sat", "the cat sat down", "the cat", "dogs", likely=(-1.0, -1.0, -1.0, -0.1))
    words = [each.text for each in texts.answers]
    matrix = similarity_matrix(words, words, "token_f1")
    rows = [sum(row) / 4 for row in matrix]
    assert await chosen(texts, "mbr", utility="token_f1") == rows.index(max(rows)) == 0
    assert await chosen(answers("a"), "mbr") == 0


async def test_two_stages_with_all_answers_kept_are_one() -> None:
    texts = answers("the cat sat", "the cat sat down", "the cat", "dogs", likely=(-1.0, -2.0, -3.0, -0.1))
    first = PartChoice.of("logprob")
    one = await chosen(texts, "mbr")
    assert await chosen(texts, "mbr", first=first, keep=4) == await chosen(texts, "mbr", first=first, keep=64) == one
    assert await chosen(texts, "mbr", first=first, keep=1) == 3
    # Of "the cat sat" and "dogs" alone, each is as far from the other: the likelier one.
    words = {"utility": "token_f1", "first": first, "keep": 2}
    assert await chosen(texts, "mbr", **words, support="kept") == 3
    assert await chosen(texts, "mbr", **words) == 0


async def test_a_weighted_sum_of_values() -> None:
    group = answers("a b", "a c", "a b", likely=(-2.0, -0.5, -1.0), certain=(9.0, 1.0, 2.0))
    assert await chosen(group, "nbest") == await chosen(group, "logprob") == 1
    terms = [{"part": "logprob", "weight": 1.0}, {"part": "self_certainty", "weight": 0.5}]
    part = make_aggregator(PartChoice.of("nbest", terms=terms))
    assert await part.values(group) == pytest.approx([2.5, 0.0, 0.0])  # type: ignore[attr-defined]
    assert isinstance(part.rule(), CertaintyRule)
    assert not part.over_text
    with pytest.raises(TurnoutError, match=r"method.params.rerank.terms.1.part: 'majority' votes"):
        make_aggregator(PartChoice.of("nbest", terms=[{"part": "mbr"}, {"part": "majority"}]))


# Daemon (paper #25).


def test_coefficients_of_two_sequences() -> None:
    values, target = torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    assert float(fit_coefficients(values, target)) == pytest.approx(math.log(3.0), abs=1e-6)
    with pytest.raises(ValueError, match="not between"):
        fit_coefficients(values, torch.tensor([1.5], dtype=torch.float64))


def test_all_metrics_meet_their_targets_together() -> None:
    """Correlated metrics of very different sizes: solved one by one, the first would leave its target again."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn((4000, 1), generator=generator, dtype=torch.float64)
    values = torch.cat([base, 100 * base, base], 1) + torch.randn((4000, 3), generator=generator, dtype=torch.float64)
    values = values * torch.tensor([1.0, 1.0, 0.01]) + torch.tensor([5.0, 300.0, 1.0])
    targets = torch.tensor([5.3, 310.0, 1.004], dtype=torch.float64)
    fresh, fitted = values[2000:], fit_coefficients(values[:2000], targets)
    assert torch.allclose(tilt(values[:2000], fitted) @ values[:2000], targets, rtol=1e-4)
    assert torch.allclose(tilt(fresh, fitted) @ fresh, targets, rtol=0.02)


def test_metrics_by_hand() -> None:
    ids = [1, 2, 1, 2, 1, 2]
    assert seq_rep(ids, 4) == pytest.approx(1 - 2 / 3)
    assert seq_rep([1, 2], 4) == 0.0
    assert token_rep(ids, 2) == pytest.approx(4 / 6)
    assert token_rep(ids, 1) == token_rep([], 3) == 0.0
    assert diversity(ids) == pytest.approx((2 / 5) * (2 / 4) * (2 / 3))
    assert metrics_of(ids, [-1.0, -2.0], 0.5, ["information", "coherence", "length"]) == [1.5, 0.5, 6.0]


@pytest.mark.parametrize("mu", [0.0, 1.0])
async def test_one_answer_is_drawn_by_the_tilted_law(mu: float) -> None:
    """Lengths 1 and 3, as often: drawn 1 : e^(-2 mu)."""
    model = TableModel("large", markov(torch.full((2, 2), 0.5)), 2)
    shown: Counter[int] = Counter()
    part = make_aggregator(PartChoice.of("daemon", coefficients={"length": mu}))
    models, seq = pair(model, model), Sequence([0], SamplingParams(), 0)
    part.check(models)
    for seed in range(1200):
        group = answers("a", "abc")
        group.seed, group.seq, group.model, group.models = seed, seq, model, models
        shown[await part.choose(group)] += 1
    wanted = 1 / (1 + math.exp(-2 * mu))
    assert shown[0] / 1200 == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 1200))


def test_a_point_falls_among_weights() -> None:
    weights = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    assert [draw(weights, point) for point in (0.0, 0.19, 0.2, 0.999999999)] == [0, 0, 2, 2]


# Likelihood and utility (paper #26).


def test_correlations_by_hand() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]
    assert pearson(x, x) == spearman(x, x) == kendall(x, x) == pytest.approx(1.0)
    assert spearman(x, y) == pytest.approx(0.8)
    assert kendall(x, y) == pytest.approx(4 / 6)
    assert kendall([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert spearman([1.0, 1.0, 2.0], [5.0, 5.0, 9.0]) == pytest.approx(1.0)
    assert pearson([1.0, 1.0], [1.0, 2.0]) == kendall([1.0, 1.0], [1.0, 2.0]) == 0.0


@pytest.mark.parametrize(("sign", "advice"), [(1.0, "likelihood"), (-1.0, "value")])
def test_the_recommended_decoder(sign: float, advice: str) -> None:
    kept = Alignment()
    for seed in range(5):
        likely = torch.randn(6, generator=torch.Generator().manual_seed(seed)).tolist()
        kept.add(likely, [sign * each for each in likely])
    assert kept.within == pytest.approx(sign)
    assert kept.across == pytest.approx(sign)
    assert recommended(kept.within) == advice
    assert recommended(0.2) == "rerank"
    for _ in range(MOST_INPUTS):
        kept.add([1.0, 2.0], [3.0, 1.0])
    assert len(kept.inputs) == len(kept.taus) == MOST_INPUTS
    assert kept.within == -1.0
    assert kept.nbytes > 0


async def test_the_weight_of_the_value() -> None:
    model = chance_of_end(0.5)
    group = answers("a b", "a c", "a b", likely=(-2.0, -0.5, -1.0), certain=(9.0, 1.0, 2.0))
    group.seq, group.model, group.models = Sequence([0], SamplingParams(), 0), model, pair(model, model)
    value = PartChoice.of("self_certainty")
    shown = [await chosen(group, "likelihood_utility", value=value, weight=w) for w in (0.0, 1.0)]
    assert shown == [1, 0] == [best(group.likelihoods), 0]
    assert group.measures["likelihood_utility_tau"] == pytest.approx(-1.0)
    assert "recommended: value" in group.notes[-1]
    assert "over 2 requests" in group.notes[-1]


# Packed reading (paper #160).


def test_answers_share_forwards_as_they_fit() -> None:
    assert packs([3, 5, 2, 4], 6) == [[1], [2, 3], [0]]
    assert packs([9, 1], 6) == [[0], [1]]
    tree = branches([(1, 2), (1, 3, 4)], "m")
    assert tree.tokens == (1, 2, 1, 3, 4)
    assert tree.parents == (-1, 0, -1, 2, 3)
