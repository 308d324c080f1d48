"""What taking KV over costs in quality, on the large demo model over held-out Python: seeds 222 and 230."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from benchmarks.reuse_quality import Case, build_cases, computed_exactly, edit_quality, large_model, reuse_quality
from engine.device import Device
from engine.model import EngineModel
from engine.reuse.settings import ReuseSettings
from experiments.pairs import DEMO, open_pair


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    from pool.text import TextTokenizer

    return build_cases(TextTokenizer(open_pair(DEMO).folder("large")), 4)


@pytest.fixture
async def model() -> AsyncIterator[EngineModel]:
    device = Device("cpu")
    loaded, _ = large_model(device, open_pair(DEMO))
    yield loaded
    loaded.pool.check_integrity()
    assert loaded.pool.num_held == 0
    await loaded.close()
    device.close()


async def test_more_recomputation_is_closer_and_measured_deviations_beat_chance(
    model: EngineModel, cases: list[Case]
) -> None:
    exact = await computed_exactly(model, cases)
    nats, computed = [], []
    for share in (0.0, 0.15, 0.4, 1.0):
        settings = ReuseSettings(recompute=share, threshold=0.0, decode_tokens=0)
        quality = await reuse_quality(model, cases, exact, settings)
        nats.append(quality.nats)
        computed.append(quality.computed)
    assert nats == sorted(nats, reverse=True)
    assert computed == sorted(computed)
    assert nats[0] > 1.5 * nats[2]
    assert nats[-1] < 1e-6
    assert computed[0] < 0.35
    for share, chosen in ((0.15, nats[1]), (0.4, nats[2])):
        settings = ReuseSettings(recompute=share, decode_tokens=0, select="random")
        by_chance = await reuse_quality(model, cases, exact, settings)
        assert chosen < by_chance.nats, f"{share} by deviation is no better than by chance"


async def test_decoding_on_corrects(model: EngineModel, cases: list[Case]) -> None:
    exact = await computed_exactly(model, cases)
    nats = {}
    for tokens in (0, 8):
        settings = ReuseSettings(recompute=0.05, decode_tokens=tokens)
        quality = await reuse_quality(model, cases, exact, settings, decoding=True)
        nats[tokens] = quality.nats
        assert (quality.corrected > 1) == (tokens > 0)
    assert nats[8] < nats[0]


async def test_rotated_keys_are_much_closer_than_conflicting_ones(model: EngineModel, cases: list[Case]) -> None:
    moved = await edit_quality(model, cases)
    assert moved.computed < 0.1
    conflicting = await edit_quality(model, cases, turned=False)
    assert conflicting.nats > 3 * moved.nats
