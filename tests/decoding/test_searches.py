"""Searches but for the beam, each against its definition, worked out by hand or by enumeration."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from decoding.fakes import TableModel
from decoding.search._surprisals import Regulariser, Surprisals
from decoding.search.base import Selection
from decoding.search.best_first import BestFirstSearch
from decoding.search.constrained import Phrases, allocate
from tests.decoding.test_search import END, VOCAB, answers, every_answer, logprob, model
from turnout.errors import TurnoutError


def surprisals(made: TableModel, answer: list[int]) -> tuple[list[float], list[float]]:
    """Of an answer's tokens, and the least at each place."""
    rows = [-made.next_logits([1, 2, *answer[:place]]).log_softmax(-1) for place in range(len(answer))]
    return [float(row[token]) for row, token in zip(rows, answer, strict=True)], [float(row.min()) for row in rows]


def regularised(made: TableModel, answer: list[int], regulariser: str, strength: float) -> float:
    """The objective of paper #82, from its definition."""
    own, least = surprisals(made, answer)
    mean = sum(own) / len(own)
    values = {
        "variance": sum((each - mean) ** 2 for each in own) / len(own),
        "local": sum((b - a) ** 2 for a, b in pairwise(own)) / max(len(own) - 1, 1),
        "max": max(own),
        "square": sum(each**2 for each in own),
        "greedy": sum((each - low) ** 2 for each, low in zip(own, least, strict=True)),
    }
    return -sum(own) - strength * values[regulariser]


# Diverse beam search


async def test_one_group_is_a_beam_and_without_a_penalty_all_groups_are_alike() -> None:
    made = model(11)
    beam, _, _ = await answers(made, n=3, width=4)
    assert (await answers(made, {"name": "diverse", "groups": 1, "diversity": 2.0}, n=3, width=4))[0] == beam
    [best], _, _ = await answers(made, width=2)
    alike, _, _ = await answers(made, {"name": "diverse", "groups": 2, "diversity": 0.0}, n=4, width=4)
    assert alike[0] == alike[1] == best
    assert alike[2] == alike[3]


async def test_a_great_penalty_gives_each_group_another_first_token() -> None:
    asked = {"name": "diverse", "diversity": 1e3}
    found, _, _ = await answers(model(12), asked, n=4, width=4, max_tokens=3, ignore_eos=True)
    assert len({each[0] for each in found}) == 4


@pytest.mark.parametrize("seed", range(4))
async def test_groups_follow_the_definition_step_by_step(seed: int) -> None:
    made, width, groups, strength = model(seed + 20), 6, 3, 0.7
    held: list[list[tuple[list[int], float]]] = [[([], 0.0)] for _ in range(groups)]
    for _ in range(4):
        taken = Counter[int]()
        for group, beams in enumerate(held):
            longer = [
                ([*answer, token], logp + float(row[token]))
                for answer, logp in beams
                for row in [made.next_logits([1, 2, *answer]).log_softmax(-1)]
                for token in range(VOCAB)
            ]
            longer.sort(key=lambda each: -(each[1] - strength * taken[each[0][-1]]))
            held[group] = longer[: width // groups]
            taken.update(answer[-1] for answer, _ in held[group])
    wanted = sorted((each for beams in held for each in beams), key=lambda each: -each[1])
    asked = {"name": "diverse", "groups": groups, "diversity": strength}
    found, _, _ = await answers(made, asked, n=6, width=width, max_tokens=4, ignore_eos=True)
    assert found == [answer for answer, _ in wanted]


async def test_groups_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(TurnoutError, match="must divide the width, 4") as caught:
        await answers(model(1), {"name": "diverse", "groups": 3}, width=4)
    assert caught.value.field == "method.params.search.groups"


# Uniform information density, exact search


def test_regularisers_of_a_known_answer() -> None:
    found = Surprisals()
    for surprisal in (1.0, 3.0, 1.0, 3.0):
        found = found.plus(surprisal, 1.0)
    values: list[tuple[Regulariser, float]] = [
        ("variance", 1.0), ("local", 4.0), ("max", 3.0), ("square", 20.0), ("greedy", 8.0)
    ]  # fmt: skip
    for name, value in values:
        assert found.value(name) == pytest.approx(value)


@pytest.mark.parametrize("regulariser", ["variance", "local", "max", "square", "greedy"])
async def test_without_strength_uid_is_a_beam_and_wide_enough_it_finds_the_best(regulariser: str) -> None:
    made = model(31)
    beam, _, _ = await answers(made, n=2, width=3)
    assert (await answers(made, {"name": "uid", "regulariser": regulariser, "strength": 0.0}, n=2, width=3))[0] == beam
    asked = {"name": "uid", "regulariser": regulariser, "strength": 1.5, "length_penalty": 0.0}
    asked["early_stopping"] = "never"
    found, _, _ = await answers(made, asked, n=2, width=128, max_tokens=3, ignore_eos=True)
    every = [[a, b, c] for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)]
    assert found == sorted(every, key=lambda each: -regularised(made, each, regulariser, 1.5))[:2]


