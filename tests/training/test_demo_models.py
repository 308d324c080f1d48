"""The shipped pair: one vocabulary, the promised sizes, and a large model that is really better."""

import json
from pathlib import Path

import pytest
import torch

from training.data import arithmetic
from training.evaluate_demo import EVALUATION, load_pair_member
from training.evaluation import Accuracy, measure
from training.model_card import CARD, write_card
from training.recipe import SHIPPED

DEMO = Path("turnout/demo")
SAMPLE = 60


def num_parameters(name: str) -> int:
    model, _ = load_pair_member(DEMO / name)
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_and_ratio() -> None:
    small, large = num_parameters("small"), num_parameters("large")
    assert 500_000 <= small <= 600_000
    assert 6_000_000 <= large <= 7_000_000
    assert large >= 10 * small


def test_pair_shares_one_vocabulary_and_template() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (DEMO / "small" / name).read_bytes() == (DEMO / "large" / name).read_bytes()
    configs = [json.loads((DEMO / name / "config.json").read_text()) for name in SHIPPED]
    for key in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings", "model_type"):
        assert configs[0][key] == configs[1][key]
    assert configs[0]["vocab_size"] == 1024
    assert configs[0]["max_position_embeddings"] == 2048


def test_demo_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 60_000_000


def test_large_beats_small_on_the_middle_grade() -> None:
    problems = arithmetic.heldout(arithmetic.MIDDLE_DIFFICULTY, SAMPLE, seed=2)
    shares = {name: measure(*load_pair_member(DEMO / name), problems, arithmetic.is_correct).share for name in SHIPPED}
    # A small sample of what the evaluation file holds in full; see the test below for the promised gap.
    assert shares["large"] >= 0.8
    assert shares["large"] - shares["small"] >= 0.1
    assert shares["small"] >= 0.3


def test_the_evaluation_shows_the_promised_gap() -> None:
    evaluation = json.loads((DEMO / EVALUATION).read_text(encoding="utf-8"))
    share = {}
    for name in SHIPPED:
        [row] = [
            row
            for row in evaluation[name]
            if (row["task"], row["difficulty"]) == (arithmetic.TASK, arithmetic.MIDDLE_DIFFICULTY)
        ]
        assert row["num_problems"] >= 500
        share[name] = row["num_right"] / row["num_problems"]
    assert share["large"] >= 0.9
    assert share["large"] - share["small"] >= 0.2


def test_small_knows_when_it_may_be_wrong() -> None:
    """Its mean entropy at the first digit of a result exceeds that at copied operands."""
    model, tokenizer = load_pair_member(DEMO / "small")
    at_results: list[float] = []
    at_copies: list[float] = []
    for problem in arithmetic.heldout(arithmetic.MIDDLE_DIFFICULTY, 30, seed=2):
        prefix = f"<|user|>{problem.prompt}<|assistant|>"
        ids = tokenizer.encode(prefix + problem.answer, return_tensors="pt")
        with torch.inference_mode():
            log_probs = model(ids).logits[0].log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        pieces = tokenizer.convert_ids_to_tokens(ids[0])
        for position in range(len(tokenizer.encode(prefix)), len(pieces)):
            if pieces[position - 1] == "=" and pieces[position].isdigit():
                at_results.append(float(entropy[position - 1]))
            elif pieces[position - 1] in "+-*" and pieces[position].isdigit():
                at_copies.append(float(entropy[position - 1]))
    assert sum(at_results) / len(at_results) > sum(at_copies) / len(at_copies) > 0


@pytest.mark.parametrize(
    ("right", "total", "low", "high"), [(50, 100, 0.4038, 0.5962), (100, 100, 0.9630, 1.0), (0, 10, 0.0, 0.2775)]
)
def test_wilson_interval_against_published_values(right: int, total: int, low: float, high: float) -> None:
    assert Accuracy(right, total).interval == pytest.approx((low, high), abs=1e-4)


def test_card_is_what_the_evaluation_says() -> None:
    evaluation = json.loads((DEMO / EVALUATION).read_text())
    assert write_card(DEMO) == (DEMO / CARD).read_text(encoding="utf-8")
    middle = {
        name: next(
            row
            for row in evaluation[name]
            if row["task"] == "arithmetic" and row["difficulty"] == arithmetic.MIDDLE_DIFFICULTY
        )
        for name in SHIPPED
    }
    shares = {name: row["num_right"] / row["num_problems"] for name, row in middle.items()}
    assert all(row["num_problems"] >= 500 for row in middle.values())
    assert shares["large"] >= 0.9
    assert shares["large"] - shares["small"] >= 0.2
