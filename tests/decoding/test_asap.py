"""Grammar-aligned decoding: its first answer is the masked one, its law becomes the model's given what fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np
import pytest
import torch

from decoding.constraints.base import Constraint, Mask
from decoding.fakes import TableModel, markov, pair
from decoding.methods.asap import Expectations
from decoding.model import Request
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.types import SamplingParams, Token

START, A, B, C, D, X, END = range(7)
FITTING = ((A, C), (B, D))
# The example of the paper's card: after `a` what fits has a hundredth of the model's probability.
TRUTH = {A: 0.009 / 0.109, B: 0.1 / 0.109}


class Listed(Constraint):
    """Allows two texts."""

    def __init__(self) -> None:
        self.end_ids, self.vocab_size, self.failure, self.remembers = frozenset({END}), 7, "", False

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        found: list[Mask | None] = []
        for path in paths:
            text = (*answer, *path)
            ids = {(*each, END)[len(text)] for each in FITTING if (*each, END)[: len(text)] == text and len(text) < 3}
            found.append(np.packbits([token in ids for token in range(8)], bitorder="little") if ids else None)
        return found

    def accepts(self, tokens: list[int]) -> bool:
        return tuple(tokens) in FITTING

    def clone(self) -> Listed:
        return self


def table() -> TableModel:
    probs = torch.full((7, 7), 1e-9)
    probs[START, A], probs[START, B] = 0.9, 0.1
    probs[A, C], probs[A, X] = 0.01, 0.99
    probs[B, D] = probs[C, END] = probs[D, END] = 1.0
    return TableModel("large", markov(probs / probs.sum(-1, keepdim=True)), 7, num_parameters=10)


def begun(seed: int, sampling: dict[str, object]) -> Sequence:
    asked = SamplingParams.model_validate({"max_tokens": 8, "temperature": 1.0, **sampling})
    seq = Sequence([START], asked, seed, (END,))
    seq.constraint = Listed()
    return seq


async def answer(model: TableModel, seed: int, method: str = "asap", **sampling: object) -> Sequence:
    info = get_method(method)
    seq = begun(seed, sampling)
    async for _ in info.run(Request("r", seq), pair(model, model), info.parse({})):
        pass
    model.release(seq)
    assert tuple(seq.answer[:-1]) in FITTING
    return seq


def learned(model: TableModel) -> Expectations:
    [store] = [each for (kind, _), each in model.stores._stores.items() if kind.startswith("asap/")]
    assert isinstance(store, Expectations)
    return store


async def test_the_first_answer_is_that_of_plain_decoding() -> None:
    for seed in range(20):
        assert (await answer(table(), seed)).answer == (await answer(table(), seed, "plain")).answer


async def test_bounds_never_rise_and_end_at_the_truth() -> None:
    model, bounds = table(), [1.0]
    for seed in range(40):
        await answer(model, seed)
        bounds.append(learned(model).root.fitting)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(0.109, rel=1e-4)
    after_a, after_b = (learned(model).root.children[token][1].fitting for token in (A, B))
    assert (after_a, after_b) == pytest.approx((0.01, 1.0), rel=1e-4)


async def test_the_law_is_the_models_given_that_the_text_fits() -> None:
    model, drawn = table(), Counter[int]()
    for seed in range(300):
        drawn[(await answer(model, seed)).answer[0]] += 1
    masked = Counter([(await answer(table(), seed, "plain")).answer[0] for seed in range(100)])
    assert masked[A] > 75  # a mask alone: .9
    assert abs(drawn[A] / 600 - TRUTH[A]) < 5 * (TRUTH[A] * TRUTH[B] / 600) ** 0.5


async def test_a_way_that_the_model_never_ends_well_is_not_taken_again() -> None:
    """All of the model's probability after `a` is on what does not fit."""
    model = table()
    inner = model.next_logits
    model.next_logits = lambda tokens: inner(tokens).masked_fill(torch.arange(7) == C, -200.0)
    found = [(await answer(model, seed)).answer[0] for seed in range(30)]
    assert A in found
    assert found[found.index(A) + 1 :] == [B] * (29 - found.index(A))


@pytest.mark.parametrize("known", [False, True])
async def test_an_answer_that_was_begun_elsewhere_is_ended(known: bool) -> None:
    """It continues from what is known of its beginning; where nothing is, nothing is learned of it."""
    model, info, seq = table(), get_method("asap"), begun(3, {})
    if known:
        while A not in learned_children(model):
            await answer(model, len(model.stores) + model.forwards)
    seq.append(Token(A, "large"))
    before = learned_children(model)
    async for segment in info.run(Request("r", seq), pair(model, model), info.parse({})):
        assert segment.tokens
    assert seq.answer == [A, C, END]
    assert learned_children(model) == before
    assert info.continues(info.parse({}), greedy=False)


def learned_children(model: TableModel) -> set[int]:
    return set(learned(model).root.children) if len(model.stores) else set()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.5}, {"top_p": 0.5}])
async def test_a_law_that_is_not_the_models_own_is_plain_and_says_so(sampling: dict[str, object]) -> None:
    model, info = table(), get_method("asap")
    seq = begun(3, sampling)
    request = Request("r", seq)
    async for _ in info.run(request, pair(model, model), info.parse({})):
        pass
    assert seq.answer == (await answer(table(), 3, "plain", **sampling)).answer
    assert "as plain" in request.notes[0]
