"""Models of the engine in this process, with random weights or the demo's, and how fast they decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.workloads import VOCAB
from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from experiments import real_model
from experiments.pairs import DEMO, REAL, open_pair
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.types import SamplingParams


def random_220m() -> Any:
    """A Llama of about 220 M parameters with random weights."""
    special = {"pad_token_id": 0, "eos_token_id": 1}
    config = llama_config(VOCAB, **SHAPES["220 M"], max_position_embeddings=4096, tie_word_embeddings=False, **special)
    return random_model(config, seed=0)


def demo(role: str) -> Any:
    """A shipped demo model."""
    return AutoModelForCausalLM.from_pretrained(open_pair(DEMO).folder(role))


def real() -> Any:
    """The model that `make real` fetches."""
    return AutoModelForCausalLM.from_pretrained(real_model.model_folder())


SUBJECTS: dict[str, Callable[[], Any]] = {
    "demo small": lambda: demo("small"),
    "demo large": lambda: demo("large"),
    "random 220 M": random_220m,
    REAL: real,
}


@asynccontextmanager
async def open_engine(
    *checkpoints: Any,
    names: tuple[str, ...] = ("model",),
    kv_bytes: int = 512 << 20,
    max_length: int | None = None,
    engine: EngineConfig | None = None,
    device: str = "cpu",
) -> AsyncIterator[list[EngineModel]]:
    """Serve checkpoints of transformers on one device, and close them at the end.

    Args:
        checkpoints: become the engine's own.
        names: of the models, one for each checkpoint.
        kv_bytes: cache of each.
        max_length: most tokens of a sequence; None: as many as the checkpoint allows.
        engine: settings; None: the defaults.
        device: as torch names it.
    """
    place, settings = Device(device), ModelConfig(path="-", kv_memory_bytes=kv_bytes, max_length=max_length)
    models = [
        EngineModel(name, prepare(plain), settings, engine or EngineConfig(), place)
        for name, plain in zip(names, checkpoints, strict=True)
    ]
    try:
        yield models
    finally:
        for model in models:
            await model.close()
        await asyncio.to_thread(place.close)


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Make prompts of random tokens, none of them special."""
    prompts: list[list[int]] = torch.randint(3, vocab_size, (count, length)).tolist()
    return prompts


async def decode_speed(model: EngineModel, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of concurrent requests, after the first token of each."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    sequences = [Sequence(prompt, sampling, 0) for prompt in prompts]
    await asyncio.gather(*(model.decode(seq, StopCondition(max_tokens=1)) for seq in sequences))
    started = time.perf_counter()
    await asyncio.gather(*(model.decode(seq) for seq in sequences))
    elapsed = time.perf_counter() - started
    for seq in sequences:
        model.release(seq)
    return len(prompts) * (tokens - 1) / elapsed
