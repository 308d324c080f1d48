"""Contrasts by hand: what each computes of a few logits, and what its streams read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decoding.contrast.base import Asked, Contrast, StreamRows, outside, plausible
from decoding.contrast.cad import Cad
from decoding.contrast.cfg import Cfg
from decoding.contrast.contrastive import Contrastive
from decoding.contrast.dola import Dola
from decoding.contrast.instructive import OPPOSITE, Instructive
from decoding.contrast.pmi import Pmi
from decoding.contrast.uscd import Uscd, without_examples
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

ASKED = Asked("Who won?", "Ann won.", "Be short.")


def made(kind: type[Contrast], streams: list[list[float]], **params: Any) -> torch.Tensor:
    """The combined row of one row of streams, as a law."""
    part = kind(kind.Params(**params))
    context = RowContext(Sequence([1], SamplingParams(), seed=0))
    return part.combine(torch.tensor([streams]), StreamRows([context]))[0]


def law(kind: type[Contrast], streams: list[list[float]], **params: Any) -> list[float]:
    """As `made`, of probabilities and to probabilities."""
    values: list[float] = made(kind, torch.tensor(streams).log().tolist(), **params).softmax(-1).tolist()
    return values


def close(values: Any) -> Any:
    return pytest.approx(values, abs=1e-5)


def test_cad_follows_the_context() -> None:
    assert made(Cad, [[1.0, 1.0], [2.0, 0.0]], alpha=1.0).tolist() == [0.0, 2.0]
    assert law(Cad, [[0.2, 0.5, 0.3]] * 2, alpha=0.7) == close([0.2, 0.5, 0.3])
    assert Cad().prompts(ASKED) == {"without_context": Asked("Who won?", "", "Be short.")}
    with pytest.raises(TurnoutError, match=r"^context: contrast 'cad' needs it"):
        Cad().prompts(Asked("Who won?"))


def test_instructive_decoding_subtracts_logits_without_a_mask() -> None:
    assert made(Instructive, [[2.0, 1.9], [3.0, 1.0]], epsilon=0.3).tolist() == close([1.1, 1.6])
    same = made(Instructive, [[2.0, 1.9, -4.0]] * 2, epsilon=0.9)
    assert int(same.argmax()) == 0


@pytest.mark.parametrize(
    ("noise", "asked", "noisy"),
    [
        ("opposite", ASKED, Asked("Who won?", "Ann won.", OPPOSITE)),
        ("opposite", Asked("Who won?", "Ann won."), Asked(OPPOSITE, "Ann won.")),
        ("opposite", Asked("Who won?"), Asked(f"{OPPOSITE}\nWho won?")),
        ("empty", ASKED, Asked("Who won?", "Ann won.", "")),
        ("empty", Asked("Who won?"), Asked("")),
    ],
)
def test_noisy_instructions(noise: Any, asked: Asked, noisy: Asked) -> None:
    assert Instructive(Instructive.Params(noise=noise)).prompts(asked) == {"noisy": noisy}


def test_truncated_and_random_instructions() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    part = Instructive(Instructive.Params(noise="truncate_shuffle"))
    [noisy] = part.prompts(Asked(" ".join(words))).values()
    found = noisy.question.split()
    assert len(found) == 6
    assert set(found) < set(words)
    assert found != [word for word in words if word in found]
    assert part.prompts(Asked(" ".join(words))) == {"noisy": noisy}
    [random] = Instructive(Instructive.Params(noise="random_words")).prompts(Asked("Sum", "1 2")).values()
    assert len(random.question.split()) == 10
    assert random.context == "1 2"


def test_classifier_free_guidance() -> None:
    p, negative = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    squares = [p[i] ** 2 / negative[i] for i in range(3)]
    assert law(Cfg, [p, negative], scale=2.0) == close([each / sum(squares) for each in squares])
    assert law(Cfg, [p, negative], scale=0.0) == close(negative)
    part = Cfg(Cfg.Params(negative_prompt="Lose."))
    assert part.prompts(ASKED) == {"negative": Asked("Lose.", "", "Be short.")}


def test_contrastive_decoding_keeps_to_plausible_tokens() -> None:
    expert, amateur = [0.5, 0.3, 0.15, 0.05], [0.6, 0.25, 0.05, 0.1]
    ratios = [0.5 / 0.6, 0.3 / 0.25, 0.15 / 0.05]
    assert law(Contrastive, [expert, amateur], alpha=0.2) == close([*(each / sum(ratios) for each in ratios), 0.0])
    roots = [p / q**2 for p, q in zip(expert[:2], amateur[:2], strict=True)]  # an amateur of temperature 1/2
    found = law(Contrastive, [expert, amateur], alpha=0.5, amateur_temperature=0.5)
    assert found == close([*(each / sum(roots) for each in roots), 0.0, 0.0])


def test_dola_takes_the_layer_that_differs_most() -> None:
    last, near, far = [0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]
    ratios = [each / other for each, other in zip(last, far, strict=True)]
    expected = [each / sum(ratios) for each in ratios]
    assert law(Dola, [last, near, far], alpha=0.1) == close(expected)
    assert law(Dola, [last, far, near], alpha=0.1) == close(expected)
    assert law(Dola, [last, near, far], alpha=0.4) == close([6 / 7.5, 1.5 / 7.5, 0.0])


@pytest.mark.parametrize(
    ("layers", "count", "numbers"),
    [
        ("low", 8, (2,)), ("low", 32, (2, 4, 6, 8, 10, 12, 14)), ("high", 8, (4, 6)), ("low", 2, (1,)),
        ("high", 2, (1,)), ("low", 80, (2, 4, 6, 8, 10, 12, 14, 16, 18)), ("high", 80, tuple(range(60, 80, 2))),
        ((3, 1, 3), 4, (3, 1)),
    ],
)  # fmt: skip
def test_dola_candidates(layers: Any, count: int, numbers: tuple[int, ...]) -> None:
    assert Dola(Dola.Params(layers=layers))._numbers(count) == numbers


def test_dola_refuses_the_last_layer() -> None:
    with pytest.raises(TurnoutError, match=r"^contrast\.layers: layer 4; allowed: 1 to 3$"):
        Dola(Dola.Params(layers=(4,)))._numbers(4)


def test_mutual_information_only_where_unsure() -> None:
    sure, unsure, other = [0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.4, 0.3, 0.2, 0.1]
    assert law(Pmi, [sure, other], weight=1.0, threshold=1.0) == close(sure)
    inverse = [1 / each for each in other]
    assert law(Pmi, [unsure, other], weight=1.0, threshold=1.0) == close([each / sum(inverse) for each in inverse])
    assert law(Pmi, [unsure, other], weight=1.0, threshold=math.log(4) + 0.01) == close(unsure)
    assert Pmi().prompts(ASKED) == {"sourceless": Asked("Who won?", "", "Be short.")}
    assert Pmi().prompts(Asked("Who won?")) == {"sourceless": Asked("")}


def test_uscd_subtracts_probabilities_where_unsure() -> None:
    standard, lame = [0.4, 0.3, 0.2, 0.1], [0.5, 0.1, 0.2, 0.2]  # the standard deviation is 0.129
    open_, closed = {"alpha": 0.5, "threshold": 0.13}, {"alpha": 0.5, "threshold": 0.12}
    assert law(Uscd, [standard, lame], **open_) == close([0.3, 0.5, 0.2, 0.0])
    assert law(Uscd, [standard, lame], **closed) == close(standard)
    assert law(Uscd, [standard, standard], **open_, floor=0.0) == close(standard)


def test_uscd_finds_examples() -> None:
    code = '''def double(x):
    """Twice x.

    For example:
    >>> double(2)
    4
    >>> double(
    ...     3)
    6
    """
assert double(1) == 2
Input: 3
Output: 6
'''
    assert without_examples(code) == 'def double(x):\n    """Twice x.\n\n    """\n'
    assert Uscd().prompts(Asked("Do it.", "1 -> 2")) == {"lame": Asked("Do it.")}
    with pytest.raises(TurnoutError, match=r"^context: contrast 'uscd' needs examples"):
        Uscd().prompts(Asked("The input of an example is asserted to be fine."))


def test_what_is_left_out_keeps_its_order_behind_all_else() -> None:
    main = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert plausible(main, math.exp(-1.5)).tolist() == [[False, True, False, True]]
    scores = outside(torch.tensor([[9.0, -5.0, 9.0, 7.0]]), torch.tensor([[False, True, False, True]]), main)
    assert scores.argsort(descending=True).tolist() == [[3, 1, 2, 0]]
    assert scores.softmax(-1)[0, [0, 2]].tolist() == [0.0, 0.0]
    none = outside(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), main)
    assert torch.allclose(none.softmax(-1), main.softmax(-1), atol=1e-3)
