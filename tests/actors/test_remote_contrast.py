"""Contrasts of models in other processes: streams are read there, and the answer is the one given here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifact
from decoding.contrast.knn_lm import TokenStore
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


@pytest.mark.parametrize(("method", "params"), [("plain", {}), ("speculative", TREE)])
async def test_states_of_models_there_are_looked_up_here(
    remote: RemotePool,
    local: LocalPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    params: dict[str, Any],
) -> None:
    large = local.model_pool.large
    draw = torch.Generator().manual_seed(4)
    store = TokenStore(40, 32)
    store.keys.copy_(torch.randn((40, 32), generator=draw))
    store.values.copy_(torch.randint(0, large.vocab_size, (40,), generator=draw))
    made = Artifact("knn_lm", "test", {"head": store.settings}, {"large": large.digest}, dict(store.state_dict()))
    made.save(tmp_path / "knn_lm.safetensors")
    for pool in (local, remote):
        monkeypatch.setattr(pool.model_pool.artifacts, "folder", tmp_path)
    sampling = {"temperature": 0.8, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    contrast = PartChoice.of("knn_lm", weight=0.5, temperature=20)
    call = replace(call_of("hello", method, params, **sampling), contrast=contrast)
    here, there = await answer(local, call), await answer(remote, call)
    assert there.ids == here.ids
    assert there.ids != (await answer(remote, replace(call, contrast=None))).ids
