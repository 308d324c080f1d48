"""Contrasts of models in other processes: streams are read there, and the answer is the one given here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool
from tests.engine.harness import answer, call_of
from turnout.part_choice import PartChoice

pytestmark = pytest.mark.asyncio(loop_scope="module")

TREE = {"drafter": "model_tree", "length": "fixed"}


@pytest.mark.parametrize("contrast", ["cad", "contrastive", {"name": "dola", "layers": [1]}])
@pytest.mark.parametrize(("method", "params"), [("plain", {}), ("speculative", {}), ("speculative", TREE)])
async def test_answers_are_the_same_there(
    remote: RemotePool, local: LocalPool, contrast: Any, method: str, params: dict[str, Any]
) -> None:
    sampling = {"temperature": 0.8, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    call = replace(
        call_of("hello", method, params, **sampling),
        contrast=PartChoice.model_validate(contrast),
        context="there is a context",
    )
    here, there = await answer(local, call), await answer(remote, call)
    assert there.ids == here.ids
    assert there.ids != (await answer(remote, replace(call, contrast=None))).ids
    large = there.usage.models["large"]
    assert large.generated_tokens == here.usage.models["large"].generated_tokens
    await remote.settle()
    assert not any(host.model.stats().sequences for host in remote.hosts.values())
    assert local.stats().sequences == 0
