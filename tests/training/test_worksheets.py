"""Worksheets: long answers that follow from their question, judged line by line; none is taught that is held out."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data import arithmetic, worksheets
from training.data.mixture import TrainingStream
from training.data.problem import is_heldout
from training.recipe import RECIPES, WORKSHEETS
from training.train_demo import Trainer

SHIPPED = Path("turnout/demo/small")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(SHIPPED)
    return loaded


@pytest.mark.parametrize("difficulty", worksheets.DIFFICULTIES)
def test_answers_are_long_and_fit_a_training_row(tokenizer: PreTrainedTokenizerFast, difficulty: int) -> None:
    sheets = worksheets.heldout(difficulty, 40, seed=1)
    assert sheets == worksheets.heldout(difficulty, 40, seed=1)
    assert len({sheet.prompt for sheet in sheets}) == 40
    for sheet in sheets:
        assert worksheets.FEWEST <= len(sheet.result.split()) <= worksheets.MOST
        answer = len(tokenizer.encode(sheet.answer))
        assert 300 <= answer <= RECIPES["large-worksheets"].row_len - len(tokenizer.encode(sheet.prompt)) - 16


def test_every_problem_of_a_heldout_sheet_is_held_out_and_none_of_a_taught_one() -> None:
    rng = random.Random(2)
    for _ in range(20):
        assert not any(map(is_heldout, worksheets.draw_training(rng, 3).key.split("\n")))
    assert all(is_heldout(key) for sheet in worksheets.heldout(2, 20) for key in sheet.key.split("\n"))


def test_results_are_those_of_the_expressions() -> None:
    sheet = worksheets.heldout(3, 1)[0]
    solved = [arithmetic.solve(key) for key in sheet.key.split("\n")]
    assert [each.value for each in solved if each] == [int(result) for result in sheet.result.split()]


def test_a_sheet_is_judged_by_the_number_of_each_result() -> None:
    sheet = worksheets.heldout(3, 1, seed=5)[0]
    count = len(sheet.result.split())
    assert worksheets.is_correct(sheet, sheet.answer)
    first, rest = sheet.answer.split("\n2) ", 1)
    wrong = first.rpartition(": ")[0] + ": -7\n2) " + rest
    assert worksheets.share_right(sheet, wrong) == pytest.approx(1 - 1 / count)
    assert not worksheets.is_correct(sheet, wrong)
    assert worksheets.share_right(sheet, wrong + "\n" + first) == pytest.approx(1 - 1 / count)  # the first one counts
    assert worksheets.share_right(sheet, "2) " + rest) == pytest.approx(1 - 1 / count)  # left out
    assert worksheets.share_right(sheet, first) == pytest.approx(1 / count)  # cut off
    assert worksheets.share_right(sheet, "") == 0.0


def test_unknown_difficulties_are_refused() -> None:
    with pytest.raises(ValueError, match="difficulty must be one of"):
        worksheets.heldout(5, 1)


def test_the_course_begins_from_the_shipped_weights_and_reads_no_python(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [recipe.begins_from for recipe in WORKSHEETS] == ["demo:small", "demo:large"]
    assert all(sum(part for _, part in recipe.shares.chats) == pytest.approx(1.0) for recipe in WORKSHEETS)
    recipe = replace(WORKSHEETS[0], num_rows=2)
    trainer = Trainer(recipe, tokenizer, TrainingStream(recipe, tokenizer))
    trainer.begin_from_folder(SHIPPED)
    from transformers import AutoModelForCausalLM

    shipped = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, shipped[name]) for name, value in trainer.model.state_dict().items())
    assert "1) " in tokenizer.decode(TrainingStream(recipe, tokenizer).batch(0).token_ids[0])
