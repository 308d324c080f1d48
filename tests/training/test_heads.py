"""The data draft heads learn from, the loop that trains them, and what they reach on a model that is fully known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decoding.length_heads import Head
from tests.decoding.head_models import StateModel
from training.distil import SHARD, Answers, distil
from training.fitting import Schedule, fit
from training.heads import Batch, Frozen, Windows, WindowTask, loss_of, rank_accuracies
from training.length_data import Source
from training.medusa import MedusaRecipe, MedusaTask
from training.redrafter import ReDrafterRecipe, ReDrafterTask
from turnout.types import SamplingParams

AFTER = [3, 4, 0, 5, 2, 6, 1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
RECIPES = [MedusaRecipe(heads=3), MedusaRecipe(heads=3, own_matrices=True), ReDrafterRecipe(ahead=3)]


def source_of(prompts: list[list[int]], sampling: SamplingParams = GREEDY, seed: int = 0) -> Source:
    return Source(prompts, sampling, frozenset(), seed)


def frozen_cycle() -> Frozen:
    """The ends of `StateModel(AFTER)` as modules."""
    embed, output = nn.Embedding(7, 7), nn.Linear(7, 7, bias=False)
    embed.weight.data, output.weight.data = torch.eye(7), 8.0 * torch.eye(7)
    embed.requires_grad_(False)
    output.requires_grad_(False)
    return Frozen(embed, output)


def shards(folder: Path) -> list[Path]:
    """What was kept, the smallest first."""
    return sorted(folder.iterdir(), key=lambda file: file.stat().st_size)


async def cycle_answers() -> Answers:
    return await distil(StateModel("m", AFTER), source_of([[token] for token in range(7)]))


async def test_answers_are_the_models_own_with_the_state_that_chose_each_token() -> None:
    answers = await distil(StateModel("m", AFTER), source_of([[0], [4]]), top=2)
    assert answers.lengths.tolist() == [12, 12]
    assert answers.tokens[:8].tolist() == [3, 5, 6, 1, 4, 2, 0, 3]
    assert answers.tokens[12:15].tolist() == [2, 0, 3]
    assert torch.equal(answers.states.argmax(-1), answers.tokens)
    assert torch.equal(answers.top_ids[:, 0], answers.tokens)
    expected = torch.tensor([8.0, *[0.0] * 6]).log_softmax(-1)[:2]
    torch.testing.assert_close(answers.top_logprobs, expected.expand(24, 2))


async def test_what_has_been_answered_is_not_answered_again(tmp_path: Path) -> None:
    model, prompts = StateModel("m", AFTER), [[index % 7] for index in range(SHARD + 3)]
    sampled = SamplingParams(temperature=2.0, max_tokens=6)
    first = await distil(model, source_of(prompts, sampled), 1, tmp_path)
    files = shards(tmp_path)
    assert len(files) == 2
    forwards = model.forwards
    again = await distil(model, source_of(prompts, sampled), 1, tmp_path)
    assert model.forwards == forwards
    files[0].unlink()  # as if the run had been interrupted before its last shard
    resumed = await distil(model, source_of(prompts, sampled), 1, tmp_path)
    assert 0 < model.forwards - forwards < forwards / 2
    for name, tensor in vars(first).items():
        assert torch.equal(tensor, getattr(again, name))
        assert torch.equal(tensor, getattr(resumed, name))
    other = await distil(model, source_of(prompts, sampled, seed=1), 1, tmp_path)
    assert not torch.equal(other.tokens, first.tokens)


def test_windows_end_with_the_answer() -> None:
    tokens = torch.tensor([5, 6, 7, 8, 9, 4])
    top = tokens[:, None]
    answers = Answers(torch.tensor([3, 1, 2]), tokens, torch.arange(6.0)[:, None].half(), top, torch.zeros(6, 1))
    windows = Windows(answers, 2)
    batch = windows.batch(torch.arange(len(windows)))
    assert batch.states.flatten().tolist() == [0.0, 1.0, 4.0]
    assert batch.tokens[:, 0].tolist() == [5, 6, 9]
    assert batch.known.tolist() == [[True, True], [True, False], [True, False]]
    assert batch.tokens[:, 1:][batch.known].tolist() == [6, 7, 7, 4]
    assert batch.top_ids[batch.known].flatten().tolist() == [6, 7, 7, 4]
    with pytest.raises(ValueError, match="two tokens"):
        Windows(Answers(torch.tensor([1]), tokens[:1], answers.states[:1], top[:1], torch.zeros(1, 1)), 2)


class Fixed(WindowTask):
    """Says the same at every place: logits [b, n, vocab]."""

    def __init__(self, logits: torch.Tensor, weights: tuple[float, ...]) -> None:
        self.head, self.weights, self._logits = Head(), weights, logits

    def predict(self, batch: Batch) -> torch.Tensor:
        return self._logits


def test_the_loss_is_the_weighted_mean_over_what_is_known() -> None:
    logits = torch.tensor([[[0.0, 1.0], [2.0, 0.0]], [[0.0, 3.0], [9.0, 9.0]]])
    tokens = torch.tensor([[0, 1, 1], [0, 0, 0]])
    known = torch.tensor([[True, True], [True, False]])
    top_ids, top_logprobs = torch.tensor([0, 1]).expand(2, 2, 2), torch.tensor([0.75, 0.25]).log().expand(2, 2, 2)
    batch = Batch(torch.zeros(2, 1), tokens, known, top_ids, top_logprobs)
    task = Fixed(logits, (1.0, 0.8))

    def nats(a: float, b: float) -> float:
        """Cross-entropy of the first of two logits."""
        return math.log(1 + math.exp(b - a))

    hard = (nats(1, 0) + nats(0, 3)) / 2 + 0.8 * nats(0, 2)
    assert loss_of(task, batch).item() == pytest.approx(hard)
    depth1 = (0.75 * nats(0, 1) + 0.25 * nats(1, 0) + 0.75 * nats(0, 3) + 0.25 * nats(3, 0)) / 2
    depth2 = 0.75 * nats(2, 0) + 0.25 * nats(0, 2)
    task.soft = True
    assert loss_of(task, batch).item() == pytest.approx(depth1 + 0.8 * depth2)


async def test_rank_accuracies_count_each_rank() -> None:
    windows = Windows(await cycle_answers(), 2)
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    task = Fixed(logits, (1.0, 1.0))

    def predict(batch: Batch) -> torch.Tensor:
        return logits.expand(len(batch.tokens), 2, 7)

    task.predict = predict  # type: ignore[method-assign]
    found = rank_accuracies(task, windows, batch_size=5)
    for depth in (1, 2):
        every = windows.batch(torch.arange(len(windows)))
        seen = every.tokens[:, depth][every.known[:, depth - 1]].tolist()
        assert found[depth - 1] == pytest.approx([seen.count(token) / len(seen) for token in range(6, -1, -1)])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
async def test_gradients_go_into_the_head_only(recipe: MedusaRecipe | ReDrafterRecipe) -> None:
    frozen = frozen_cycle()
    task = recipe.task(frozen, 7)
    lessons = task.lessons(await cycle_answers())
    before = {name: each.clone() for name, each in task.head.state_dict().items()}
    fit(task.head, lessons.loss, len(lessons), Schedule(steps=3, batch_size=16, warmup_steps=1))
    for each in (*frozen.embed.parameters(), *frozen.output.parameters()):
        assert each.grad is None
        assert not each.requires_grad
    assert torch.equal(frozen.output.weight, 8.0 * torch.eye(7))
    assert torch.equal(frozen.embed.weight, torch.eye(7))
    assert all(each.grad is not None for each in task.head.parameters())
    assert any(not torch.equal(before[name], each) for name, each in task.head.state_dict().items())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
async def test_a_head_learns_all_there_is_to_know_of_a_deterministic_model(
    recipe: MedusaRecipe | ReDrafterRecipe,
) -> None:
    torch.manual_seed(0)
    task = recipe.task(frozen_cycle(), 7)
    lessons = task.lessons(await cycle_answers())
    before = [ranks[0] for ranks in lessons.accuracies()]
    schedule = Schedule(steps=300, batch_size=32, learning_rate=0.03, clip=5.0)
    losses = fit(task.head, lessons.loss, len(lessons), schedule, save_every=100)
    assert [ranks[0] for ranks in lessons.accuracies()] == [1.0, 1.0, 1.0]
    assert max(before) < 0.5
    assert losses[2] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
async def test_an_interrupted_run_ends_bit_for_bit_the_same(
    recipe: MedusaRecipe | ReDrafterRecipe, tmp_path: Path
) -> None:
    answers, schedule = await cycle_answers(), Schedule(steps=12, batch_size=32, warmup_steps=2)

    def fresh() -> MedusaTask | ReDrafterTask:
        torch.manual_seed(0)
        return recipe.task(frozen_cycle(), 7)

    def stop(step: int, loss: float) -> None:
        if step == 7:
            raise KeyboardInterrupt

    def run(task: MedusaTask | ReDrafterTask, checkpoint: Path | None, on_step: Any) -> list[float]:
        lessons = task.lessons(answers)
        return fit(task.head, lessons.loss, len(lessons), schedule, checkpoint, 5, on_step)

    whole, broken = fresh(), fresh()
    losses = run(whole, None, lambda step, loss: None)
    with pytest.raises(KeyboardInterrupt):
        run(broken, tmp_path / "state.pt", stop)
    torch.manual_seed(99)
    resumed = recipe.task(frozen_cycle(), 7)
    steps: list[int] = []
    assert run(resumed, tmp_path / "state.pt", lambda step, loss: steps.append(step)) == losses
    assert steps == [6, 7, 8, 9, 10, 11, 12]
    for name, each in whole.head.state_dict().items():
        assert torch.equal(each, resumed.head.state_dict()[name])
    assert not all(torch.equal(each, whole.head.state_dict()[name]) for name, each in broken.head.state_dict().items())


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    schedule = Schedule(steps=100, learning_rate=1.0, warmup_steps=10)
    rates = [schedule.lr_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.09)))
    assert rates[50] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)


def test_the_recurrent_heads_first_word_is_the_models() -> None:
    frozen = frozen_cycle()
    torch.manual_seed(0)
    task = ReDrafterRecipe(ahead=2).task(frozen, 7)
    states = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    said = task.head.logits(states, torch.zeros(4, 7))
    torch.testing.assert_close(said, frozen.logits(states))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_matrices_of_the_heads_own_begin_as_the_models_and_part_from_it(softcap: float | None) -> None:
    frozen = replace(frozen_cycle(), softcap=softcap)
    shared, own = (MedusaRecipe(heads=2, own_matrices=each).task(frozen, 7) for each in (False, True))
    states = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    batch = Batch(states, *(torch.zeros(4, 2) for _ in range(4)))
    assert torch.equal(own.predict(batch), shared.predict(batch))
    assert torch.equal(own.predict(batch), frozen.logits(states)[:, None].expand(-1, 2, -1))
    outputs = own.head.outputs
    assert shared.head.outputs is None
    assert outputs is not None
    assert len({each.weight.data_ptr() for each in (*outputs, frozen.output)}) == 3


def test_a_cap_on_logits_is_the_models_own() -> None:
    output = nn.Linear(2, 3, bias=False)
    states = torch.tensor([[30.0, -40.0]])
    capped = Frozen(nn.Identity(), output, softcap=5.0).logits(states)
    torch.testing.assert_close(capped, torch.tanh(output(states) / 5.0) * 5.0)
