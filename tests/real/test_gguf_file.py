"""A real GGUF file, loaded by its path, writes what the folder that was converted from it writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decoding.model import StopCondition
from decoding.sequence import Sequence
from pool.local_pool import LocalPool
from turnout.calls import ChatMessage
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig
from turnout.types import SamplingParams

pytestmark = pytest.mark.real

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "What is 12 + 345?",
    "Schreibe einen Satz über Köln.",
)


def place(variable: str) -> Path:
    """A path in the environment: of a folder, TURNOUT_REAL_MODEL; of the file it was made from, TURNOUT_REAL_GGUF."""
    if not (found := os.environ.get(variable)):  # noqa: TID251 - a test's own
        pytest.skip(f"{variable} is not set")
    return Path(found)


async def written(path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy answers in float32, as token ids."""
    model = ModelConfig(path=str(path), dtype="float32", kv_memory_bytes=64 << 20, max_length=512)
    pool = LocalPool.load("p", TurnoutConfig(models={"m": model}, pools={"p": PoolConfig(large="m")}))
    found = []
    for prompt in PROMPTS:
        ids = pool.tokenizer.encode_chat([ChatMessage("user", prompt)])
        seq = Sequence(ids, SamplingParams(max_tokens=32, temperature=0.0), seed=0)
        await pool.model_pool.large.decode(seq, StopCondition(max_tokens=32))
        found.append((ids, [token.id for token in seq.generated]))
    await pool.close()
    return found


async def test_a_gguf_file_writes_what_its_folder_writes() -> None:
    folder, file = place("TURNOUT_REAL_MODEL"), place("TURNOUT_REAL_GGUF")
    assert await written(file) == await written(folder)
