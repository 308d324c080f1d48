"""Mean and last hidden states of whole sequences, compared with `last_hidden_state` of plain Hugging Face models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec, StopCondition
from decoding.sequence import Sequence
from engine.model import EngineModel
from tests.engine.architectures import config_of
from tests.engine.harness import Reference, twins, until
from turnout.types import SamplingParams

MEAN, LAST = ReadSpec(draw=None, mean=True), ReadSpec(draw=None, hidden=frozenset({-1}))
BOTH = MEAN | LAST
LENGTHS = (1, 2, 7, 8, 23, 40)
SMALL = {"block_size": 4, "token_budget": 7}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * length + seed)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def sequence(prompt: list[int]) -> Sequence:
    return Sequence(prompt, SamplingParams(max_tokens=8, temperature=0.0), seed=0)


@torch.inference_mode()
def states_of(plain: Reference, prompt: list[int]) -> torch.Tensor:
    """float32 [n, hidden]."""
    states: torch.Tensor = plain.model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    return states.float()


def assert_pooled(row: Any, states: torch.Tensor) -> None:
    torch.testing.assert_close(row.mean, states.mean(0), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(row.hidden[-1], states[-1], atol=2e-5, rtol=1e-4)


async def pooled(model: EngineModel, prompt: list[int], want: ReadSpec = BOTH) -> Any:
    seq = sequence(prompt)
    try:
        [row] = await model.extend(seq, want=want)
    finally:
        model.release(seq)
    return row


@pytest.mark.parametrize("name", ["llama", "gemma2"])
async def test_ragged_sequences_in_chunks_are_pooled_as_in_one_plain_forward(name: str) -> None:
    model, plain = twins(config_of(name), seed=3, **SMALL)
    prompts = [prompt_of(length) for length in LENGTHS]
    rows = await asyncio.gather(*(pooled(model, prompt) for prompt in prompts))
    for row, prompt in zip(rows, prompts, strict=True):
        assert_pooled(row, states_of(plain, prompt))
    assert (model.stats().sequences, model.stats().used_blocks, model.stats().waiting) == (0, 0, 0)


async def test_tokens_after_the_sequence_are_pooled_too_and_only_the_first_row_is() -> None:
    model, plain = twins(config_of("llama"), seed=3, **SMALL)
    prompt = prompt_of(20)
    seq = sequence(prompt[:9])
    rows = await model.extend(seq, tuple(prompt[9:]), BOTH, every=True)
    model.release(seq)
    states = states_of(plain, prompt)
    torch.testing.assert_close(rows[0].mean, states[:9].mean(0), atol=2e-5, rtol=1e-4)
    assert all(row.mean is None for row in rows[1:])
    seq = sequence(prompt[:9])
    [row] = await model.extend(seq, tuple(prompt[9:]), BOTH)
    model.release(seq)
    assert_pooled(row, states)


async def test_what_the_cache_holds_does_not_change_the_mean() -> None:
    model, plain = twins(config_of("llama"), seed=3, **SMALL)
    prompt = prompt_of(30)
    states, seq = states_of(plain, prompt), sequence(prompt)
    await model.decode(seq, StopCondition(max_tokens=1))
    assert model.pool.num_held > 0
    assert_pooled(await pooled(model, prompt), states)  # while a sequence shares its blocks
    model.release(seq)
    again = sequence(prompt)
    [row] = await model.extend(again, want=LAST)
    assert again.meter.models["m"].cached_tokens > 0, "the last state may use the cache"
    torch.testing.assert_close(row.hidden[-1], states[-1], atol=2e-5, rtol=1e-4)
    assert_pooled((await model.extend(again, want=BOTH))[0], states)
    model.release(again)


async def test_a_sequence_that_gives_way_is_pooled_once() -> None:
    """Half of what all need: sequences are preempted with a part of their sum taken, and fed again."""
    model, plain = twins(config_of("llama"), seed=3, num_blocks=22, **SMALL)
    prompts = [prompt_of(40, seed) for seed in range(4)]
    writers = [sequence(prompt[:6]) for prompt in prompts]
    limit = StopCondition(max_tokens=8)
    reading = asyncio.gather(*(pooled(model, prompt) for prompt in prompts))
    await asyncio.gather(*(model.decode(seq, limit) for seq in writers))
    rows = await reading
    for row, prompt in zip(rows, prompts, strict=True):
        assert_pooled(row, states_of(plain, prompt))
    for seq in writers:
        model.release(seq)


async def test_a_part_that_is_computed_again_is_not_added_again() -> None:
    model, plain = twins(config_of("llama"), seed=3, block_size=32, token_budget=7)  # no block is full by then
    prompt = prompt_of(40)
    seq, apply, parts = sequence(prompt), model.batcher._apply, 0

    def drop_after_three(step: Any, outcomes: Any) -> None:
        nonlocal parts
        apply(step, outcomes)
        parts += 1
        if parts == 3:
            model.batcher.tables[seq].drop()

    model.batcher._apply = drop_after_three  # type: ignore[method-assign]
    [row] = await model.extend(seq, want=BOTH)
    model.release(seq)
    assert parts == 3 + 6, "all of it is computed again"
    assert_pooled(row, states_of(plain, prompt))


async def test_a_caller_that_leaves_frees_its_blocks() -> None:
    model, _ = twins(config_of("llama"), seed=3, **SMALL)
    prompt = prompt_of(40)
    asked = asyncio.create_task(pooled(model, prompt))
    await until(lambda: model.pool.num_held > 0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: model.stats().used_blocks == 0)
    assert (model.stats().sequences, model.stats().waiting) == (0, 0)
