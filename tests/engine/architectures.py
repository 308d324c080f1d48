"""Small configurations of every supported architecture, and the check against plain Hugging Face forwards."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import AutoConfig

from decoding.model import Want
from decoding.sequence import Sequence
from engine.backend import Kernels
from tests.engine.harness import random_prompts, twins
from tests.engine.margin import assert_best
from turnout.types import SamplingParams, Token

TOLERANCE = 1e-4
WINDOW = 6
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama_scaled_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 8, **EXPERTS}),
    "mixtral": ("mixtral", {"sliding_window": WINDOW, **EXPERTS}),
}


def config_of(name: str, **changes: Any) -> Any:
    kind, overrides = CONFIGS[name]
    settings = {**BASE, **overrides, **changes}
    if kind == "gpt_neox":
        del settings["num_key_value_heads"]
    return AutoConfig.for_model(kind, **settings)


async def assert_equals_plain_forward(name: str, kernels: Kernels, device: str) -> None:
    """Greedy tokens and the logits of every position, of many sequences together, fed in chunks of at most 7."""
    options = {"block_size": 4, "token_budget": 7, "device": device}
    model, plain = twins(config_of(name), seed=3, spread=0.2, kernels=kernels, **options)
    prompts = [*random_prompts(5, 24, seed=1, vocab_size=97), *random_prompts(1, 1, seed=2, vocab_size=97)]

    async def greedy(prompt: list[int]) -> None:
        seq = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=6), seed=0)
        while not seq.finished:
            row = (await model.extend(seq, want=Want(logits=True)))[0]
            expected = plain.logits(seq.tokens)[-1]
            torch.testing.assert_close(row.logits.cpu(), expected, atol=TOLERANCE, rtol=0)
            assert_best(row.token, expected, name)
            seq.append(Token(row.token, "m"))
        model.release(seq)

    async def every_position(prompt: list[int]) -> None:
        seq = Sequence(prompt[:1], SamplingParams(), seed=0)
        rows = await model.extend(seq, tuple(prompt[1:]), Want(draw=None, logits=True), every=True)
        got = torch.stack([row.logits for row in rows if row.logits is not None])
        torch.testing.assert_close(got.cpu(), plain.logits(prompt), atol=TOLERANCE, rtol=0)
        model.release(seq)

    await asyncio.gather(*(greedy(prompt) for prompt in prompts), *(every_position(prompt) for prompt in prompts))
    model.pool.check_integrity()
    assert model.pool.num_held == 0
    await model.close()
