"""Trained heads of both kinds on one model whose law is known: how sure each can be, and who sees further."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.decoding.head_models import LawModel, answer, pool_of, save_head
from training.distil import Answers, distil
from training.fitting import Schedule, fit
from training.heads import Frozen, WindowTask
from training.length_data import Source
from training.medusa import MedusaRecipe
from training.redrafter import ReDrafterRecipe
from turnout.cost import SpeculationMeter
from turnout.types import SamplingParams

TOKENS, AHEAD = 10, 4
# Every token is followed by the next one, or the one after that, in a circle, or now and then by any.
STEP, LEAP = 0.65, 0.25
NEXT = torch.eye(TOKENS).roll(1, dims=1)
LAW = STEP * NEXT + LEAP * NEXT @ NEXT + (1.0 - STEP - LEAP) / TOKENS
RECIPES: list[MedusaRecipe | ReDrafterRecipe] = [MedusaRecipe(heads=AHEAD), ReDrafterRecipe(ahead=AHEAD)]


def drawn(seed: int) -> Answers:
    """Answers of the model, drawn from its law."""
    prompts = [[index % TOKENS] for index in range(64)]
    source = Source(prompts, SamplingParams(max_tokens=50), frozenset(), seed)
    return asyncio.run(distil(LawModel("large", LAW), source))


@pytest.fixture(scope="module")
def tasks() -> dict[str, WindowTask]:
    """Both heads, trained alike on the same answers."""
    output = nn.Linear(TOKENS, TOKENS, bias=False)
    output.weight.data = 8.0 * torch.eye(TOKENS)
    embed = nn.Embedding(TOKENS, TOKENS)
    embed.weight.data = torch.eye(TOKENS)
    frozen, answers = Frozen(embed.requires_grad_(False), output.requires_grad_(False)), drawn(0)
    made: dict[str, WindowTask] = {}
    for recipe in RECIPES:
        torch.manual_seed(0)
        made[recipe.kind] = task = recipe.task(frozen, TOKENS)
        lessons = task.lessons(answers)
        fit(task.head, lessons.loss, len(lessons), Schedule(steps=120, batch_size=128, learning_rate=0.03))
    return made


@pytest.fixture(scope="module")
def accuracies(tasks: dict[str, WindowTask]) -> list[list[float]]:
    """Of the independent heads' guesses by rank, on answers they have not seen."""
    return tasks["medusa"].lessons(drawn(1)).accuracies()


def test_a_heads_accuracy_falls_with_its_place_as_the_law_forgets(accuracies: list[list[float]]) -> None:
    """No guess from the state, which knows the token before the pending one only, is right more often."""
    best = [float(torch.linalg.matrix_power(LAW, head + 2)[0].max()) for head in range(AHEAD)]
    found = [ranks[0] for ranks in accuracies]
    assert found == sorted(set(found), reverse=True)
    assert found == pytest.approx(best, abs=0.05)


async def accepted(folder: Path, task: WindowTask, kind: str, **settings: Any) -> tuple[list[list[int]], list[int]]:
    """Texts, and in how many rounds so much was accepted, by depth: drafts of equal size and depth."""
    model = LawModel("large", LAW)
    save_head(folder, kind, task.head, model.digest, **settings)
    params = {"drafter": kind, "length": "fixed", "draft_length": AHEAD, "nodes": 12}
    meter, texts = SpeculationMeter(), []
    for seed in range(8):
        seq = await answer(pool_of(model, folder), "speculative", params, [seed], seed, max_tokens=100)
        meter.merge(seq.meter.speculation)
        texts.append(seq.tokens)
    return texts, meter.accepted_at


async def test_the_recurrent_head_beats_independent_ones_from_the_third_token_on(
    tasks: dict[str, WindowTask], accuracies: list[list[float]], tmp_path: Path
) -> None:
    """By what it knows of the tokens before, which independent heads guess apart from each other."""
    texts, independent = await accepted(tmp_path, tasks["medusa"], "medusa", accuracies=accuracies)
    same, recurrent = await accepted(tmp_path, tasks["redrafter"], "redrafter")
    assert same == texts
    assert sum(recurrent[2:]) > 2 * sum(independent[2:]) > 0
