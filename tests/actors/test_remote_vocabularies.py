"""Drafts across vocabularies with models behind the wire: what they are over models in one piece, to the count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool, close_in_process, open_in_process, open_local
from tests.engine.harness import answer, call_of
from tests.foreign_pair import save_foreign_pair
from turnout.calls import ChatMessage
from turnout.config import PoolConfig, TurnoutConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"drafter": "text_chain", "length": "fixed"}, {}),
    ({"drafter": "shared_vocabulary", "length": "fixed", "verifier": "match"}, {"temperature": 0.8}),
    ({"drafter": "shared_vocabulary", "verifier": "rejection", "length": "svip"}, {"temperature": 0.8}),
    ({"drafter": ["text_chain", "shared_vocabulary"], "length": "fixed", "verifier": "match"}, {"stop": ("ZZ", "je")}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(
    models_folder: Path, actors_config: TurnoutConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LocalPool, RemotePool]]:
    folder = save_foreign_pair(models_folder, tmp_path_factory.mktemp("foreign"))
    models = {
        name: model.model_copy(update={"path": str(folder / name)}) for name, model in actors_config.models.items()
    }
    default = {"name": "speculative", "params": {"drafter": "text_chain"}}
    pool = PoolConfig.model_validate({"small": "small", "large": "large", "default": default})
    config = actors_config.model_copy(update={"models": models, "pools": {"pair": pool}})
    local, remote = open_local(config), await open_in_process(config)
    yield local, remote
    await remote.settle()
    remote.assert_idle()
    assert local.stats().sequences == local.stats().used_blocks == 0
    await close_in_process(remote)
    await local.close()


@pytest.mark.parametrize(("spec", "options"), CASES, ids=str)
async def test_drafts_are_the_same_behind_the_wire(
    mixed: tuple[LocalPool, RemotePool], spec: dict[str, Any], options: dict[str, Any]
) -> None:
    """Text and conversation: also the small model's own template goes to its actor."""
    asked = [("here, the sea. Привет", None), (None, (ChatMessage("user", "where?"),))]
    for prompt, messages in asked:
        replies = [
            await answer(pool, call_of(prompt, "speculative", spec, messages=messages, max_tokens=24, **options))  # type: ignore[arg-type]
            for pool in mixed
        ]
        here, there = replies
        assert (there.ids, there.text) == (here.ids, here.text)
        assert there.usage.speculation.accepted_tokens == here.usage.speculation.accepted_tokens
        assert there.usage.speculation.draft_tokens == here.usage.speculation.draft_tokens > 0
        small = [each.usage.models["small"] for each in replies]
        assert small[0].forwards == small[1].forwards > 0
        assert small[0].draft_tokens == small[1].draft_tokens > 0
