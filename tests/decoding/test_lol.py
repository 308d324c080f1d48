"""LOL by hand, and what its streams are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decoding.contrast.base import Asked, Stream, StreamRows
from decoding.contrast.lol import TRUTHFUL, Lol
from decoding.fakes import TableModel, pair
from turnout.errors import TurnoutError

MAIN, AMATEUR, GUIDED = [0.5, 0.3, 0.2], [0.6, 0.2, 0.2], [0.3, 0.5, 0.2]
LOWER, LOWER_AMATEUR = [0.4, 0.4, 0.2], [0.5, 0.25, 0.25]


def law(laws: list[list[float]], **params: Any) -> list[float]:
    made = Lol(Lol.Params(**params)).combine(torch.tensor([laws]).log() + 2.0, StreamRows([]))
    values: list[float] = made[0].softmax(-1).tolist()
    return values


def shares(values: list[float]) -> Any:
    return pytest.approx([each / sum(values) for each in values], abs=1e-5)


def model(name: str, num_layers: int) -> TableModel:
    made = TableModel(name, lambda _: torch.zeros(3), 3)
    made.num_layers = num_layers
    return made


def test_all_terms_by_hand() -> None:
    found = law([MAIN, AMATEUR, GUIDED, LOWER, LOWER_AMATEUR], weight=1.0, lower_weight=0.5, refocus=2.0, alpha=0.0)
    terms = zip(MAIN, AMATEUR, GUIDED, LOWER, LOWER_AMATEUR, strict=True)
    assert found == shares([p * p / q * math.sqrt(m * m / n) * (g / p) ** 2 for p, q, g, m, n in terms])


def test_without_a_lower_layer_and_a_guide_it_is_contrastive_decoding() -> None:
    only = {"lower_weight": 0.0, "refocus": 0.0}
    assert law([MAIN, AMATEUR], weight=0.5, alpha=0.0, **only) == shares(
        [p**1.5 / q**0.5 for p, q in zip(MAIN, AMATEUR, strict=True)]
    )
    kept = [p * p / q for p, q in zip(MAIN, AMATEUR, strict=True)][:2]
    assert law([MAIN, AMATEUR], alpha=0.5, **only) == shares([*kept, 0.0])


def test_an_amateur_that_is_the_model_itself_is_neutral() -> None:
    assert law([MAIN, MAIN], lower_weight=0.0, refocus=0.0, alpha=0.0) == shares(MAIN)
    neutral = law([MAIN, MAIN, LOWER, LOWER], lower_weight=1.0, refocus=0.0, alpha=0.0)
    assert neutral == shares([p * m for p, m in zip(MAIN, LOWER, strict=True)])
    assert law([MAIN, AMATEUR, MAIN], lower_weight=0.0, refocus=3.0, alpha=0.0) == law(
        [MAIN, AMATEUR], lower_weight=0.0, refocus=0.0, alpha=0.0
    )


@pytest.mark.parametrize(
    ("params", "streams"),
    [
        ({"lower_weight": 0.0, "refocus": 0.0}, (Stream("small"),)),
        ({"refocus": 0.0}, (Stream("small"), Stream(layer=4), Stream("small", layer=4))),
        ({"layer": 2}, (Stream("small"), Stream(prompt="guided"), Stream(layer=2), Stream("small", layer=2))),
        ({"weight": 0.0, "lower_weight": 0.0}, (Stream(prompt="guided"),)),
        ({"weight": 0.0, "lower_weight": 0.0, "refocus": 0.0}, ()),
    ],
)
def test_streams(params: dict[str, Any], streams: tuple[Stream, ...]) -> None:
    models = pair(model("small", 12), model("large", 12))
    assert Lol(Lol.Params(amateur="small", **params)).streams(models, models.large) == streams


@pytest.mark.parametrize(("small", "layer", "most"), [(12, 12, 11), (4, 6, 3)])
def test_a_layer_that_either_model_lacks_is_refused(small: int, layer: int, most: int) -> None:
    models = pair(model("small", small), model("large", 12))
    with pytest.raises(TurnoutError, match=rf"^contrast\.layer: layer {layer}; allowed: 1 to {most}$"):
        Lol(Lol.Params(amateur="small", layer=layer)).streams(models, models.large)


def test_the_guide_stands_before_the_system_message() -> None:
    asked = Asked("Who won?", "Ann won.", "Be short.")
    assert Lol().prompts(asked) == {"guided": Asked("Who won?", "Ann won.", f"{TRUTHFUL}\nBe short.")}
    assert Lol(Lol.Params(guide="Be true.")).prompts(Asked("Who?")) == {"guided": Asked("Who?", "", "Be true.")}
    assert Lol(Lol.Params(refocus=0.0)).prompts(asked) == {}
