"""PEARL on the real engine: the text of plain decoding, caches that are right after every round, nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import torch

from decoding.fakes import pair
from decoding.model import ModelPool, ReadSpec, Request
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from tests.engine.harness import Reference, random_prompts
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig
from turnout.registry import get_method
from turnout.types import SamplingParams

VOCAB, LAYERS = 40, {"small": 2, "large": 4}
LOGITS = ReadSpec(draw=None, logits=True)
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}


def weights(name: str) -> Any:
    """`small` is `large` without its last layers, which are made to matter little; distributions are peaked."""

    def config(layers: int) -> Any:
        return llama_config(VOCAB, hidden_size=32, num_hidden_layers=layers, pad_token_id=0, eos_token_id=1)

    large = random_model(config(LAYERS["large"]), 1, spread=0.3)
    with torch.no_grad():
        for layer in large.model.layers[LAYERS["small"] :]:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
        large.model.norm.weight.mul_(2.0)
    if name == "large":
        return large
    small = random_model(config(LAYERS["small"]), 1)
    small.load_state_dict(large.state_dict(), strict=False)
    return small


@pytest.fixture
async def models() -> AsyncIterator[ModelPool]:
    """After the test nothing may be left in them."""
    device, engine = Device("cpu"), EngineConfig(block_size=4, max_batch=64)
    made = [
        EngineModel(
            name, prepare(weights(name), "auto"), ModelConfig(path="-", kv_memory_bytes=8 << 20), engine, device
        )
        for name in ("small", "large")
    ]
    yield pair(made[0], made[1])
    for model in made:
        assert model.pool.num_held == 0
        model.pool.check_integrity()
        await model.close()


async def answer(models: ModelPool, index: int, prompt: list[int], params: Any, sampling: Any) -> Sequence:
    info = get_method("plain" if params is None else "pearl")
    seq = Sequence(prompt, SamplingParams(max_tokens=14, **sampling), seed=index, eos_ids=(1,))
    async for _ in info.run(Request(f"r{index}", seq), models, info.parse(params or {})):
        pass
    for model in models.models.values():
        model.release(seq)
    return seq


async def answers(models: ModelPool, params: Any, sampling: Any) -> list[Sequence]:
    """A hundred requests at once."""
    prompts = random_prompts(100, 20, seed=3, vocab_size=VOCAB)
    return list(await asyncio.gather(*(answer(models, i, p, params, sampling) for i, p in enumerate(prompts))))


@pytest.mark.parametrize(
    ("verifier", "sampling"), [("match", GREEDY), ("rejection", GREEDY), ("match", SAMPLED)], ids=str
)
async def test_the_text_is_that_of_plain_decoding(models: ModelPool, verifier: str, sampling: Any) -> None:
    plain = await answers(models, None, sampling)
    for length in ("auto", 3):
        done = await answers(models, {"verifier": verifier, "draft_length": length}, sampling)
        assert [seq.tokens for seq in done] == [seq.tokens for seq in plain]
        accepted = sum(seq.meter.speculation.accepted_tokens for seq in done)
        assert 0 < accepted < sum(seq.meter.speculation.draft_tokens for seq in done)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_caches_are_right_after_every_round(models: ModelPool, verifier: str) -> None:
    """What each model reads next from its cache is what a fresh forward over the same tokens reads."""
    plain = {name: Reference(weights(name)) for name in LAYERS}
    info, rounds, lengths = get_method("pearl"), 0, set()
    for seed in range(4):
        seq = Sequence([2, 3, 4 + seed], SamplingParams(max_tokens=24, ignore_eos=True), seed)
        params = info.parse({"verifier": verifier, "draft_length": 2 + seed})
        async with aclosing(info.run(Request("r", seq), models, params)) as running:  # type: ignore[type-var]
            async for segment in running:
                rounds += 1
                lengths.add(len(segment.tokens))
                for name, model in models.models.items():
                    twin = model.fork(seq)
                    [row] = await model.extend(twin, want=LOGITS)
                    model.release(twin)
                    assert row.logits is not None
                    torch.testing.assert_close(row.logits, plain[name].logits(seq.tokens)[-1], atol=1e-4, rtol=0)
        for model in models.models.values():
            model.release(seq)
    assert rounds > 20
    assert len(lengths) > 2


async def test_an_abandoned_answer_leaves_nothing(models: ModelPool) -> None:
    info = get_method("pearl")
    seq = Sequence([2, 3, 4], SamplingParams(max_tokens=50, ignore_eos=True), 5)
    running = info.run(Request("r", seq), models, info.parse({"draft_length": 4}))
    for _ in range(3):
        await anext(running)
    task = asyncio.ensure_future(anext(running))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for model in models.models.values():
        model.release(seq)
    other = await answer(models, 1, [2, 3, 4], {}, GREEDY)
    assert len(other.generated) == 14 or other.tokens[-1] == 1
