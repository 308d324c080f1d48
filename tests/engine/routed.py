"""Pools with a routing, policies that decide what they are told, and requests that leave the method open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.model import ModelPool
from pool.local_pool import LocalPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision
from router.routing import Router
from tests.engine.harness import Reply, answer, call_of, pair_config
from turnout.config import RoutingConfig, TurnoutConfig

PROMPT = [65, 66, 67, 68, 69]
RULES = [
    {"when": {"prompt_tokens": {"min": 20}}, "method": {"name": "plain", "model": "large"}},
    {"when": {"pattern": "spec"}, "method": {"name": "speculative", "length": "fixed", "draft_length": 3}},
]
STATIC = {"name": "static", "params": {"rules": RULES, "default": {"method": {"name": "plain", "model": "small"}}}}
LARGE = {"name": "static", "params": {"default": {"method": "plain"}}}


def routed_config(folder: Path, routing: dict[str, Any], **pool: Any) -> TurnoutConfig:
    config = pair_config(folder, block_size=8, token_budget=48)
    settings = config.pools["pair"].model_copy(update={"routing": RoutingConfig(**routing), **pool})
    return config.model_copy(update={"pools": {"pair": settings}})


class Opened:
    """Opens pools with a routing; closed, and looked at, by the fixture `opened`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: list[LocalPool] = []

    def __call__(self, routing: dict[str, Any], **pool: Any) -> LocalPool:
        self.pools.append(LocalPool.load("pair", routed_config(self.folder, routing, **pool)))
        return self.pools[-1]


class Chosen(RoutingPolicy):
    """Decides what it is told, after it has read the prompt."""

    def __init__(self, decision: Decision, reads: bool = True) -> None:
        super().__init__()
        self.decision = decision
        self.reads = reads

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        if self.reads:
            row = await asked.read(models)
            assert row.entropy_bits is not None
            return replace(self.decision, features={"entropy_bits": row.entropy_bits})
        return self.decision


def choose(pool: LocalPool, method: str, params: dict[str, Any], **more: Any) -> None:
    assert pool.routing is not None
    reads = more.pop("reads", True)
    decision = Decision(method, params, "chosen", "0" * 12, reason="told so", **more)
    pool.routing.router = Router(Chosen(decision, reads))


async def ask_auto(pool: LocalPool, prompt: Any = None, **options: Any) -> Reply:
    explain = options.pop("explain", False)
    return await answer(pool, replace(call_of(prompt or PROMPT, "auto", **options), explain=explain))
