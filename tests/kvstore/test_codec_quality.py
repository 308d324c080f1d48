"""What lossy codecs do to the demo pair's next-token distributions, with the profiles that are shipped for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from benchmarks.bench_codecs import GOAL_RATIO, Judge, Quality, compare, problems
from kvstore.codecs.base import load_codec
from kvstore.profiles import read_profiles
from pool.local_pool import LocalPool
from tests.demo_pair.conftest import demo_config
from turnout.config import TurnoutConfig, artifacts_path

NAMES = ("raw", "int8", "adaquant-k4v2", "adaquant-k2v4", "cachegen-0", "cachegen-2")


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    opened = LocalPool.load("demo", demo_config())
    yield opened
    await opened.close()


async def qualities(pool: LocalPool, role: str) -> dict[str, Quality]:
    judge = Judge(pool, role)
    profiles = read_profiles(artifacts_path(TurnoutConfig.demo().pools["demo"]), judge.model.digest)
    assert set(profiles) == {"adaquant", "cachegen"}
    codecs = [load_codec(name, profiles) for name in NAMES]
    cases = judge.cases(problems(8, seed=1), examples=2)
    return dict(zip(NAMES, await compare(judge, codecs, cases, tokens=64), strict=True))


@pytest.mark.parametrize("role", ["large", "small"])
async def test_bytes_and_divergence_of_the_codecs_on_the_demo_pair(pool: LocalPool, role: str) -> None:
    found = await qualities(pool, role)
    raw, int8, keys, values, fine, coarse = found.values()
    assert (raw.kl, raw.same, raw.ratio) == (0.0, 8, 1.0)
    # the comparison of seed 12: at the same bytes, more bits for keys do less harm
    assert keys.ratio == values.ratio > 4.5
    assert 0 < keys.kl < 0.5 * values.kl
    # levels of seed 238
    assert GOAL_RATIO <= fine.ratio < coarse.ratio
    assert int8.kl < fine.kl < coarse.kl
    assert fine.kl < 0.5 * keys.kl
