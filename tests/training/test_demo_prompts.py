"""Prompts to train on: every kind the demo models were taught, and nothing that is held out."""

from collections import Counter
from pathlib import Path

import pytest

from training.data import edits
from training.data.python_sources import read_sources
from training.demo_prompts import PYTHON, SHARES, heldout_prompts, read_lines, training_prompts
from training.recipe import RECIPES


def test_every_kind_of_the_demo_models_course_is_asked() -> None:
    taught = {kind for name in ("small", "large-exits") for kind, share in RECIPES[name].shares.chats if share}
    assert set(SHARES) == {*taught, PYTHON}
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_prompts_are_drawn_by_their_shares_and_the_same_for_a_seed() -> None:
    prompts = training_prompts(1200, "a")
    assert prompts == training_prompts(1200, "a") != training_prompts(1200, "b")
    counted = Counter(prompt.is_chat for prompt in prompts)
    assert counted[False] / 1200 == pytest.approx(SHARES[PYTHON], abs=0.04)
    assert all(prompt.is_chat for prompt in training_prompts(50, "a", {"edits": 0.5, "lists": 0.5}))


def test_openings_are_of_training_modules_alone_and_have_something_behind_them() -> None:
    training, heldout = ("\x00".join(read_sources(each)) for each in (False, True))
    openings = [prompt.text for prompt in training_prompts(60, "a", {PYTHON: 1.0})]
    for text in openings:
        at = training.index(text)
        assert at == 0 or training[at - 1] in "\n\x00"
        assert "\x00" not in training[at : at + len(text) + 200]
    unseen = [prompt.text for prompt in heldout_prompts(200) if not prompt.is_chat]
    assert len(unseen) == round(200 * SHARES[PYTHON])
    assert all(text in heldout and text not in training for text in unseen)


def test_no_prompt_to_train_on_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    heldout = {prompt.text for prompt in heldout_prompts(400)}
    asked = {prompt.text for prompt in training_prompts(1000, "a")}
    assert not heldout & asked
    # The same check finds them where a kind draws from the wrong side.
    monkeypatch.setattr(edits, "draw_training", lambda rng, grade: edits.heldout(grade, 1, seed=21)[0])
    assert heldout & {prompt.text for prompt in training_prompts(100, "a", {"edits": 1.0})}


def test_lines_of_a_file_are_questions(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    assert [(each.text, each.is_chat) for each in read_lines(tmp_path / "lines.txt", 2)] == [
        ("one", True),
        ("two", True),
    ]
