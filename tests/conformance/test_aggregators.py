"""Every aggregator: it shows one of the answers drawn, of any order the same, and its failure costs no answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from decoding.aggregators.base import Aggregator, AnswerSet, Candidate, ValuedAggregator, make_aggregator
from decoding.fakes import ListText
from decoding.methods.best_of import choose
from decoding.model import ModelPool, Request, StopCondition
from decoding.noise import derive_seed
from decoding.recorder import Watch
from decoding.sequence import Sequence
from tests.conformance.parts import ALL_AGGREGATORS, VOCAB, example_of
from tests.conformance.test_identity import pool as pool
from tests.conformance.test_identity import prompts
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONGEST, COUNT = 8, 4
# A draw, not a best answer: what is shown depends on where an answer stands.
DRAWS = {"daemon"}
# It writes texts of its own to choose by, which are discarded.
WRITES = {"sift"}


class Words(ListText):
    """As the pool's, with an encoding: words by their length."""

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        return [5 + len(word) % (VOCAB - 5) for word in text.split()]


@pytest.fixture(autouse=True)
def _encodes(pool: ModelPool) -> None:
    pool.tokenizer = Words([str(token) for token in range(VOCAB)])


def choice(name: str) -> PartChoice:
    return PartChoice.of(name, **example_of(ALL_AGGREGATORS[name]).params)


def sequence(seed: int) -> Sequence:
    sampling = SamplingParams(max_tokens=LONGEST, temperature=1.0)
    return Sequence(prompts(4)[3], sampling, seed, eos_ids=tuple(range(1, 5)))


async def best_of(pool: ModelPool, rerank: Any, seed: int, k: int = COUNT) -> Request:
    info, request = get_method("best_of"), Request("r", sequence(seed))
    async for _ in info.run(request, pool, info.parse({"k": k, "rerank": rerank, "mark": ""})):
        pass
    pool.large.release(request.sequence)
    assert all(model.busy().sequences == 0 for model in pool.models.values())
    return request


async def drawn(pool: ModelPool, seed: int) -> list[list[int]]:
    made = [sequence(derive_seed(seed, index)) for index in range(COUNT)]
    await asyncio.gather(*(pool.large.decode(each) for each in made))
    for each in made:
        pool.large.release(each)
    return [each.answer for each in made]


async def group_of(pool: ModelPool, part: Aggregator, seed: int) -> AnswerSet:
    """Answers with what the part's rules saw, as `best_of` gives them."""
    seq = sequence(seed)
    forks = [seq.fork(derive_seed(seed, index)) for index in range(COUNT)]
    rules = [part.rule() for _ in forks]
    for fork, rule in zip(forks, rules, strict=True):
        await pool.large.decode(fork, StopCondition((Watch(),) if rule is None else (Watch(), rule)))
        pool.large.release(fork)
    answers = [Candidate.of(fork, 0, pool, "", rule) for fork, rule in zip(forks, rules, strict=True)]
    return AnswerSet(answers, seed, seq, pool.large, pool)


@pytest.mark.parametrize("name", ALL_AGGREGATORS)
async def test_one_of_the_answers_drawn_is_shown_and_all_are_counted(pool: ModelPool, name: str) -> None:
    request = await best_of(pool, choice(name), 3)
    answers = await drawn(pool, 3)
    assert request.sequence.answer in answers
    assert not [note for note in request.notes if "failed" in note]
    meter = request.sequence.meter.models["large"]
    assert meter.generated_tokens == len(request.sequence.answer)
    written = sum(map(len, answers))
    if make_aggregator(choice(name)).stops_early:
        assert meter.generated_tokens + meter.discarded_tokens <= written
    else:
        every = meter.generated_tokens + meter.discarded_tokens
        assert every > written if name in WRITES else every == written
    assert (await best_of(pool, choice(name), 3)).sequence.answer == request.sequence.answer


@pytest.mark.parametrize("name", ALL_AGGREGATORS)
async def test_one_answer_is_plain_decoding(pool: ModelPool, name: str) -> None:
    request = await best_of(pool, choice(name), 5, k=1)
    plain = sequence(5)
    await pool.large.decode(plain)
    pool.large.release(plain)
    assert request.sequence.answer == plain.answer
    assert request.sequence.meter.models["large"].discarded_tokens == 0


@pytest.mark.parametrize("name", ALL_AGGREGATORS)
async def test_the_order_of_the_answers_changes_nothing(pool: ModelPool, name: str) -> None:
    part = make_aggregator(choice(name))
    part.check(pool)
    group = await group_of(pool, part, 7)
    turned = replace(group, answers=list(reversed(group.answers)), measures={}, notes=[])
    if isinstance(part, ValuedAggregator):
        assert await part.values(group) == pytest.approx(list(reversed(await part.values(turned))), abs=1e-5)
    place = await part.choose(group)
    assert part.score, "what decides is said in words"
    assert group.scores is not None
    assert len(group.scores) == COUNT
    rivals = range(COUNT)
    if group.votes is not None:
        votes: Counter[str] = Counter()
        for each, weight in zip(group.answers, group.votes, strict=True):
            votes[each.final] += weight
        assert votes[group.answers[place].final] == max(votes[each.final] for each in group.answers if each.final)
    elif isinstance(part, ValuedAggregator):
        assert group.scores[place] == max(group.scores[each] for each in rivals)
    if name not in DRAWS:
        chosen, other = group.answers[await part.choose(group)], turned.answers[await part.choose(turned)]
        assert chosen.ids == other.ids
    for model in pool.models.values():
        model.release(group.context[0])
        assert model.busy().sequences == 0


@pytest.mark.parametrize("name", ALL_AGGREGATORS)
async def test_texts_are_enough_where_it_says_so(name: str) -> None:
    part = make_aggregator(choice(name))
    texts = ["Answer: 1", "a step\nAnswer: 1", "Answer: 2"]
    answers = [Candidate(each, each, each[-1], (), (-1.0 - place,)) for place, each in enumerate(texts)]
    group = AnswerSet(answers)
    if part.over_text:
        assert await part.choose(group) in range(3)
        assert not group.notes


@pytest.mark.parametrize("name", ALL_AGGREGATORS)
async def test_a_failure_shows_the_likeliest_answer(
    pool: ModelPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Any, group: AnswerSet) -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(ALL_AGGREGATORS[name], "choose", fails)
    part = make_aggregator(choice(name))
    group = await group_of(pool, part, 9)
    likely = group.likelihoods
    assert await choose(part, group) == likely.index(max(likely))
    assert group.notes == [f"rerank '{name}' failed (planted); the likeliest answer is shown"]