async def test_a_great_strength_of_the_greedy_regulariser_is_greedy_decoding() -> None:
    made = model(32)
    asked = {"name": "uid", "regulariser": "greedy", "strength": 1e5, "length_penalty": 0.0}
    greedy, _, _ = await answers(made, width=1, max_tokens=6, ignore_eos=True)
    assert (await answers(made, asked, width=6, max_tokens=6, ignore_eos=True))[0] == greedy


@pytest.mark.parametrize("strength", [0.0, 0.4])
@pytest.mark.parametrize("regulariser", ["max", "square", "greedy"])
@pytest.mark.parametrize("seed", range(2))
async def test_branch_and_bound_finds_the_best_of_all_answers(seed: int, regulariser: str, strength: float) -> None:
    made = model(seed + 40)
    asked = {"name": "exact", "regulariser": regulariser, "strength": strength}
    found, _, request = await answers(made, asked, n=3, width=3, max_tokens=4)
    every = every_answer(4)
    assert found == sorted(every, key=lambda each: -regularised(made, each, regulariser, strength))[:3]
    report = request.extra["exact"]
    assert report["complete"]
    assert report["calls"] < sum(len(each) < 4 for each in every) * 5 / 2  # of all beginnings


async def test_an_exact_search_that_gives_up_says_so_and_one_too_large_is_refused() -> None:
    _, _, request = await answers(model(1), {"name": "exact", "calls": 5}, width=1, max_tokens=5)
    assert request.extra["exact"] == {"calls": 5, "complete": False}
    assert request.notes == ["exact: calls 5, complete False"]
    with pytest.raises(TurnoutError, match="at most 43690 for an exact search with 6"):
        await answers(model(1), "exact", width=1, max_tokens=200_000)


# Best-first beam search


def beam_of_all(made: TableModel, width: int, length: int) -> tuple[list[list[int]], int]:
    """A beam that keeps answers among its hypotheses, and how many hypotheses it reads."""
    beams, reads = [(list[int](), 0.0)], 0
    for _ in range(length):
        longer = list[tuple[list[int], float]]()
        for answer, logp in beams:
            if answer and answer[-1] == END:
                longer.append((answer, logp))
                continue
            reads += 1
            row = made.next_logits([1, 2, *answer]).log_softmax(-1)
            longer += [([*answer, token], logp + float(row[token])) for token in range(VOCAB)]
        beams = sorted(longer, key=lambda each: -each[1])[:width]
    return [answer for answer, _ in beams], reads


@pytest.mark.parametrize("seed", range(30))
async def test_best_first_finds_what_a_beam_finds_with_no_more_reads(seed: int) -> None:
    made = model(seed + 50, sharp=1.0 + seed % 3)
    wanted, reads = beam_of_all(made, 3, 6)
    found, _, _ = await answers(made, "best_first", n=1 + seed % 3, width=3, max_tokens=6)
    assert found == wanted[: 1 + seed % 3]
    own = made.forwards
    assert own <= reads
    made.forwards = 0
    ahead, _, _ = await answers(made, {"name": "best_first", "ahead": 4}, n=1 + seed % 3, width=3, max_tokens=6)
    assert ahead == found


async def test_best_first_reads_less_and_an_early_exit_is_at_least_as_likely() -> None:
    saved = 0
    for seed in range(10):
        made = model(seed + 90, sharp=2.0)
        wanted, reads = beam_of_all(made, 4, 6)
        [first], _, _ = await answers(made, {"name": "best_first", "early_exit": True}, width=4, max_tokens=6)
        assert logprob(made, first) >= logprob(made, wanted[0]) - 1e-5
        saved += reads - made.forwards
    assert saved > 0


