from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.best_tokens import best_tokens
from decoding.logits import entropy_bits, process
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.types import SamplingParams, Token

INF = float("inf")
VOCAB = 50


def history(path: tuple[int, ...] = (), generated: tuple[int, ...] = (), **sampling: Any) -> RowContext:
    seq = Sequence([3, 4, 3], SamplingParams(max_tokens=1000, **sampling), seed=0)
    for token in generated:
        seq.append(Token(token, "m"))
    return RowContext(seq, path)


def logits(rows: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
        ({"repetition_penalty": 0.5}, [RepetitionPenaltyLogitsProcessor(0.5)]),
        (
            {"repetition_penalty": 1.3, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.05),
            ],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_agrees_with_transformers(sampling: dict[str, Any], warpers: list[Any]):
    raw = logits()
    before = raw.clone()
    row = history(path=(9,), generated=(5, 6, 5), **sampling)
    mine = process(raw, [row] * len(raw))
    theirs = raw.clone()
    seen = torch.tensor([row.seq.tokens + list(row.path)] * len(raw))
    for warper in warpers:
        theirs = warper(seen, theirs)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(raw, before, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-269, 1e-46, 1e-38, 1e-9])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float):
    raw = logits()
    rows = [history(temperature=temperature, logit_bias={7: 100.0})] * 4 + [history(temperature=temperature)] * 4
    mine = process(raw, rows)
    assert torch.isfinite(mine.amax(-1)).all()
    assert mine.softmax(-1).amax(-1).tolist() == [1.0] * len(raw)
    assert mine.argmax(-1).tolist() == [7] * 4 + raw[4:].argmax(-1).tolist()


def test_presence_and_frequency_count_generated_tokens_only():
    raw = torch.zeros((1, 8))
    row = history(path=(6,), generated=(5, 5, 6), presence_penalty=0.5, frequency_penalty=0.25)
    expected = torch.zeros(8)
    expected[5] = expected[6] = -(0.5 + 2 * 0.25)  # 3 and 4 are only in the prompt
    torch.testing.assert_close(process(raw, [row])[0], expected)


def test_bias_comes_before_the_penalties_and_can_force_a_token():
    raw = torch.tensor([[1.0, 2.0, 3.0, -4.0, -1.0]])
    row = history(logit_bias={3: 100.0}, repetition_penalty=2.0)
    # 3 and 4 are in the prompt: the sum 96 is positive, so it is divided; -1 is multiplied.
    torch.testing.assert_close(process(raw, [row]), torch.tensor([[1.0, 2.0, 3.0, 48.0, -2.0]]))


def test_greedy_keeps_only_the_best_after_penalties():
    raw = torch.tensor([[0.0, 5.0, 4.0], [0.0, 5.0, 4.0]])
    rows = [history(temperature=0), history(temperature=0, logit_bias={1: -2.0})]
    assert process(raw, rows).softmax(-1).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_parameters_that_are_replaced_hold_from_the_next_row_on():
    row, raw = history(temperature=2.0), logits(1)
    assert torch.equal(process(raw, [row]), raw / 2.0)
    row.seq.sampling = SamplingParams(temperature=0.5, top_k=1)  # as a router sets them that has read a row
    assert process(raw, [row]).isfinite().sum() == 1


def test_rows_of_a_batch_do_not_touch_each_other():
    raw = logits(rows=6, seed=3)
    rows = [
        history(),
        history(temperature=0),
        history(top_k=3),
        history(top_p=0.5, temperature=0.5),
        history(generated=(1, 2), frequency_penalty=1.0),
        history(min_p=0.3, logit_bias={0: 5.0}),
    ]
    together = process(raw, rows)
    for index, row in enumerate(rows):
        torch.testing.assert_close(together[index], process(raw[index : index + 1], [row])[0], rtol=0, atol=1e-6)


