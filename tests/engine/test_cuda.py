"""The same equalities on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.sdpa import SdpaStep
from engine.attention.step import Scores
from engine.backends.base import Kernels, choose_backend
from engine.backends.cuda.step import CudaStep
from engine.loading import prepare
from pool.local_pool import LocalPool
from tests.engine.architectures import CONFIGS, assert_equals_plain_forward, config_of
from tests.engine.harness import answer, ask_all, assert_claimed, pair_config
from tests.engine.layouts import Batch, random_tree
from tests.engine.mixed import assert_same_reply, mixed_calls
from tests.engine.replays import assert_replays_equal_launches
from training.random_models import random_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is false"),
]

CUDA = torch.device("cuda")
BATCHES = {
    "decode": Batch((1,) * 5, (3, 900, 0, 64, 2000), heads=8, kv_heads=2, dim=64, block_size=16),
    "verify": Batch((6, 64, 1), (30, 700, 5), {0: random_tree(5, 1), 1: random_tree(64, 2)}, dim=80, block_size=16),
    "chunks": Batch((1, 200, 5), (30, 100, 7), {2: random_tree(5, 3)}, heads=8, kv_heads=1, dim=96, block_size=16),
}


def test_auto_means_the_cuda_kernels() -> None:
    assert choose_backend("auto", CUDA).name == "cuda"


@pytest.mark.parametrize("scores", [Scores(0.1), Scores(0.1, 50, None), Scores(0.1, 9, 5.0)], ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_the_kernels_equal_torch_on_the_cpu(name: str, scores: Scores, dtype: torch.dtype, tolerance: float) -> None:
    batch = BATCHES[name]
    expected = SdpaStep(batch.layout(), batch.store()).attend(0, *batch.inputs(), scores)
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    step = CudaStep(batch.layout(), batch.store(dtype, CUDA), processors)
    got = step.attend(0, *batch.inputs(dtype, CUDA), scores)
    torch.testing.assert_close(got.float().cpu(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_graphs_equal_launched_layers(name: str) -> None:
    plan = prepare(random_model(config_of(name, num_hidden_layers=4), seed=3, spread=0.2).to(CUDA)).plan
    assert_replays_equal_launches(plan, CUDA)


@pytest.mark.parametrize("kernels", ["auto", "torch", "plain"])
@pytest.mark.parametrize("name", CONFIGS)
async def test_tokens_and_logits_equal_the_plain_forward_in_a_ragged_batch(name: str, kernels: Kernels) -> None:
    await assert_equals_plain_forward(name, kernels, "cuda")


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
