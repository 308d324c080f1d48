"""The prompts of the comparison: enough, different, never trained on, and none too long."""

from __future__ import annotations

import pytest

from experiments.speculation.tasks import GROUPS, MOST_TOKENS, WARM_UP, code, docstrings, task_group
from pool.text import TextTokenizer
from training.data.python_sources import read_sources
from turnout.config import ModelConfig, model_path

MAX_TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(model_path(ModelConfig(path="demo:large")))


@pytest.mark.parametrize("name", list(GROUPS))
def test_prompts_are_different_and_leave_room_for_an_answer(tokenizer: TextTokenizer, name: str) -> None:
    group = task_group(name, tokenizer, 40, MAX_TOKENS)
    assert (len(group.prompts), len(group.warm_up)) == (40, WARM_UP)
    assert len({*group.prompts, *group.warm_up}) == 40 + WARM_UP
    assert all(0 < len(prompt) <= MOST_TOKENS - MAX_TOKENS for prompt in group.prompts)


@pytest.mark.parametrize("name", list(GROUPS))
def test_fewer_prompts_are_the_first_ones_of_more(tokenizer: TextTokenizer, name: str) -> None:
    few, many = (task_group(name, tokenizer, count, MAX_TOKENS) for count in (2, 5))
    assert (few.warm_up, few.prompts) == (many.warm_up, many.prompts[:2])


def test_texts_to_continue_come_from_held_out_modules() -> None:
    heldout, trained = read_sources(heldout=True), read_sources()
    assert all(any(text in source for source in heldout) for text in code())
    assert not any(text in source for text in code() for source in trained)
    # Prose, one module after the other: what stands between quotes in one of them.
    first_lines = [text.split("\n")[0] for text in docstrings()]
    assert len(first_lines) > 20
    assert all(any(line in source for source in heldout) for line in first_lines)


def test_more_prompts_than_there_are_texts_for_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match=r"code: \d+ prompts at most, got 100000"):
        task_group("code", tokenizer, 100_000, MOST_TOKENS - 2)