@pytest.mark.parametrize("penalty", [0.0, 0.7])
async def test_unbounded_best_first_search_is_exhaustive(penalty: float) -> None:
    made = model(45)
    asked = {"name": "best_first", "length_penalty": penalty}
    found, _, _ = await answers(made, asked, n=3, width=128, max_tokens=3)
    best = sorted(every_answer(3), key=lambda each: -logprob(made, each) / len(each) ** penalty)
    assert found == best[:3]


async def test_what_cannot_come_up_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each length at most the width."""
    waiting, select = [0], BestFirstSearch.select

    def watched(search: BestFirstSearch, *given: Any) -> Selection:
        found = select(search, *given)
        waiting.append(max(Counter(each.length for each in found.open).values(), default=0))
        return found

    monkeypatch.setattr(BestFirstSearch, "select", watched)
    await answers(model(46, sharp=0.5), {"name": "best_first", "ahead": 3}, n=2, width=3, max_tokens=9)
    assert max(waiting) == 3


# Constrained beams


def test_banks_give_what_they_lack_to_the_next_lower_one() -> None:
    assert allocate(5, [4, 2, 0]) == [3, 2, 0]
    assert allocate(5, [9, 9, 9]) == [1, 1, 3]
    assert allocate(4, [0, 1, 9]) == [0, 1, 3]
    assert allocate(8, [2, 1]) == [2, 1]


def test_a_phrase_that_breaks_off_is_given_up() -> None:
    state = Phrases(((1, 2, 3), (4,)))
    assert state.wanted == (1, 4)
    state = state.after(1).after(2)
    assert (state.count, state.wanted) == (2, (3,))
    assert state.after(5) == Phrases(state.phrases)
    assert state.after(1) == Phrases(state.phrases, open=0, begun=1)
    assert state.after(4).met == {1}
    done = state.after(3).after(4)
    assert (done.is_met, done.count, done.wanted) == (True, 4, ())


@pytest.mark.parametrize("penalty", [0.0, 1.0])
async def test_without_phrases_the_banks_are_a_beam(penalty: float) -> None:
    for seed in range(5):
        made = model(seed + 60)
        beam, _, _ = await answers(made, {"name": "beam", "length_penalty": penalty}, n=3, width=4)
        found, _, _ = await answers(made, {"name": "constrained", "length_penalty": penalty}, n=3, width=4)
        assert found == beam


def holds(answer: list[int], phrase: list[int]) -> bool:
    return any(answer[at : at + len(phrase)] == phrase for at in range(len(answer)))


@pytest.mark.parametrize("width", [1, 3, 6])
async def test_every_answer_holds_every_phrase_however_narrow_the_beam(width: int) -> None:
    phrases = [[5, 4], [3], [1, 1]]
    for seed in range(6):
        asked = {"name": "constrained", "phrases": phrases}
        found, _, _ = await answers(model(seed + 70), asked, n=min(width, 2), width=width, max_tokens=8)
        assert all(holds(each, phrase) for each in found for phrase in phrases)


async def test_wide_enough_it_finds_the_best_answer_that_holds_the_phrases() -> None:
    made, phrases = model(77), [[3, 4], [5]]
    asked = {"name": "constrained", "phrases": phrases, "length_penalty": 0.0, "early_stopping": "never"}
    found, _, _ = await answers(made, asked, width=128, max_tokens=4)
    every = [each for each in every_answer(4) if all(holds(each, phrase) for phrase in phrases)]
    assert found == [max(every, key=lambda each: logprob(made, each))]


@pytest.mark.parametrize(
    ("phrases", "why", "field"),
    [
        ([[9]], "token id 9; allowed: 0 to 5", "method.params.search.phrases.0"),
        ([[1], [2, END]], "holds a token that ends the answer", "method.params.search.phrases.1"),
        ([[1] * 4, [2] * 4], "8 tokens together; max_tokens leaves 5", "method.params.search.phrases"),
        (["text"], "needs a tokenizer that turns text into tokens", "method.params.search.phrases"),
    ],
)
async def test_phrases_that_no_answer_can_hold_are_refused(phrases: Any, why: str, field: str) -> None:
    with pytest.raises(TurnoutError, match=why) as caught:
        await answers(model(1), {"name": "constrained", "phrases": phrases})
    assert caught.value.field == field


@pytest.mark.parametrize("phrases", [[[]], [""], [[-1]], [1], "abc"])
async def test_phrases_of_another_form_are_refused(phrases: Any) -> None:
    with pytest.raises(TurnoutError) as caught:
        await answers(model(1), {"name": "constrained", "phrases": phrases})
    assert str(caught.value.field).startswith("method.params.search.phrases")
