"""Processors that read hidden states or recorded surprises: by hand, and against the formulas of their papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, markov
from decoding.logits import choice_scores
from decoding.processor_chain import chain_of
from decoding.processors.base import Batch
from decoding.processors.fsd_vector import FsdVector
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.step_states import LAST, PastStates, StepStates
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams, Token

MODEL = "of these tests"


def row(processor: dict[str, Any], prompt: list[int] | None = None, **sampling: Any) -> RowContext:
    params = SamplingParams(max_tokens=4000, processors=(PartChoice.model_validate(processor),), **sampling)
    return RowContext(Sequence(prompt or [3, 4, 3], params, seed=0))


def layered(*inner: torch.Tensor) -> StepStates:
    """States of layers 1, 2, ..., which the head reads as they are."""
    return StepStates(MODEL, len(inner) + 1, dict(enumerate(inner, 1)), lambda states, normed: states)


def diverging(nats: float) -> torch.Tensor:
    """Logits q over two tokens with KL((1/2, 1/2) || q) of so much; the third token does not count."""
    share = 0.5 * (1 + math.sqrt(1 - math.exp(-2 * nats)))
    return torch.tensor([[math.log(share), math.log(1 - share), 9.0]])


EVEN = torch.tensor([[4.0, 4.0, -3.0]])


@pytest.mark.parametrize(
    ("inner", "sigma", "temperature"),
    [
        ((2.0,), 4.0, 0.7778),  # the card's: 1.1 * 0.5 ** (2 / 4)
        ((0.0, 0.0), 4.0, 1.1),  # all layers agree
        ((3.0, 1.0), 4.0, 0.7778),  # the mean of the layers, not the greatest
        ((2.0,), 1e6, 1.1),
        ((2.0,), 0.0, 1.1),
    ],
)
def test_layers_that_disagree_lower_the_temperature(inner: tuple[float, ...], sigma: float, temperature: float) -> None:
    asked = row({"name": "dynamic_focus", "temperature": 1.1, "sigma": sigma})
    made = choice_scores(EVEN, [asked], layered(*map(diverging, inner)))
    assert (EVEN / made)[0].tolist() == pytest.approx([temperature] * 3, abs=1e-4)


def test_only_the_named_layers_count_and_rows_keep_their_own() -> None:
    states = layered(diverging(2.0).expand(3, -1), diverging(0.0).expand(3, -1))
    base = {"name": "dynamic_focus", "temperature": 1.0, "sigma": 2.0}
    rows = [row({**base, "layers": [1]}), row({**base, "layers": [2]}), row({**base, "layers": [1, 2, 200]})]
    made = choice_scores(EVEN.expand(3, -1), rows, states)
    assert (EVEN / made)[:, 0].tolist() == pytest.approx([0.5, 1.0, 0.5**0.5], abs=1e-4)


def test_without_states_only_the_temperature_holds() -> None:
    made = choice_scores(EVEN, [row({"name": "dynamic_focus", "temperature": 1.1})])
    assert torch.allclose(made, EVEN / 1.1)


def test_mirostat_is_that_of_llama_cpp() -> None:
    """tau 2, eta 0.5: the bound is 4 bits, then 4 - 0.5 (3 - 2), then 3.5 - 0.5 (0.5 - 2)."""
    context = row({"name": "mirostat", "tau": 2.0, "eta": 0.5})
    raw = torch.tensor([[0.45, 0.3, 0.17, 0.08 - 2**-6, 2**-6]]).log()  # surprises 1.2, 1.7, 2.6, 4.0 and 6.0 bits
    for surprise, kept in ((3.0, 4), (0.5, 3), (None, 4), (9.0, 4), (9.0, 1)):
        assert int(choice_scores(raw, [context]).isfinite().sum()) == kept
        context.seq.append(Token(0, "m", surprise_bits=surprise))
    # 3.5, 4.25, unchanged without a surprise, 0.75, -2.75: the best always stays.
    assert choice_scores(raw, [context]).isfinite()[0].tolist() == [True, False, False, False, False]
    assert torch.equal(choice_scores(raw, [RowContext(context.seq.fork())]), choice_scores(raw, [context]))


async def test_mirostat_holds_the_mean_surprise_and_another_run_repeats_it() -> None:
    shares = 1.0 / torch.arange(1, 401).float()
    model = TableModel("m", markov((shares / shares.sum()).expand(400, -1)), 400)
    made = {}
    for tau in (2.0, 4.0):
        seqs = [row({"name": "mirostat", "tau": tau, "eta": 0.2}).seq for _ in range(2)]
        for seq in seqs:
            seq.sampling = seq.sampling.model_copy(update={"max_tokens": 300})
            await model.decode(seq)
        assert seqs[0].tokens == seqs[1].tokens
        surprises = [token.surprise_bits or 0.0 for token in seqs[0].generated]
        made[tau] = sum(surprises[50:]) / 250
        assert made[tau] == pytest.approx(tau, abs=0.3)
    plain = row({"name": "mirostat", "tau": 0.0}).seq
    plain.sampling = plain.sampling.model_copy(update={"max_tokens": 3})
    await model.decode(plain)
    assert all(token.surprise_bits is None for token in plain.generated)


def cosines_by_hand(text: list[int], states: torch.Tensor, n: int, token: int) -> float:
    """Paper #84, vector form, with the states concatenated."""
    own = states[len(text) - n + 1 :].reshape(-1)
    found = [0.0]
    for place in range(n - 1, len(text)):
        if text[place] == token:
            before = states[place - n + 1 : place].reshape(-1)
            found.append(float(torch.nn.functional.cosine_similarity(own, before, dim=0)))
    return min(max(found), 1.0)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("drafted", [0, 1, 4])
