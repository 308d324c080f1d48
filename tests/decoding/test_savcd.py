"""SAVCD on texts: distortions, the model's choice, and the mask that follows the entropy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decoding.contrast.base import Asked, Stream, StreamRows
from decoding.contrast.savcd import WRONGLY, Savcd, adaptive_share, chosen, distorted
from decoding.fakes import TableModel, pair
from turnout.errors import TurnoutError

ASKED = Asked("Who won?", "The race was in 1998. Ann Lee won it, in 3:05.2 minutes. It rained.", "Be short.")
LARGE = TableModel("large", lambda _: torch.zeros(3), 3)
MODELS = pair(LARGE, LARGE)


def made(logits: list[list[float]], **params: Any) -> torch.Tensor:
    return Savcd(Savcd.Params(**params)).combine(torch.tensor([logits]), StreamRows([]))[0]


def test_the_contrast_by_hand() -> None:
    assert made([[1.0, 1.0], [2.0, 0.0]], alpha=1.0, max_share=0.0).tolist() == [0.0, 2.0]
    logits = [2.0, 1.5, 1.0]
    assert made([logits, logits], alpha=5.0, max_share=0.0).tolist() == pytest.approx(logits)


def test_the_mask_by_hand() -> None:
    """p is 0.5, 0.25, 0.25: entropy 1.5 ln 2 of ln 3, so the share is 0.8 * 0.0536 ** 0.25 = 0.385."""
    p = torch.tensor([[0.5, 0.25, 0.25]])
    certain = 1.0 - 1.5 * math.log(2) / math.log(3)
    assert float(adaptive_share(p.log(), 0.8, 0.25)) == pytest.approx(0.8 * certain**0.25, abs=1e-5)
    logits = [p[0].log().tolist(), [0.0, 0.0, 9.0]]
    assert made(logits, max_share=0.8, gamma=0.25).isfinite().all()
    kept = made(logits, max_share=1.0, gamma=0.1).softmax(-1)  # a share of 0.746 leaves one token
    assert kept.tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_the_share_falls_as_the_entropy_rises() -> None:
    """Of one law at rising temperatures; a uniform law keeps every token, a certain one the best alone."""
    law = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0])
    rows = torch.stack([law / heat for heat in (0.1, 0.5, 1.0, 2.0, 5.0, 50.0)])
    share = adaptive_share(rows, 0.5, 1.0)
    assert (share.diff(dim=0) < 0).all()
    kept = (rows.softmax(-1) >= share * rows.softmax(-1).amax(-1, keepdim=True)).sum(-1)
    assert (kept.diff() >= 0).all()
    assert kept.tolist()[0] == 1
    assert kept.tolist()[-1] == 6
    other = [5.0, 0.0, 0.0]
    assert made([[1.0, 1.0, 1.0], other], max_share=1.0).softmax(-1)[1] > 0.4
    certain = made([[99.0, 0.0, 0.0], [300.0, 0.0, 0.0]], max_share=1e-3)
    assert certain.softmax(-1).tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_distortions() -> None:
    assert distorted(ASKED, "drop") == Asked("Who won?", "", "Be short.")
    masked = distorted(ASKED, "mask").context
    assert masked == "The race was in ___. ___ ___ won it, in ___ minutes. It rained."
    shuffled = distorted(ASKED, "shuffle").context
    assert shuffled != ASKED.context
    assert sorted(shuffled.split()) == sorted(ASKED.context.split())
    assert distorted(ASKED, "shuffle").context == shuffled
    two = distorted(Asked("q", "One. Two."), "shuffle").context
    assert two == "Two. One."
    assert distorted(ASKED, "opposite") == Asked("Who won?", ASKED.context, f"Be short.\n{WRONGLY}")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("it asks for a name. Choice: mask", "mask"),
        ("not drop, since ... choice: **Shuffle**", "shuffle"),
        ("I would say opposite", "opposite"),
        ("masked balls and raindrops", "drop"),
        ("", "drop"),
    ],
)
def test_what_the_model_says_is_a_choice(text: str, name: str) -> None:
    assert chosen(text) == name


async def test_the_model_chooses_by_the_question() -> None:
    part, asked = Savcd(Savcd.Params(choice_tokens=7)), list[tuple[str, int]]()

    async def ask(name: str, most: int) -> str:
        asked.append((name, most))
        return " a name. Choice: mask"

    prompts = part.prompts(ASKED)
    assert list(prompts) == ["choice", "drop", "shuffle", "mask", "opposite"]
    assert prompts["choice"].question.endswith("Question: Who won?\nReason:")
    assert (prompts["choice"].context, prompts["choice"].system) == ("", "")
    assert part.streams(MODELS, MODELS.large) == (Stream(prompt="drop"),)
    assert await part.decide(ask) == {"drop": "mask"}
    assert asked == [("choice", 7)]


async def test_a_distortion_that_is_given_asks_nothing() -> None:
    part = Savcd(Savcd.Params(distortion="shuffle"))

    async def ask(name: str, most: int) -> str:
        raise AssertionError

    assert list(part.prompts(ASKED)) == ["shuffle"]
    assert part.streams(MODELS, MODELS.large) == (Stream(prompt="shuffle"),)
    assert await part.decide(ask) == {}


def test_without_a_context_it_is_refused() -> None:
    with pytest.raises(TurnoutError, match=r"^context: contrast 'savcd' needs it"):
        Savcd().prompts(Asked("Who won?"))
