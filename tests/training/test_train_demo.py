"""The trainer: an interrupted run ends where an uninterrupted one does, and runs do learn."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data.mixture import EASY_GRADES, FINAL_GRADES, TrainingStream, grade_weights
from training.layer_skip import LayerSkip
from training.packing import IGNORED
from training.recipe import RECIPES, SHIPPED, Recipe, Shares
from training.train_demo import Trainer

TINY = Recipe(
    name="tiny",
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=48,
    total_steps=12,
    decay_steps=3,
    warmup_steps=2,
    curriculum_steps=4,
    num_rows=4,
    row_len=128,
    autocast=False,
    shares=Shares(python=0.0),
)
LEFT_EARLY = replace(TINY, num_layers=4, layer_skip=LayerSkip(dropout=0.5, scale=1.0, every=2))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(Path("turnout/demo/large"))
    return loaded


def make_trainer(tokenizer: PreTrainedTokenizerFast, recipe: Recipe = TINY) -> Trainer:
    return Trainer(recipe, tokenizer, TrainingStream(recipe, tokenizer))


@pytest.mark.parametrize("recipe", [TINY, LEFT_EARLY], ids=["plain", "left early"])
def test_resumed_run_equals_uninterrupted_run(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, recipe: Recipe
) -> None:
    straight = make_trainer(tokenizer, recipe)
    losses = [straight.step() for _ in range(6)]

    interrupted = make_trainer(tokenizer, recipe)
    first_losses = [interrupted.step() for _ in range(3)]
    interrupted.save(tmp_path / "checkpoint.pt")
    resumed = make_trainer(tokenizer, recipe)
    resumed.restore(tmp_path / "checkpoint.pt")
    later_losses = [resumed.step() for _ in range(3)]

    assert first_losses + later_losses == losses
    assert resumed.progress.step == straight.progress.step == 6
    assert resumed.progress.num_tokens == straight.progress.num_tokens > 0
    for (name, expected), actual in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, actual), name
    assert not list(tmp_path.glob("*.partial"))


def test_training_lowers_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = make_trainer(tokenizer, replace(TINY, decay_steps=1, total_steps=40))
    losses = [trainer.step() for _ in range(40)]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_batches_depend_on_seed_and_step_only(tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(step: int, recipe: Recipe = TINY) -> list[list[int]]:
        rows: list[list[int]] = TrainingStream(recipe, tokenizer).batch(step).token_ids.tolist()
        return rows

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)
    assert ids(3) != ids(3, replace(TINY, seed=21))


def test_batches_are_well_filled_and_teach_answers_only(tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = replace(TINY, num_rows=8, row_len=256)
    batch = TrainingStream(recipe, tokenizer).batch(100)
    assert batch.num_tokens > 0.9 * 8 * 256
    assert all(row.max() > 0 for row in batch.document_ids)  # more than one document in every row
    taught = tokenizer.decode(batch.targets[batch.targets != IGNORED])
    assert "Answer:" in taught
    assert "<|user|>" not in taught
    assert "<|assistant|>" not in taught


def test_python_rows_are_taught_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = TrainingStream(replace(TINY, shares=Shares(python=1.0)), tokenizer).batch(0)
    assert torch.equal(batch.targets[:, :-1], batch.token_ids[:, 1:])


def test_each_kind_of_question_gets_its_share_of_the_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    shares = Shares(python=0.0, chats=(("templates", 0.75), ("arithmetic", 0.25)), system_message=0.0, second_turn=0.0)
    recipe = replace(TINY, num_rows=8, row_len=512, shares=shares)
    batch = TrainingStream(recipe, tokenizer).batch(0)
    forms = 0
    for row, documents in zip(batch.token_ids, batch.document_ids, strict=True):
        for number in range(int(documents.max()) + 1):
            ids = row[documents == number]
            forms += len(ids) * ("Write an" in tokenizer.decode(ids) or "Write a record" in tokenizer.decode(ids))
    assert forms / batch.num_tokens == pytest.approx(0.75, abs=0.05)


def test_a_second_course_begins_from_the_weights_of_the_first(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    first = make_trainer(tokenizer)
    first.step()
    first.save(tmp_path / "checkpoint.pt")
    second = make_trainer(tokenizer, replace(TINY, seed=21))
    second.begin_from(tmp_path / "checkpoint.pt")
    assert second.progress.step == 0
    for (name, expected), actual in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(expected, actual), name


def test_each_shipped_model_has_its_courses() -> None:
    for name in SHIPPED:
        recipe = RECIPES[name]
        assert sum(part for _, part in recipe.shares.chats) == pytest.approx(1.0)
        base = RECIPES[recipe.begins_from]
        assert not base.begins_from
        assert base.seed != recipe.seed  # else its first steps are those of the first course


def test_learning_rate_warms_up_stays_and_decays() -> None:
    scales = [TINY.lr_scale(step) for step in range(TINY.total_steps)]
    assert scales[0] == 0.5
    assert scales[1:10] == [1.0] * 9
    assert scales[10:] == pytest.approx([2 / 3, 1 / 3])


def test_a_finish_rises_once_more_and_falls_to_zero() -> None:
    recipe = replace(TINY, total_steps=16, finish_steps=4, finish_peak=0.5)
    assert [recipe.lr_scale(step) for step in range(12)] == [TINY.lr_scale(step) for step in range(12)]
    assert [recipe.lr_scale(step) for step in range(12, 16)] == [0.5, 0.375, 0.25, 0.125]


def test_curriculum_ends_at_the_final_mixture() -> None:
    assert grade_weights(0, 4) == list(EASY_GRADES)
    assert grade_weights(4, 4) == pytest.approx(FINAL_GRADES)
    assert grade_weights(2, 4) == pytest.approx([(a + b) / 2 for a, b in zip(EASY_GRADES, FINAL_GRADES, strict=True)])
    assert sum(EASY_GRADES) == pytest.approx(1.0)
    assert sum(FINAL_GRADES) == pytest.approx(1.0)


def test_a_recipe_must_have_room_for_its_schedule() -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        replace(RECIPES["small"], total_steps=10)
