"""Processors that read hidden states or recorded surprises, on models in other processes: the answers given here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool
from tests.engine.harness import ask_all, call_of
from turnout.part_choice import PartChoice

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOCUS = {"name": "dynamic_focus", "sigma": 0.05, "mask": 0.02}
VECTOR = {"name": "fsd_vector", "k": 20}
AUTODECO = {"name": "autodeco"}
MIROSTAT = {"name": "mirostat", "tau": 2.0, "eta": 0.3}
SWITCH = {"window": 2, "min_stay": 3, "threshold": 2.0}


async def test_answers_are_the_same_there(remote: RemotePool, local: LocalPool) -> None:
    asked: list[tuple[Any, str, dict[str, Any]]] = [
        *((each, "plain", {}) for each in (FOCUS, VECTOR, AUTODECO, MIROSTAT)),
        *((each, "speculative", {"length": "fixed"}) for each in (FOCUS, VECTOR, AUTODECO)),
        (MIROSTAT, "entropy_adaptive", SWITCH),  # two actors write one answer: each gets the other's surprises
        ({"name": "top_k", "k": 50}, "plain", {}),
    ]
    calls = [
        call_of(
            "a longer prompt",
            method,
            params,
            temperature=0.0 if processor is VECTOR else 0.9,
            seed=5,
            max_tokens=16,
            ignore_eos=True,
            processors=(PartChoice.model_validate(processor),),
        )
        for processor, method, params in asked
    ]
    here, there = await asyncio.gather(ask_all(local, calls), ask_all(remote, calls))
    assert [each.ids for each in there] == [each.ids for each in here]
    assert len({tuple(each.ids) for each in here}) >= 4  # they do something
    await remote.settle()
    assert not any(host.model.stats().sequences for host in remote.hosts.values())
