"""AutoDeco (paper #22): the losses by hand, heads that learn a planted rule, and what they do to rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifacts
from decoding.fakes import TableModel
from decoding.logits import choice_scores
from decoding.model import ModelPool, Readout, ReadSpec
from decoding.processor_chain import open_networks
from decoding.row_context import RowContext
from decoding.sampling_heads import SamplingHeads, statistics
from decoding.sequence import Sequence
from decoding.step_states import LAST, StepStates
from training.autodeco import (
    STEADY,
    AutoDecoRecipe,
    Places,
    loss_of,
    soft_nucleus,
    temperature_loss,
    top_p_loss,
    train_autodeco,
)
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

VOCAB = 8


def test_probability_beyond_top_p_counts_less() -> None:
    """The card's: p = .5 .3 .2, P = .6 gives 1, e^-6, e^-12; in whichever order the tokens stand."""
    mask = soft_nucleus(torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]]), torch.tensor([[0.6], [0.6]]), 30.0)
    assert mask[0].tolist() == pytest.approx([1.0, math.exp(-6), math.exp(-12)], rel=1e-4)
    assert mask[1].tolist() == pytest.approx([math.exp(-12), 1.0, math.exp(-6)], rel=1e-4)


def test_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    tokens, kept = torch.tensor([1, 0]), torch.tensor([True, False])
    share = 1 / (1 + math.exp(2))
    found = temperature_loss(logits, tokens, torch.tensor([[2.0], [1.0]]), kept)
    assert found.item() == pytest.approx(share * math.log(1 + math.e))
    assert temperature_loss(logits, tokens, torch.ones(2, 1), ~kept & ~kept[[1, 0]]).item() == 0.0
    every = top_p_loss(logits, tokens, torch.ones(2, 1), torch.ones(2, 1), 30.0)
    expected = -(share * math.log(share) + (1 - share) * math.log(1 - share)) / 2
    assert every.item() == pytest.approx(expected, abs=1e-5)


def test_statistics_by_hand() -> None:
    made = statistics(torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[None])[0]
    assert made.tolist() == pytest.approx([0.5, 1.75 * math.log(2), 0.03125, 1.0], abs=1e-6)


def test_both_losses_reach_both_heads_and_nothing_else() -> None:
    torch.manual_seed(0)
    heads, base = SamplingHeads(4, 6), torch.nn.Linear(4, VOCAB)
    places = Places(torch.randn(32, 4), torch.randint(0, VOCAB, (32,)))
    loss_of(heads, base, places, torch.arange(32), AutoDecoRecipe()).backward()
    assert all(float(each.grad.abs().sum()) > 0 for each in heads.parameters())
    assert all(each.grad is None for each in base.parameters())


class Known(TableModel):
    """Its logits are as sure after every token, though only after an even one does the next follow from it."""

    def __init__(self) -> None:
        super().__init__("large", lambda tokens: logits_of(state(tokens)[None])[0], VOCAB)

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            row.hidden = {LAST: state([*seq.tokens, *path])} if want.hidden else {}
        return rows


def state(tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens[-1]), VOCAB).float()


def logits_of(states: torch.Tensor) -> torch.Tensor:
    best = (states.argmax(-1) + 1) % VOCAB
    return 1.5 * torch.nn.functional.one_hot(best, VOCAB).float()


def answers(count: int) -> list[tuple[list[int], list[int]]]:
    """After an even token its successor; after an odd one any."""
    draw, made = torch.Generator().manual_seed(3), []
    for _ in range(count):
        text = [2]
        while len(text) < 24:
            text.append(
                (text[-1] + 1) % VOCAB if text[-1] % 2 == 0 else int(torch.randint(VOCAB, (1,), generator=draw))
            )
        made.append((text[:1], text[1:]))
    return made


RECIPE = AutoDecoRecipe(inner=16, schedule=replace(STEADY, steps=150, learning_rate=2e-2))


