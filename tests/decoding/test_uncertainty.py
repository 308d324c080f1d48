"""Estimators of uncertainty: values worked out by hand, their limits, and what is done with them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.doubt_heads import BottleneckHead
from decoding.entailment.asked import Asked
from decoding.entailment.base import PACKAGE as JUDGES
from decoding.entailment.base import EntailmentJudge, clusters_of, sizes_of
from decoding.entailment.final_answer import FinalAnswer
from decoding.fakes import ListText, TableModel, markov, pair
from decoding.model import MEASURES, ModelPool, Request
from decoding.sequence import Sequence
from decoding.thinking import Marker, Thinking
from decoding.uncertainty.base import Uncertainty, make_uncertainty
from decoding.uncertainty.semantic_entropy import entropy_of_clusters
from decoding.uncertainty.snne import neighbour_entropy
from training.doubt import best_split
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import FinishReason, SamplingParams

LN = math.log


# Semantic entropy (paper #113).


def test_semantic_entropies_by_hand() -> None:
    """Answers of .5, .3 and .2, of which the first two mean the same."""
    logprobs = [LN(0.5), LN(0.3), LN(0.2)]
    assert entropy_of_clusters([0, 0, 1], logprobs, "normalised") == pytest.approx(0.5004, abs=1e-4)
    assert entropy_of_clusters([0, 0, 1], logprobs, "original") == pytest.approx(-(LN(0.8) + LN(0.2)) / 2)
    shares = -(2 / 3 * LN(2 / 3) + 1 / 3 * LN(1 / 3))
    assert entropy_of_clusters([0, 0, 1], logprobs, "discrete") == pytest.approx(shares)
    for estimator in ("normalised", "discrete"):
        assert entropy_of_clusters([0, 0, 0], logprobs, estimator) == pytest.approx(0.0)
        assert entropy_of_clusters([0, 1, 2, 3], [-5.0] * 4, estimator) == pytest.approx(LN(4))


def test_merging_two_clusters_never_raises_the_entropy() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        logprobs = (-3 * torch.rand(6, generator=generator)).tolist()
        apart = entropy_of_clusters([0, 1, 2, 3, 0, 1], logprobs, "normalised")
        assert entropy_of_clusters([0, 0, 1, 2, 0, 0], logprobs, "normalised") <= apart + 1e-12


class OneWay(EntailmentJudge):
    """An answer implies those that are contained in it."""

    async def entails(self, group: AnswerSet, first: Candidate, second: Candidate) -> bool:
        self.asked = getattr(self, "asked", 0) + 1
        return second.text in first.text


async def test_answers_are_one_cluster_only_if_each_implies_the_other() -> None:
    texts = ["in Paris", "Paris", "in Paris", "Rome", "Paris", "Rome"]
    group = AnswerSet([Candidate(text, text, text) for text in texts])
    judge = OneWay()
    assert await clusters_of(judge, group) == [0, 1, 0, 2, 1, 2]
    # Equal texts are not judged, nor is the way back of a pair whose way there does not hold.
    assert judge.asked == 2 + 1 + 1
    assert sizes_of([0, 1, 0, 2]) == [2, 1, 1]
    finals = AnswerSet([Candidate(text, text, text[-1]) for text in ("a 1", "b 1", "2")])
    assert await clusters_of(FinalAnswer(), finals) == [0, 0, 1]


class Words(ListText):
    """A tokenizer of one token per character of a small alphabet."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [self.texts.index(char) for char in text.casefold() if char in self.texts]


CHARS = Words([*"abcyno?"])


async def test_a_model_is_asked_with_both_answers_after_the_prompt() -> None:
    """It says yes where the two characters before the last are equal."""
    fed = []

    def answers(tokens: list[int]) -> torch.Tensor:
        fed.append(CHARS.decode(tokens))
        logits = torch.zeros(7)
        logits[CHARS.texts.index("y" if tokens[-3] == tokens[-2] else "n")] = 5.0
        return logits

    model = TableModel("large", answers, 7)
    judge = Asked(Asked.Params(question="{first}{second}?"))
    models = pair(model, model, CHARS)
    judge.check(models)
    seq = Sequence([0, 1], SamplingParams(), 0)
    group = AnswerSet([Candidate(c, c, c) for c in "aab"], 0, seq, model, models)
    assert await clusters_of(judge, group) == [0, 0, 1]
    assert fed == ["abab?"]
    assert seq.meter.models["large"].forwards == 1
    assert not await judge.entails(group, group.answers[2], group.answers[0])
    assert fed[1:] == ["abba?"]
    assert list(model.cached) == []