def test_the_vector_form_compares_what_stood_before_each_token(n: int, drafted: int) -> None:
    draw = torch.Generator().manual_seed(n)
    text = torch.randint(0, 4, (20,), generator=draw).tolist()
    states = torch.randn((20, 6), generator=draw)
    context = row({"name": "fsd_vector", "n": n}, prompt=text[: 20 - drafted], temperature=0.0)
    context = RowContext(context.seq, tuple(text[20 - drafted :]))
    chain_of(context.seq).past.put(MODEL, LAST, 0, states[: 20 - drafted])
    fed = {LAST: torch.cat([torch.full((1, 6), 7.0), states[20 - drafted :]])}  # something else is fed before them
    paths = (tuple(range(1, drafted + 1)),)
    seen = StepStates(MODEL, 4, {LAST: states[-1:]}, lambda states, normed: states, fed, paths)
    part = FsdVector(FsdVector.Params(n=n))
    weights = part.similarity(Batch([context], torch.zeros(1, 5), None, seen), 0, [0, 1, 2, 3, 4])
    expected = [cosines_by_hand(text, states, n, token) for token in range(5)]
    assert weights.tolist() == pytest.approx(expected, abs=1e-5)
    assert weights[4] == 0.0
    raw = torch.tensor([[0.5, 0.3, 0.15, 0.04, 0.01]]).log()
    made = choice_scores(raw, [context], seen)
    mixed = [0.4 * float(raw[0, token].exp()) - 0.6 * expected[token] for token in range(5)]
    assert made[0].tolist() == pytest.approx(mixed, abs=1e-5)


def held(past: PastStates, model: str, count: int) -> torch.Tensor:
    found = past.pick(model, LAST, torch.arange(count))
    assert found is not None
    return found


def test_past_states_are_taken_without_gaps_and_once() -> None:
    past = PastStates()
    states = torch.arange(300.0)[:, None].expand(-1, 2)
    past.put("a", LAST, 5, states[5:9])
    assert past.known("a", LAST) == 0
    for start, end in ((0, 3), (2, 90), (10, 20), (91, 95), (90, 300)):
        past.put("a", LAST, start, states[start:end] if end > 20 or start < 3 else -states[start:end])
    assert torch.equal(held(past, "a", 300), states)
    assert past.pick("b", LAST, torch.arange(3)) is None
    assert past.pick("a", LAST, torch.tensor([7, 400, 7])).tolist() == [[7.0, 7.0], [0.0, 0.0], [7.0, 7.0]]  # type: ignore[union-attr]
    past.forget("b")
    assert past.known("a", LAST) == 300
    past.forget("a")
    assert past.known("a", LAST) == 0


def test_forks_share_states_and_go_on_alone() -> None:
    past, ends = PastStates(), []
    states = torch.arange(200.0)[:, None].expand(-1, 2)
    for length in range(20):  # forks of forks: more than there are parts
        past.put("a", LAST, 5 * length, states[5 * length : 5 * length + 5])
        twin, other = past.fork(), past.fork()
        twin.put("a", LAST, 5 * length + 5, -states[: length + 1])
        ends.append((other, 5 * length + 5, twin, length + 1))
        past = other if length % 2 else past
    for same, known, twin, own in ends:
        assert torch.equal(held(same, "a", known), states[:known])
        assert torch.equal(held(twin, "a", known + own), torch.cat([states[:known], -states[:own]]))
    assert torch.equal(held(past, "a", 100), states[:100])


def test_a_token_that_stands_at_many_places_is_compared_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.processors.fsd_vector.MOST_COMPARED", 3)
    test_the_vector_form_compares_what_stood_before_each_token(n=3, drafted=4)
