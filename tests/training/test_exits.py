"""Heads behind an early exit: the states they learn from, the loss, and that they come to say what the model says."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.engine.harness import engine_model
from training.distil import Answers, distil
from training.exits import EesdRecipe, ExitLessons, ExitRecipe, ExitTask, KangarooRecipe
from training.fitting import Schedule, fit
from training.heads import Frozen
from training.length_data import Source
from training.random_models import llama_config, random_model
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

LAYERS, EXIT = 4, 1
TINY = llama_config(40, hidden_size=32, num_hidden_layers=LAYERS, pad_token_id=0, eos_token_id=1)
RECIPES = [KangarooRecipe(EXIT), EesdRecipe(EXIT)]
SHARED = [9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7, 6]  # what prompts begin with, so that the cache has it


def tiny() -> Any:
    return random_model(deepcopy(TINY), seed=2, spread=0.2)


def source_of(count: int, max_tokens: int = 10) -> Source:
    prompts = [[*SHARED, 2 + index % 30] for index in range(count)]
    return Source(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True), frozenset(), seed=1)


@pytest.fixture
async def answers() -> Answers:
    return await distil(engine_model(tiny(), block_size=4), source_of(48), exit_layer=EXIT)


async def test_states_are_those_behind_the_exit_at_every_place() -> None:
    """Of prompts, too, that the cache has in part."""
    source = Source([[*SHARED, 3], [*SHARED, 4, 5], [7]], SamplingParams(max_tokens=6, ignore_eos=True))
    found = await distil(engine_model(tiny(), block_size=4), source, exit_layer=EXIT)
    assert found.places.tolist() == [13 + 5, 14 + 5, 1 + 5]
    at, plain = 0, tiny()
    for index, prompt in enumerate(source.prompts):
        text = [*prompt, *found.tokens[6 * index : 6 * index + 5].tolist()]
        with torch.inference_mode():
            made = plain(torch.tensor([text]), output_hidden_states=True)
        torch.testing.assert_close(
            found.exits[at : at + len(text)].float(), made.hidden_states[EXIT][0], atol=2e-3, rtol=2e-3
        )
        last = plain.lm_head(found.states[6 * index : 6 * index + 6].float())
        torch.testing.assert_close(last, made.logits[0, len(prompt) - 1 :], atol=2e-2, rtol=1e-2)
        at += len(text)
    assert at == len(found.exits)


async def test_without_an_exit_layer_no_states_are_kept() -> None:
    found = await distil(engine_model(tiny()), source_of(2), top=1)
    assert (len(found.places), len(found.exits)) == (0, 0)


@pytest.mark.parametrize("hard", [0.0, 0.25])
async def test_the_loss_is_cross_entropy_to_the_models_softmax_at_the_answers_tokens(hard: float) -> None:
    source = Source([[3, 4, 5], [7]], SamplingParams(max_tokens=4, ignore_eos=True))
    found = await distil(engine_model(tiny(), block_size=4), source, exit_layer=EXIT)
    frozen = Frozen.of(tiny())
    task = ExitTask(KangarooRecipe(EXIT, hard), frozen, 32)
    lessons = task.lessons(found)
    expected, count = 0.0, 0
    for index, (prompt, first_place, first_token) in enumerate(((3, 0, 0), (1, 6, 4))):
        states = found.exits[first_place : first_place + prompt + 3].float()
        said = frozen.logits(task.head(states[None])[0]).log_softmax(-1)[prompt - 1 :]
        target = frozen.logits(found.states[first_token : first_token + 4].float()).softmax(-1)
        drawn = said[torch.arange(4), found.tokens[first_token : first_token + 4]]
        expected -= ((1 - hard) * (target * said).sum(-1) + hard * drawn).sum().item()
        count += 4
        assert lessons.batch(torch.tensor([index])).taught.sum() == 4
    assert lessons.loss(torch.arange(2)).item() == pytest.approx(expected / count, rel=1e-5)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
async def test_a_head_learns_to_say_what_the_model_says(recipe: ExitRecipe, answers: Answers) -> None:
    torch.manual_seed(0)
    frozen = Frozen.of(tiny())
    before = {name: each.clone() for name, each in frozen.output.state_dict().items()}
    task = recipe.task(frozen, 32)
    lessons = task.lessons(answers)
    bare = agreement(task, lessons)
    losses = fit(
        task.head, lessons.loss, len(lessons), Schedule(steps=120, batch_size=24, learning_rate=1e-2), save_every=40
    )
    assert losses[0] > losses[1] > losses[2]
    assert agreement(task, lessons) > bare + 0.15
    assert all(each.grad is not None for each in task.head.parameters())
    assert all(torch.equal(each, before[name]) for name, each in frozen.output.state_dict().items())
    assert all(each.grad is None for each in frozen.output.parameters())


@torch.no_grad()
def agreement(task: ExitTask, lessons: ExitLessons) -> float:
    """How often the most probable tokens are the same."""
    traces = lessons.batch(torch.arange(len(lessons)))
    right = task.frozen.logits(traces.last).argmax(-1)
    return float((task.predict(traces).argmax(-1) == right).float().mean())


async def test_accuracies_count_the_tokens_that_were_drawn(answers: Answers) -> None:
    task = KangarooRecipe(EXIT).task(Frozen.of(tiny()), 32)
    lessons = task.lessons(answers)
    [ranks] = lessons.accuracies()
    traces = lessons.batch(torch.arange(len(lessons)))
    order = task.predict(traces).argsort(dim=-1, descending=True)
    for rank in (0, 3, 9):
        assert ranks[rank] == pytest.approx(float((order[:, rank] == traces.tokens).float().mean()), abs=5e-3)


def test_the_exit_is_a_quarter_of_the_layers_down_unless_told() -> None:
    assert [KangarooRecipe().exit_layer(layers) for layers in (2, 8, 40)] == [1, 2, 10]
    assert EesdRecipe(3).exit_layer(8) == 3
    for layer in (0, 8):
        with pytest.raises(TurnoutError, match=r"exit_layer: .* allowed: 1 to 7"):
            EesdRecipe(layer).exit_layer(8)


def test_untrained_a_head_says_what_the_models_own_head_says_at_the_exit() -> None:
    plain = tiny()
    plain.model.norm.weight.data.uniform_(0.5, 1.5)
    for recipe in RECIPES:
        task = recipe.task(Frozen.of(plain), 32)
        states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(task.head(states), plain.model.norm(states))
        assert task.settings() == {"exit_layer": EXIT}
