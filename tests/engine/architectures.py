"""Tiny configurations of every architecture with a file, and the check against plain Hugging Face forwards."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import AutoConfig

from decoding.model import Readout, ReadSpec
from decoding.sequence import Sequence
from engine.architectures import architecture_named, listed
from engine.backends.base import Kernels
from tests.engine.harness import random_prompts, twins
from tests.engine.margin import assert_best
from turnout.types import SamplingParams, Token

TOLERANCE = 1e-4
# Of every architecture with a file: name of a variant -> (model_type, variant).
CONFIGS = {
    f"{kind}_{variant}" if variant else kind: (kind, variant)
    for kind in listed()
    for variant in architecture_named(kind).tiny
}


def kernels_of(name: str) -> list[Kernels]:
    """Those that compute differently in float32: without fused layers, torch operations are the modules' own."""
    return ["native", "torch", "plain"] if architecture_named(CONFIGS[name][0]).fused else ["native", "plain"]


def turns(name: str) -> bool:
    """Whether it is known which layers rotate keys, half a head against the other."""
    architecture = architecture_named(CONFIGS[name][0])
    return architecture.rotates is None or bool(architecture.rotates(config_of(name)))


def config_of(name: str, **changes: Any) -> Any:
    kind, variant = CONFIGS[name]
    return AutoConfig.for_model(kind, **{**architecture_named(kind).tiny_settings(variant), **changes})


async def assert_equals_plain_forward(name: str, kernels: Kernels, device: str) -> None:
    """The variant of this name; see `assert_config_equals_plain_forward`."""
    await assert_config_equals_plain_forward(config_of(name), kernels, device)


def assert_rows_are(rows: list[Readout], expected: torch.Tensor, label: str) -> None:
    """Rows that tokens were chosen by have these logits [rows, vocab], of which the tokens are the best."""
    for row, logits in zip(rows, expected, strict=True):
        assert row.logits is not None
        torch.testing.assert_close(row.logits.cpu(), logits, atol=TOLERANCE, rtol=0)
        assert row.token is not None
        assert_best(row.token, logits, label)


async def assert_config_equals_plain_forward(config: Any, kernels: Kernels, device: str) -> None:
    """Greedy tokens and the logits of every position, of many sequences together, fed in chunks of at most 7."""
    options = {"block_size": 4, "token_budget": 7, "device": device}
    model, plain = twins(config, seed=3, spread=0.2, kernels=kernels, **options)
    prompts = [*random_prompts(5, 24, seed=1, vocab_size=97), *random_prompts(1, 1, seed=2, vocab_size=97)]

    async def greedy(prompt: list[int]) -> None:
        seq = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=6), seed=0)
        rows = []
        while not seq.finished:
            rows += await model.extend(seq, want=ReadSpec(logits=True))
            seq.append(Token(rows[-1].token, "m"))
        assert_rows_are(rows, plain.logits(seq.tokens)[len(prompt) - 1 : -1], config.model_type)
        model.release(seq)

    async def every_position(prompt: list[int]) -> None:
        seq = Sequence(prompt[:1], SamplingParams(), seed=0)
        rows = await model.extend(seq, tuple(prompt[1:]), ReadSpec(draw=None, logits=True), every=True)
        got = torch.stack([row.logits for row in rows if row.logits is not None])
        torch.testing.assert_close(got.cpu(), plain.logits(prompt), atol=TOLERANCE, rtol=0)
        model.release(seq)

    await asyncio.gather(*(greedy(prompt) for prompt in prompts), *(every_position(prompt) for prompt in prompts))
    model.pool.check_integrity()
    assert model.pool.num_held == 0
    await model.close()