async def test_heads_learn_where_the_model_is_surer_than_it_says(tmp_path: Path) -> None:
    trained = await train_autodeco(Known(), logits_of, answers(40), RECIPE, tmp_path / "run")
    heldout = trained.report["heldout"]
    assert heldout["temperature_loss"] < heldout["temperature_loss_at_1"]
    assert heldout["top_p_loss"] < heldout["top_p_loss_at_1"]
    again = await train_autodeco(Known(), logits_of, answers(40), RECIPE, tmp_path / "run")
    assert again.artifact.version == trained.artifact.version
    trained.artifact.save(tmp_path / "autodeco.safetensors")
    pool = ModelPool({"large": Known()}, {"large": "large"}, None, Artifacts(tmp_path))  # type: ignore[arg-type]
    networks = open_networks(sampling({}), pool)
    states = torch.stack([state([token]) for token in range(VOCAB)])
    temperature, _ = networks[0](states, logits_of(states))
    assert float(temperature[0::2].max()) < 0.5 < 1.0 < float(temperature[1::2].min())
    rows = [RowContext(Sequence([token], sampling({}), 0)) for token in range(VOCAB)]
    for row in rows:
        row.seq.networks = networks
    made = choice_scores(logits_of(states), rows, seen(states, pool.large.digest)).softmax(-1)
    assert float(made[0].max()) > 0.99
    assert float(made[1].max()) < float(logits_of(states)[1].softmax(-1).max())
    other = choice_scores(logits_of(states), rows, seen(states, "another model"))
    assert torch.equal(other, logits_of(states))
    with pytest.raises(TurnoutError) as caught:
        open_networks(sampling({"artifact": "none"}), pool)
    assert caught.value.field == "processors.0.artifact"
    with pytest.raises(TurnoutError, match="at least 8 are needed"):
        await train_autodeco(Known(), logits_of, answers(7), RECIPE)


def sampling(params: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=4, processors=(PartChoice(name="autodeco", params=params),))


def seen(states: torch.Tensor, model: str) -> StepStates:
    return StepStates(model, 4, {LAST: states}, lambda each, normed: each)


@pytest.mark.parametrize(("said", "kept"), [(0.5, 1), (0.75, 2), (1.0, 4)])
def test_constant_heads_are_plain_sampling_at_their_top_p(said: float, kept: int) -> None:
    heads = SamplingHeads(3, 4)
    for each in heads.parameters():
        torch.nn.init.zeros_(each)
    torch.nn.init.constant_(heads.top_p[2].bias, 60.0 if said == 1.0 else math.log(said / (1 - said)) + 1e-4)
    heads.model = "m"
    row = RowContext(Sequence([1], sampling({}), 0))
    row.seq.networks = {0: heads}
    raw = torch.tensor([[0.51, 0.25, 0.14, 0.1]]).log()
    made = choice_scores(raw, [row], seen(torch.zeros(1, 3), "m"))
    assert int(made.isfinite().sum()) == kept
    assert torch.equal(made[:, :kept], raw[:, :kept])  # the temperature is 1


def test_rows_of_several_heads_are_what_they_are_alone() -> None:
    rows, states = [], torch.randn((6, 3), generator=torch.Generator().manual_seed(1))
    raw = torch.randn((6, 9), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    heads = [SamplingHeads(3, 4), SamplingHeads(3, 4), SamplingHeads(3, 4)]
    for place, each in enumerate(heads):
        each.model = "another" if place == 2 else "m"
    for place, (which, params) in enumerate([(0, {}), (1, {}), (0, {"top_p": False}), (2, {}), (1, {}), (0, {})]):
        rows.append(RowContext(Sequence([1], sampling(params), place)))
        rows[-1].seq.networks = {0: heads[which]}
    made = choice_scores(raw, rows, seen(states, "m"))
    for place, row in enumerate(rows):
        alone = choice_scores(raw[place : place + 1], [row], seen(states[place : place + 1], "m"))
        assert torch.equal(made[place], alone[0])
        assert torch.equal(made[place], raw[place]) is (place == 3)
