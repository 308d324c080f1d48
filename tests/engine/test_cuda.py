"""The same equalities on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.pool import LocalPool
from tests.engine.architectures import CONFIGS, assert_equals_plain_forward
from tests.engine.harness import answer, ask_all, assert_claimed, pair_config
from tests.engine.mixed import assert_same_reply, mixed_calls

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is false"),
]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
async def test_tokens_and_logits_equal_the_plain_forward_in_a_ragged_batch(name: str, fast: bool) -> None:
    await assert_equals_plain_forward(name, fast, "cuda")


async def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_on_the_cpu(pool: LocalPool, pair_folder: Path) -> None:
    calls = mixed_calls()
    config = pair_config(pair_folder, device="cuda", block_size=8, token_budget=48)
    on_gpu = LocalPool.load("pair", config)
    on_cpu = await ask_all(pool, calls)
    alone = [await answer(on_gpu, call) for call in calls]
    together = await ask_all(on_gpu, calls)
    for call, first, second, third in zip(calls, on_cpu, alone, together, strict=True):
        assert_same_reply(pair_folder, call, second, third)
        if call.params.get("verifier") != "rejection":
            assert_same_reply(pair_folder, call, first, second)
        if call.method != "speculative":
            assert_claimed(pair_folder, call, third)
    assert (on_gpu.stats().sequences, on_gpu.stats().used_blocks) == (0, 0)
    await on_gpu.close()
