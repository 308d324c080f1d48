"""Prompts of 16,384 and 32,768 tokens: right answers, and memory that grows with the length, not its square."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.backends.base import Kernels
from experiments.process_memory import watched_growth
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.types import SamplingParams

LENGTHS = [16_384, pytest.param(32_768, marks=pytest.mark.exactness)]


def bound(length: int) -> int:
    """Bytes, so many for each token: of a mask of length x length booleans alone a half, then a quarter."""
    return length << 13


@pytest.mark.parametrize("length", LENGTHS)
def test_a_quadratic_mask_would_be_seen(length: int) -> None:
    with watched_growth() as grown:
        mask = torch.ones(length, length, dtype=torch.bool)
        while grown() < bound(length):
            mask.logical_not_()
        del mask
    assert grown() > bound(length)


def garbage() -> object:
    left: list[object] = [torch.ones(64 << 20, dtype=torch.uint8)]
    left.append(left)
    return None


def kept_by_the_allocator() -> object:
    freed = [bytearray(100_000) for _ in range(900)]
    pin = bytearray(100_000)
    del freed
    return pin


@pytest.mark.parametrize("earlier_work", [garbage, kept_by_the_allocator])
def test_earlier_work_does_not_hide_growth(earlier_work: Callable[[], object]) -> None:
    pin = earlier_work()
    with watched_growth() as grown:
        gc.collect()
        kept = torch.ones(48 << 20, dtype=torch.uint8)
        until = time.monotonic() + 5.0
        while grown() <= kept.nbytes // 2 and time.monotonic() < until:
            kept.add_(1)
    assert grown() > kept.nbytes // 2
    del pin


@pytest.mark.parametrize("length", LENGTHS)
def test_a_long_prompt_is_read_right_in_linear_memory(length: int) -> None:
    # In a process of its own: among what thousands of tests have left of the heap, blocks that are freed and taken
    # again do not fit each other's places, and it grows by more than is ever in use.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as process:
        grown = process.submit(growth_in_reading, length).result()
    assert set(grown) == {"native", "torch"}
    assert max(grown.values()) < bound(length), grown


def growth_in_reading(length: int) -> dict[Kernels, int]:
    """Bytes that this process grew by while each kind of kernels read a prompt as the plain forward reads it."""
    prompt = torch.randint(0, 256, (length - 1,), generator=torch.Generator().manual_seed(0)).tolist()
    logits: dict[Kernels, torch.Tensor] = {}

    async def read(kernels: Kernels) -> tuple[int, Reference]:
        config = llama_config(
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=length
        )
        # Scores of a chunk: 32 MiB at 16,384.
        model, plain = twins(config, seed=4, kernels=kernels, token_budget=256)
        assert model.max_length == length
        seq = Sequence(prompt, SamplingParams(temperature=0.0), seed=0)
        with watched_growth() as grown:
            row = (await model.extend(seq, want=ReadSpec(logits=True)))[0]
        assert row.logits is not None
        logits[kernels] = row.logits
        model.release(seq)
        await model.close()
        return grown(), plain

    kinds: tuple[Kernels, ...] = ("native", "torch")
    found = {kernels: asyncio.run(read(kernels)) for kernels in kinds}
    expected = found["native"][1].logits(prompt)[-1]  # the weights are the same
    for got in logits.values():
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
    return {kernels: grown for kernels, (grown, _) in found.items()}