def test_a_top_p_below_float32_keeps_the_likeliest():
    raw = logits()
    kept = process(raw, [history(top_p=5e-324)] * len(raw))
    assert torch.equal(kept.isfinite().nonzero()[:, 1], raw.argmax(-1))


def test_top_k_keeps_ties_whatever_shares_the_batch():
    raw = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]] * 2)
    kept = torch.isfinite(process(raw, [history(top_k=2), history(top_k=5, top_p=0.9)]))
    assert kept.tolist()[0] == [False, True, True, True, True, False]
    assert torch.equal(kept[:1], torch.isfinite(process(raw[:1], [history(top_k=2)])))


def in_order(raw: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Whether each token is in its row's nucleus: all of them sorted, of equal ones the first first."""
    values, order = raw.double().sort(dim=-1, descending=True, stable=True)
    mass = values.softmax(-1)
    kept = mass.cumsum(-1) - mass < top_p[:, None].double() - 1e-12
    return torch.zeros_like(kept).scatter(-1, order, kept)


@pytest.mark.parametrize("vocab", [3, 12, 64, 65, 300, 1000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("rounded", [False, True], ids=["", "ties"])
def test_a_nucleus_is_that_of_all_tokens_sorted_whatever_shares_the_batch(vocab: int, spread: float, rounded: bool):
    """Few tokens are sorted where few are enough; in a batch with a flat row, all are."""
    generator = torch.Generator().manual_seed(vocab)
    raw = torch.randn(30, vocab, generator=generator) * spread
    raw = (2 * raw).round() / 2 if rounded else raw
    # No row ends where a sum of float32 may fall on either side.
    top_p = (torch.randint(1, 100, (30,), generator=generator) + 0.37) / 100.5
    rows = [history(top_p=float(each)) for each in top_p]
    kept = torch.isfinite(process(raw, rows))
    assert torch.equal(kept, in_order(raw, top_p))
    for row in range(30):
        alone = torch.isfinite(process(raw[row : row + 1], rows[row : row + 1]))
        assert torch.equal(alone[0], kept[row])


def test_rows_without_a_nucleus_stay_whole_beside_those_with_one():
    raw = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = [history(), history(top_p=0.5), history(), history(top_p=0.1)]
    kept = torch.isfinite(process(raw, rows)).sum(-1).tolist()
    assert kept[0] == kept[2] == 50
    assert 1 <= kept[3] < kept[1] < 50


def test_top_p_always_keeps_the_best_token():
    kept = process(torch.tensor([[0.0, 10.0, 0.0]]), [history(top_p=1e-9)])
    assert torch.isfinite(kept).tolist() == [[False, True, False]]


def test_entropy_of_known_distributions():
    rows = torch.log(torch.tensor([[1 / 8] * 8, [0.5, 0.25, 0.25] + [0.0] * 5, [1.0] + [0.0] * 7]))
    assert entropy_bits(rows.log_softmax(-1)).tolist() == pytest.approx([3.0, 1.5, 0.0], abs=1e-6)
    assert entropy_bits((rows[:1] + 17.0).log_softmax(-1)).tolist() == pytest.approx([3.0], abs=1e-5)


EXTREMES = st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, float("nan"), 1e-45])


@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=EXTREMES), st.booleans())
def test_best_tokens_are_those_of_torch(scores: np.ndarray[Any, Any], turned: bool) -> None:
    """The first of equal scores, also of rows that exclude all, and NaN before any number."""
    rows = torch.from_numpy(scores)
    rows = rows.T if turned else rows
    assert torch.equal(best_tokens(rows), rows.argmax(-1))


@pytest.mark.parametrize("row", [[2.0, INF, INF], [-INF] * 3, [1.0, float("nan"), float("nan")]])
def test_the_first_of_the_greatest_is_the_best_token(row: list[float]) -> None:
    expected = next((place for place, score in enumerate(row) if score != score or score == INF), 0)
    assert best_tokens(torch.tensor([row])).tolist() == [expected]
