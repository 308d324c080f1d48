"""The shipped draft heads fit the shipped large model, and draft well for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from decoding.artifacts import Artifacts
from pool.local_pool import LocalPool
from tests.demo_pair.conftest import Reply, _opened, assert_same_answers, demo_config
from turnout.config import TurnoutConfig, artifacts_path

HEADS = ("medusa", "redrafter", "kangaroo", "eesd")
MOST_BYTES = 4 << 20
MOST_BYTES_IN_ALL = 20 << 20


# One loop for all: the models' locks belong to it.
of_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def headed() -> AsyncIterator[LocalPool]:
    async for pool in _opened(demo_config()):
        pool.model_pool.artifacts = Artifacts(artifacts_path(TurnoutConfig.demo().pools["demo"]))
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(headed: LocalPool, ask_all: Any, prompts: list[str]) -> list[Reply]:
    replies: list[Reply] = await ask_all(headed, prompts[:16])
    return replies


@of_one_loop
@pytest.mark.parametrize("drafter", HEADS)
async def test_shipped_heads_draft_most_of_an_answer(
    headed: LocalPool, plain: list[Reply], ask_all: Any, prompts: list[str], drafter: str
) -> None:
    replies = await ask_all(headed, prompts[:16], "speculative", {"drafter": drafter, "length": "fixed"})
    assert_same_answers(headed, plain, replies)
    rounds = sum(reply.usage.speculation.rounds for reply in replies)
    # One token of each round is the model's own.
    assert sum(len(reply.ids) for reply in replies) > 2 * rounds


def test_every_shipped_head_is_small() -> None:
    folder = artifacts_path(TurnoutConfig.demo().pools["demo"])
    assert folder is not None
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert set(HEADS) <= set(sizes)
    assert max(sizes.values()) < MOST_BYTES
    assert sum(sizes.values()) < MOST_BYTES_IN_ALL
