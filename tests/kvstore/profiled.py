"""Keys and values with the habits of a trained model's, profiles of them, and the demo model's own."""

from __future__ import annotations

import asyncio
from functools import cache

import torch

from decoding.artifacts import Artifact
from kvstore.base import ChunkShape
from kvstore.profiles import Profile, profile_of
from pool.local_pool import LocalPool
from tests.demo_pair.conftest import demo_config
from training.data import arithmetic
from training.kv_profiles import Shapes, conversations, read_kv

DIGEST = "0" * 32


def alike_kv(tokens: int, seed: int, layers: int = 3, heads: int = 2, width: int = 8) -> torch.Tensor:
    """float32 [layers, tokens, 2, heads, width]: neighbours are alike, channels have their own mean and scale, keys are
    larger than values, and every channel has the same mean and scale whatever the seed.
    """
    fixed = torch.Generator().manual_seed(77)
    size = (layers, 1, 2, heads, width)
    mean = torch.randn(size, generator=fixed)
    scale = torch.rand(size, generator=fixed) * 2 + 0.2
    scale[:, :, 0] *= 3
    drawn = torch.Generator().manual_seed(seed)
    noise = torch.randn((layers, tokens, 2, heads, width), generator=drawn)
    for token in range(1, tokens):
        noise[:, token] = 0.95 * noise[:, token - 1] + 0.3122 * noise[:, token]
    return mean + scale * noise


def shape_of(kv: torch.Tensor, first_layer: int = 0) -> ChunkShape:
    return ChunkShape(first_layer, kv.shape[0], kv.shape[1], kv.shape[3], kv.shape[4], kv.dtype)


def profiles_of(*sequences: torch.Tensor) -> dict[str, Profile]:
    """By codec family, as `turnout train kv-codecs` would make them of these sequences."""
    shapes = Shapes()
    for kv in sequences:
        shapes.add(kv)
    histograms = shapes.histograms()
    for kv in sequences:
        histograms.add(kv)
    found = {}
    for family, tensors in (("adaquant", shapes.norms()), ("cachegen", histograms.tensors())):
        named = {f"large.{name}": tensor for name, tensor in tensors.items()}
        profile = profile_of(Artifact(f"kv-{family}", "test", {}, {"large": DIGEST}, named), family, DIGEST)
        assert profile is not None
        found[family] = profile
    return found


@cache
def alike_profiles() -> dict[str, Profile]:
    return profiles_of(*(alike_kv(200, seed) for seed in range(100, 120)))


@cache
def demo_kv() -> list[torch.Tensor]:
    """The demo's large model reading worked problems, in float32."""

    async def read() -> list[torch.Tensor]:
        pool = LocalPool.load("demo", demo_config())
        try:
            shown = [one for grade in arithmetic.DIFFICULTIES for one in arithmetic.heldout(grade, 10, seed=5)]
            read = conversations(pool, [(problem.prompt, problem.answer) for problem in shown])
            return [await read_kv(pool.engines["large"], tokens) for tokens in read]
        finally:
            await pool.close()

    torch.set_num_threads(1)
    return asyncio.run(read())
