"""Answers that fill a context as long as the whole cache: drafts shrink towards its end, and nothing fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.pool import LocalPool
from tests.engine.harness import ask, pair_config
from turnout.types import FinishReason

CONTEXT = 256
TREES = ["sequoia", "lookahead", "token_recycling", "dyspec", "rsd_s", "rsd_c", "staged", "model_tree", "vocab_trim"]
OTHERS = ["model_sequences", "rasd", "aded", "swift", "jacobi", "easyspec", "clasp", "model_chain", "input_copy"]


@pytest.fixture
async def full(pair_folder: Path) -> AsyncIterator[LocalPool]:
    """Every member's cache holds exactly one sequence of the longest kind, and nothing beside it."""
    config = pair_config(pair_folder, block_size=8, token_budget=512)
    for name, layers in (("small", 2), ("large", 3)):
        slot = 2 * layers * 2 * 16 * 4
        config.models[name] = config.models[name].model_copy(update={"kv_memory_bytes": CONTEXT * slot})
    pool = LocalPool.load("pair", config)
    for model in pool.engines.values():
        assert model.max_length == model.pool.num_blocks * model.pool.block_size == CONTEXT
    yield pool
    await pool.close()


@pytest.mark.parametrize("drafter", TREES + OTHERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_drafted_answer_goes_on_to_the_last_place(full: LocalPool, drafter: str, temperature: float) -> None:
    prompt = [65 + i % 7 for i in range(CONTEXT - 70)]
    options = {"max_tokens": 100, "ignore_eos": True, "temperature": temperature}
    plain = await ask(full, prompt, **options)
    assert (len(plain.ids), plain.reasons) == (70, [FinishReason.LENGTH])
    drafted = await ask(full, prompt, "speculative", {"drafter": drafter}, **options)
    assert (drafted.ids, drafted.reasons) == (plain.ids, plain.reasons)