async def test_answers_that_spell_a_place_are_put_in_as_they_are() -> None:
    fed, chars = [], Words([*"acdeno{}sy?"])

    def answers(tokens: list[int]) -> torch.Tensor:
        fed.append(chars.decode(tokens))
        return torch.zeros(11)

    model = TableModel("large", answers, 11)
    judge, models = Asked(Asked.Params(question="{first}?{second}?")), pair(model, model, chars)
    judge.check(models)
    group = AnswerSet([], 0, Sequence([0], SamplingParams(), 0), model, models)
    await judge.entails(group, Candidate("{second}", "", ""), Candidate("y", "", ""))
    assert fed[-1] == "a{second}?y?"


@pytest.mark.parametrize("question", ["Is it so?", "{first}", "{second} {second}"])
def test_a_question_without_both_answers_is_refused(question: str) -> None:
    with pytest.raises(TurnoutError, match=r"judge.question: must contain \{first\} and \{second\}"):
        PartChoice.of("asked", question=question).find(JUDGES, "judge")


# SNNE (paper #85).


def test_neighbour_entropies_by_hand() -> None:
    assert neighbour_entropy(torch.ones(3, 3)) == pytest.approx(-2.0986, abs=1e-4)
    assert neighbour_entropy(torch.eye(3)) == pytest.approx(-1.5514, abs=1e-4)
    assert neighbour_entropy(torch.eye(3), 0.5) == pytest.approx(-LN(math.exp(2) + 2))


def test_it_contains_discrete_semantic_entropy() -> None:
    clusters = torch.tensor([0, 0, 1, 2, 2, 2])
    similar = torch.where(clusters[:, None] == clusters, -LN(6), -math.inf)
    assert neighbour_entropy(similar) == pytest.approx(entropy_of_clusters(clusters.tolist(), [], "discrete"))


def test_the_order_of_samples_changes_nothing_and_weights_do() -> None:
    similar = torch.rand((5, 5), generator=torch.Generator().manual_seed(1))
    order = torch.tensor([3, 1, 4, 0, 2])
    logprobs = [-1.0, -2.0, -0.5, -3.0, -1.5]
    turned = [logprobs[place] for place in order.tolist()]
    assert neighbour_entropy(similar[order][:, order]) == pytest.approx(neighbour_entropy(similar))
    weighted = neighbour_entropy(similar, 1.0, logprobs)
    assert neighbour_entropy(similar[order][:, order], 1.0, turned) == pytest.approx(weighted)
    assert neighbour_entropy(similar, 1.0, [-1.0] * 5) == pytest.approx(neighbour_entropy(similar))
    assert weighted != pytest.approx(neighbour_entropy(similar))


# Labels of probes (paper #50).


def test_the_split_is_that_of_brute_force() -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (2, 5, 17):
        values = torch.rand(count, generator=generator).round(decimals=1).tolist()
        if len(set(values)) < 2:
            continue

        def error(g: float, values: list[float] = values) -> float:
            parts = [[v for v in values if v < g], [v for v in values if v >= g]]
            return sum(sum((v - sum(part) / len(part)) ** 2 for v in part) for part in parts if part)

        found = best_split(values)
        assert min(values) < found <= max(values)
        assert error(found) == pytest.approx(min(error(g) for g in values if g > min(values)))
    with pytest.raises(ValueError, match="all values are the same"):
        best_split([1.0, 1.0])


# The discrete key-value bottleneck (paper #72).


def two_groups() -> tuple[torch.Tensor, torch.Tensor]:
    noise = 0.3 * torch.randn((2, 40, 12), generator=torch.Generator().manual_seed(5))
    centres = torch.tensor([1.0, -1.0])[:, None, None] * torch.ones(12)
    return centres[0] + noise[0], centres[1] + noise[1]


