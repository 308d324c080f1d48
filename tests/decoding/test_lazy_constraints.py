"""A constraint that is asked token by token: the tokens of the masked way, and few questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import pytest
import torch

from decoding.constraints.base import Constraint, Mask, allows
from decoding.lazy_constraints import MOST_VISITED
from decoding.model import Readout, ReadSpec
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams, Token

VOCAB = 64
END = 1
DRAW = ReadSpec()


class Multiples(Constraint):
    """Texts of tokens that a number divides, after 63 none; counts how it is asked."""

    def __init__(self, divisor: int, is_lazy: bool) -> None:
        self.end_ids, self.vocab_size, self.failure, self.remembers = frozenset({END}), VOCAB, "", False
        self.is_lazy, self.divisor, self.asked = is_lazy, divisor, Counter[str]()

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        self.asked["masks"] += len(paths)
        bits = torch.arange(VOCAB).reshape(-1, 8) % self.divisor == 0
        mask: Mask = (bits * 2 ** torch.arange(8)).sum(-1).to(torch.uint8).numpy()
        return [None if 63 in (*answer, *path) else mask for path in paths]

    def permits(self, answer: list[int], path: tuple[int, ...], token: int) -> bool:
        self.asked["permits"] += 1
        return 63 not in (*answer, *path) and token % self.divisor == 0

    def accepts(self, tokens: list[int]) -> bool:
        return True

    def clone(self) -> Multiples:
        return self


def row(
    constraint: Constraint, seed: int, answer: tuple[int, ...] = (), path: tuple[int, ...] = (), **sampling: object
) -> RowContext:
    seq = Sequence([2, 3], SamplingParams.model_validate({"max_tokens": 99, **sampling}), seed=seed, eos_ids=(END,))
    for token in answer:
        seq.append(Token(token, "m"))
    seq.constraint = constraint
    return RowContext(seq, path)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def rows_of(constraint: Constraint) -> list[RowContext]:
    """Drawn and greedy ones, with paths, some of which do not fit."""
    made = []
    for seed in range(60):
        temperature = (0.0, 0.7, 1.0)[seed % 3]
        path = ((), (6,), (63,))[seed % 7 % 3]
        made.append(row(constraint, seed, (0,) * (seed % 2), path, temperature=temperature))
    return made


def test_a_surprise_is_that_of_the_masked_law() -> None:
    [found] = read(torch.zeros((1, VOCAB)), [row(Multiples(8, is_lazy=True), seed=1)], [ReadSpec(surprise=True)])
    assert found.surprise_bits == pytest.approx(3.0)  # one of eight


@pytest.mark.parametrize("divisor", [2, 3, 60])
def test_tokens_are_those_of_the_mask(divisor: int) -> None:
    lazy, masked = Multiples(divisor, is_lazy=True), Multiples(divisor, is_lazy=False)
    wants = [
        ReadSpec(logprob=True, entropy=place % 5 == 0, probs=place % 6 == 0, surprise=place % 4 == 0)
        for place in range(60)
    ]
    one, other = read(logits(60), rows_of(lazy), wants), read(logits(60), rows_of(masked), wants)
    for mine, theirs, want in zip(one, other, wants, strict=True):
        assert (mine.token, mine.logprob, mine.entropy_bits) == (theirs.token, theirs.logprob, theirs.entropy_bits)
        assert not want.probs or torch.equal(_probs(mine), _probs(theirs))
        assert mine.surprise_bits == theirs.surprise_bits
    assert masked.asked["permits"] == 0
    assert 0 < lazy.asked["permits"] <= 60 * MOST_VISITED


def _probs(row: Readout) -> torch.Tensor:
    assert row.probs is not None
    return row.probs


def test_few_tokens_are_asked_for_and_no_mask() -> None:
    lazy = Multiples(2, is_lazy=True)
    rows = [row(lazy, seed, temperature=1.0) for seed in range(200)]
    found = read(logits(1).expand(200, -1).contiguous(), rows, [DRAW] * 200)
    assert all(each.token % 2 == 0 for each in found)
    assert lazy.asked["masks"] <= 2  # with sixteen odd tokens before an even one
    assert lazy.asked["permits"] < 200 * 4


def test_the_law_is_the_models_among_what_is_permitted() -> None:
    """The example of paper #78: of .5, .3 and .2 the last two are permitted."""
    lazy, probs = Multiples(60, is_lazy=True), torch.zeros(VOCAB)
    probs[1], probs[0], probs[60] = 0.5, 0.3, 0.2
    rows = [row(lazy, seed, temperature=1.0) for seed in range(4000)]
    drawn = Counter(each.token for each in read(probs.log().expand(4000, -1).contiguous(), rows, [DRAW] * 4000))
    assert set(drawn) == {0, 60}
    assert abs(drawn[0] / 4000 - 0.6) < 5 * (0.24 / 4000) ** 0.5
    assert lazy.asked["masks"] == 0
    assert lazy.asked["permits"] < 2.2 * 4000


CUT = ({"top_p": 0.9}, {"top_k": 5}, {"processors": (PartChoice.of("typical_p", p=0.5),)}, {"min_tokens": 3})


@pytest.mark.parametrize("sampling", CUT)
def test_what_is_cut_after_the_mask_is_masked(sampling: dict[str, object]) -> None:
    lazy, masked = Multiples(3, is_lazy=True), Multiples(3, is_lazy=False)
    one, other = ([row(each, seed, temperature=1.0, **sampling) for seed in range(40)] for each in (lazy, masked))
    found, wanted = read(logits(40), one, [DRAW] * 40), read(logits(40), other, [DRAW] * 40)
    assert [each.token for each in found] == [each.token for each in wanted]
    assert lazy.asked["permits"] == 0


def test_the_default_is_the_mask() -> None:
    class Masked(Multiples):
        permits = Constraint.permits

    made = Masked(3, is_lazy=True)
    [mask] = made.masks([], [()])
    assert [made.permits([], (), token) for token in range(70)] == [allows(mask, token) for token in range(70)]
    assert not made.permits([63], (), 3)
