"""Packed rows: what a token may see, and what it is taught."""

import pytest
import torch

from training.model import batch_loss, build_model
from training.packing import IGNORED, Document, fits, pack
from training.recipe import Recipe

TINY = Recipe(
    name="tiny",
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=24,
    total_steps=6,
    decay_steps=2,
    warmup_steps=2,
    vocabulary_size=32,
    max_positions=64,
    autocast=False,
)
FIRST = Document([5, 6, 7], [False, True, True])
SECOND = Document([8, 9], [True, True])


def test_layout_by_hand() -> None:
    batch = pack([[FIRST, SECOND]], row_len=6, pad_id=0)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.targets.tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED]]
    assert batch.num_tokens == 5


def test_mask_by_hand() -> None:
    mask = pack([[FIRST, SECOND]], row_len=6, pad_id=0).attention_mask()
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0].int().tolist() == expected


def test_questions_are_not_taught() -> None:
    question_then_answer = Document([1, 2, 3, 4], [False, False, True, True])
    batch = pack([[question_then_answer]], row_len=4, pad_id=0)
    assert batch.targets.tolist() == [[IGNORED, 3, 4, IGNORED]]


def test_packed_loss_is_the_loss_of_the_documents_alone() -> None:
    model = build_model(TINY, pad_id=0, end_id=1)
    together = batch_loss(model, pack([[FIRST, SECOND]], 8, 0), autocast=False)
    first = batch_loss(model, pack([[FIRST]], 3, 0), autocast=False)
    second = batch_loss(model, pack([[SECOND]], 2, 0), autocast=False)
    torch.testing.assert_close(together, (first * 2 + second) / 3, rtol=1e-5, atol=1e-6)


def test_rows_do_not_overflow() -> None:
    assert fits([FIRST], SECOND, row_len=5)
    assert not fits([FIRST], SECOND, row_len=4)
    with pytest.raises(ValueError, match="row 0 holds more than 4 tokens"):
        pack([[FIRST, SECOND]], row_len=4, pad_id=0)
    with pytest.raises(ValueError, match="learned must have 2 entries"):
        Document([1, 2], [True])