def test_what_was_learnt_stays_while_other_classes_are_learnt() -> None:
    first, second = two_groups()
    head = BottleneckHead(12, 2, 16, 16, 4)
    head.place_keys(torch.cat([first, second]))
    assert head.usage(torch.cat([first, second])) > 0.2
    keys = head.keys.clone()
    linear, rate = torch.zeros(12, 2), 0.5
    zeros, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for states, label in ((first, zeros), (second, ones)):
        before = head.values.detach().clone()
        fetched = torch.zeros_like(before, dtype=torch.bool)
        for state in states[:30]:
            held = head.values.detach().clone()
            head.learn(state[None], label)
            changed = (head.values.detach() != held).any(-1)
            assert int(changed.sum()) <= 16  # one value of each codebook
            fetched[torch.arange(16), head.codes(state[None])[0]] = True
            logits = state @ linear
            linear -= rate * torch.outer(state, logits.softmax(0) - torch.nn.functional.one_hot(label[0], 2))
        assert torch.equal(head.values.detach()[~fetched], before[~fetched])
    assert torch.equal(head.keys, keys)
    kept = (head(first[30:]).argmax(1) == 0).float().mean()
    forgotten = ((first[30:] @ linear).argmax(1) == 0).float().mean()
    assert kept == 1.0
    assert (head(second[30:]).argmax(1) == 1).all()
    assert kept >= forgotten


def test_a_state_is_read_as_a_probability() -> None:
    first, second = two_groups()
    head = BottleneckHead(12, 2, 16, 16, 4)
    head.place_keys(torch.cat([first, second]))
    assert head.probability(first[0]) == pytest.approx(0.5)
    for _ in range(3):
        head.learn(torch.cat([first, second]), torch.tensor([0] * 40 + [1] * 40), rate=20.0)
    assert head.probability(first[0]) < 0.5 < head.probability(second[0])


# What is done with doubt.

END = 3


def opinionated(share: float, name: str = "large") -> TableModel:
    """After the prompt (0) says a (0) with this chance, else b (1), then ends."""
    table = torch.full((7, 7), 1e-9)
    table[:, END] = 1.0
    table[2] = torch.tensor([share, 1.0 - share, *[1e-9] * 5])
    return TableModel(name, markov(table / table.sum(-1, keepdim=True)), 7, num_parameters=10)


def asked(seed: int = 0, **sampling: Any) -> Request:
    return Request("r", Sequence([2], SamplingParams(**{"max_tokens": 6, **sampling}), seed, (END,)))


async def run(method: str, models: ModelPool, request: Request, **params: Any) -> Request:
    info = get_method(method)
    async for _ in info.run(request, models, info.parse(params)):
        pass
    return request


ENTROPY = {"name": "semantic_entropy", "samples": 20, "judge": "final_answer", "estimator": "discrete"}


async def test_high_doubt_is_said_instead_of_an_answer() -> None:
    sure, unsure = opinionated(1.0), opinionated(0.5)
    for model, doubt in ((sure, 0.0), (unsure, LN(2))):
        models = pair(model, model, CHARS)
        told = await run("abstain", models, asked(), uncertainty=ENTROPY)
        plain = await run("plain", models, asked())
        assert told.sequence.tokens == plain.sequence.tokens
        assert told.extra[MEASURES]["semantic_entropy"] == pytest.approx(doubt, abs=0.2)
        assert told.sequence.meter.models["large"].discarded_tokens == 20 * 2
        held = await run("abstain", models, asked(), uncertainty=ENTROPY, abstain_above=0.3, text="no")
        says = CHARS.decode(held.sequence.answer) == "no"
        assert says is (model is unsure)
        assert held.sequence.finish_reason is FinishReason.STOP
        assert held.extra[MEASURES]["abstained"] == float(says)
        found = held.extra[MEASURES]["semantic_entropy"]
        said = f"abstained: semantic_entropy is {found:.4g}, above abstain_above (0.3)"
        assert held.notes == [said] * says
        assert held.sequence.meter.models["large"].generated_tokens == (0 if says else 2)
        assert set(model.cached) <= {told.sequence, plain.sequence, held.sequence}


async def test_a_silent_abstention_has_no_token() -> None:
    model = opinionated(0.5)
    held = await run("abstain", pair(model, model), asked(), uncertainty=ENTROPY, abstain_above=0.1, text="")
    assert (held.sequence.answer, held.sequence.finish_reason) == ([], FinishReason.STOP)


async def test_samples_of_a_greedy_request_are_drawn_all_the_same() -> None:
    model = opinionated(0.6)
    told = await run("abstain", pair(model, model, CHARS), asked(temperature=0.0), uncertainty=ENTROPY)
    assert told.extra[MEASURES]["semantic_clusters"] == 2.0
    assert told.sequence.answer == [0, END]
    assert told.sequence.sampling.greedy


