"""Fixtures of small random models behind the real loading code, in float32: for tests of engine/ and of pool/."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from pool.local_pool import LocalPool
from tests.engine.harness import pair_config, until
from tests.engine.routed import Opened
from training.random_models import byte_tokenizer, llama_config, random_model


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `large` and `small` with one vocabulary; `small` often, not always, agrees with `large`.

    Random weights; `small` is `large` without its last layer, which is made to matter little.
    """
    folder = tmp_path_factory.mktemp("pair")
    large = random_model(llama_config(num_hidden_layers=3), seed=2, spread=0.2)
    with torch.no_grad():
        large.model.layers[2].self_attn.o_proj.weight.mul_(0.2)
        large.model.layers[2].mlp.down_proj.weight.mul_(0.2)
        large.model.norm.weight.mul_(3.0)  # peaked distributions, as trained models have
    small = random_model(llama_config(num_hidden_layers=2), seed=2)
    small.load_state_dict(large.state_dict(), strict=False)
    for name, model in (("small", small), ("large", large)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


async def _opened(loaded: LocalPool) -> AsyncIterator[LocalPool]:
    yield loaded
    assert loaded.stats().sequences == 0
    await until(lambda: loaded.stats().used_blocks == 0)  # a step that began may use those of what was given up
    for engine in loaded.engines.values():
        engine.pool.check_integrity()
    assert loaded.stats().waiting == 0
    assert loaded.stats().requests == 0
    await loaded.close()


@pytest.fixture
async def pool(pair_folder: Path) -> AsyncIterator[LocalPool]:
    """A loaded pool; after the test nothing may be left in it."""
    async for opened in _opened(LocalPool.load("pair", pair_config(pair_folder, block_size=8, token_budget=48))):
        yield opened


@pytest.fixture
async def twin_pool(pair_folder: Path) -> AsyncIterator[LocalPool]:
    """The large weights in both roles."""
    config = pair_config(pair_folder, small="large", block_size=8, token_budget=48)
    async for opened in _opened(LocalPool.load("pair", config)):
        yield opened


@pytest.fixture
async def opened(pair_folder: Path) -> AsyncIterator[Opened]:
    """Opens pools with a routing; after the test nothing may be left in any."""
    factory = Opened(pair_folder)
    yield factory
    for pool in factory.pools:
        await pool.close()
        stats = pool.stats()
        assert (stats.requests, stats.sequences, stats.used_blocks, stats.shadows) == (0, 0, 0, 0)