async def test_an_abstention_is_no_thinking() -> None:
    """Where the prompt has begun the thinking, its end stands before the text."""
    model = opinionated(0.5)
    for start, wanted in (("inside", "cano"), ("open", "no")):
        request = asked()
        request.sequence.thinking = Thinking(Marker("<", ()), Marker(">", (2,)), start=start, gap=(0,))  # type: ignore[arg-type]
        params = {"uncertainty": {"name": "snne", "samples": 2}, "abstain_above": -1000.0, "text": "no"}
        held = await run("abstain", pair(model, model, CHARS), request, **params)
        assert CHARS.decode(held.sequence.answer) == wanted


class Broken(Uncertainty):
    """Fails, or has no number."""

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        if group.seed == 1:
            raise RuntimeError("planted")
        return math.inf if group.seed else math.nan


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_an_estimator_that_fails_leaves_the_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opinionated(0.5)
    models = pair(model, opinionated(0.0), CHARS)
    plain = await run("plain", models, asked(seed), model="small")
    for method, params in (("abstain", {"abstain_above": -1.0, "model": "small"}), ("cascade", {"threshold": 1000.0})):
        for module in ("decoding.methods.abstain", "decoding.methods.cascade"):
            monkeypatch.setattr(f"{module}.make_uncertainty", lambda choice: Broken())
        inner = {"inner": {"name": "plain", "model": "small"}} if method == "abstain" else {}
        told = await run(method, models, asked(seed), uncertainty="snne", **params, **inner)
        assert told.sequence.answer == plain.sequence.answer
        assert "was not measured" in told.notes[-1]
        assert MEASURES not in told.extra


@pytest.mark.parametrize(("share", "writer"), [(1.0, "small"), (0.5, "large")])
async def test_the_large_model_answers_where_doubt_is_high(share: float, writer: str) -> None:
    small, large = opinionated(share, "small"), opinionated(0.0, "large")
    models = pair(small, large, CHARS)
    told = await run("cascade", models, asked(), uncertainty=ENTROPY, threshold=-0.3)
    assert {token.source for token in told.sequence.generated} == {writer}
    assert told.extra[MEASURES]["semantic_entropy"] == pytest.approx(0.0 if writer == "small" else LN(2), abs=0.2)
    for threshold, always in ((1000.0, "large"), (-1000.0, "small")):
        told = await run("cascade", models, asked(), uncertainty=ENTROPY, threshold=threshold)
        assert {token.source for token in told.sequence.generated} == {always}


async def test_cancelling_frees_every_sample() -> None:
    model = TableModel("large", lambda tokens: torch.zeros(7), 7)
    request = asked(max_tokens=10_000)
    request.sequence._ends = frozenset()
    task = asyncio.create_task(
        run("abstain", pair(model, model, CHARS), request, uncertainty={**ENTROPY, "samples": 4})
    )
    while len(model.cached) < 5:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(model.cached) <= {request.sequence}


@pytest.mark.parametrize(
    ("method", "params", "said"),
    [
        ("abstain", {"uncertainty": "none"}, "method.params.uncertainty: 'none' is not known; available: "),
        ("abstain", {"uncertainty": {"name": "snne", "tau": 0}}, "method.params.uncertainty.tau: "),
        ("abstain", {"uncertainty": {"name": "snne", "samples": 1}}, "method.params.uncertainty.samples: "),
        ("abstain", {"inner": "none"}, "method.params.inner: 'none' is not known"),
        ("cascade", {"uncertainty": "none"}, "method.params.uncertainty: 'none' is not known"),
        ("cascade", {"threshold": 1.5}, "method.params.threshold: must be at most 1 without `uncertainty`"),
    ],
)
def test_refusals(method: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method(method).parse(params)
    assert str(caught.value.message).startswith(said) or said in str(caught.value)


async def test_a_judge_that_is_not_there_is_refused_before_the_first_token() -> None:
    model = opinionated(0.5)
    with pytest.raises(TurnoutError, match=r"uncertainty.judge: 'none' is not known"):
        await run("abstain", pair(model, model, CHARS), asked(), uncertainty={**ENTROPY, "judge": "none"})
    part = make_uncertainty(PartChoice.of("semantic_entropy", judge={"name": "asked", "model": "judge"}))
    with pytest.raises(TurnoutError, match="no model has the role 'judge'"):
        part.check(pair(model, model, CHARS))
