"""Shadow traffic of a pool: what it costs whom, what ends it, and what is written down about it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.decode_loop import LONGEST_STRETCH
from decoding.drafter_state import learner_of
from decoding.sequence import Sequence
from pool.local_pool import LocalPool
from pool.routing import SHADOW_TENANT
from router.decision import Decision
from router.summary import read_log
from tests.engine.harness import answer, ask, ask_all, call_of
from tests.engine.routed import LARGE, PROMPT, STATIC, Opened, ask_auto
from turnout.calls import Delivered
from turnout.types import SharingPolicy


async def settled(pool: LocalPool) -> None:
    """Until no shadow is left."""
    async with asyncio.timeout(30):
        while pool.stats().shadows:
            await asyncio.sleep(0.001)  # the models need the time more than this loop


async def test_a_shadow_runs_apart_and_is_not_billed(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": LARGE}, "log": {"path": str(path)}})
    alone = await ask(pool, PROMPT, "plain", {"model": "small"}, tenant="x")
    reply = await ask_auto(pool, tenant="y")
    assert set(reply.usage.models) == {"small"}
    assert reply.usage.models["small"].processed_tokens == alone.usage.models["small"].processed_tokens
    assert pool.stats().requests == 0
    await settled(pool)
    expected = await ask(pool, PROMPT)
    await pool.close()
    request, shadow = list(read_log(path))
    assert (request["kind"], shadow["kind"]) == ("request", "shadow")
    assert request["request_id"] == shadow["request_id"]
    assert shadow["outcome"]["large_share"] == 1.0
    assert shadow["same_text"] is (expected.text == reply.text)
    assert request["outcome"]["large_share"] == 0.0


async def test_a_shadow_reads_and_leaves_what_its_call_may_share(opened: Opened) -> None:
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": LARGE}})
    team = SharingPolicy(policy="group", group="team")
    prompt = PROMPT * 4
    await answer(pool, replace(call_of(prompt, "auto", tenant="ann"), sharing=team))
    await settled(pool)
    found = {}
    for tenant, told in (("ann", None), ("bob", team)):
        reply = await answer(pool, replace(call_of(prompt, "plain", {"model": "large"}, tenant=tenant), sharing=told))
        found[tenant] = reply.usage.cached_tokens > 0
    await pool.close()
    assert found == {"ann": False, "bob": True}


async def test_what_a_shadow_learns_is_its_tenants_and_apart_from_what_requests_teach(opened: Opened) -> None:
    drafts = {"name": "speculative", "drafter": "token_recycling"}
    shadow = {"name": "static", "params": {"default": {"method": drafts}}}
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": shadow}})
    opened_for: list[str] = []
    stores = pool.engines[pool.roles["large"]].stores
    first, real = stores.open, stores.open

    def seen(kind: str, tenant: str, make: Any) -> Any:
        opened_for.append(tenant)
        return real(kind, tenant, make)

    stores.open = seen  # type: ignore[method-assign]
    for tenant in ("ann", "bob"):
        await ask_auto(pool, tenant=tenant)
        await settled(pool)
    await ask(pool, PROMPT, "speculative", {"drafter": "token_recycling"}, tenant="ann")
    stores.open = first  # type: ignore[method-assign]
    assert set(opened_for) == {learner_of("ann", SHADOW_TENANT), learner_of("bob", SHADOW_TENANT), "ann"}
    for tenant in ("ann", "bob"):
        pool.forget(tenant)
    assert len(stores) == 0
    await pool.close()


async def test_the_shadow_of_a_call_that_came_from_elsewhere_begins_anew(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": LARGE}, "log": {"path": str(path)}})
    whole = await ask(pool, PROMPT, "plain", {"model": "small"}, seed=1, max_tokens=12, ignore_eos=True)
    large = await ask(pool, PROMPT, "plain", seed=1, max_tokens=12, ignore_eos=True)
    decided = Decision("plain", {"model": "small"}, "elsewhere", "0" * 12).as_json()
    call = call_of(PROMPT, "auto", seed=1, max_tokens=12, ignore_eos=True)
    moved = replace(call, decided=decided, delivered=(Delivered(tuple(whole.ids[:4]), 0),))
    assert (await answer(pool, moved)).ids == whole.ids[4:]
    await settled(pool)
    await pool.close()
    request, shadow = list(read_log(path))
    assert [each["decision"]["policy"] for each in (request, shadow)] == ["elsewhere", "static"]
    assert shadow["outcome"]["large_share"] == 1.0
    assert shadow["outcome"]["completion_tokens"] == len(large.ids)
    assert "same_text" not in shadow


@pytest.mark.parametrize(
    ("method", "answers"),
    [
        ({"name": "plain", "model": "large"}, 1),
        ({"name": "cascade", "threshold": 1.0}, 1),
        ({"name": "best_of", "model": "large", "k": 4}, 4),
    ],
)
async def test_a_shadow_asks_nothing_of_a_model_while_a_request_is_in_progress(
    opened: Opened, method: dict[str, Any], answers: int
) -> None:
    shadow = {"name": "static", "params": {"default": {"method": method}}}
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": shadow}})

    def shadowing() -> list[Sequence]:
        return [seq for each in pool.engines.values() for seq in each.batcher.tables if seq.tenant == SHADOW_TENANT]

    await ask_auto(pool, ignore_eos=True, max_tokens=200, temperature=1.0)
    while sum(len(seq.generated) for seq in shadowing()) < answers:  # until the shadow writes
        await asyncio.sleep(0)
    stream = pool.generate(call_of([70, 71], "plain", {"model": "small"}, ignore_eos=True, max_tokens=120))
    await anext(stream)
    written = []
    async for _ in stream:
        assert all(seq.low_priority for seq in shadowing())
        written.append(sum(len(seq.generated) for seq in shadowing()))
    # At most the operation of each answer that was under way goes on.
    assert len(written) > 3
    assert written[-2] - written[0] <= answers * LONGEST_STRETCH
    await settled(pool)
    assert pool.stats().shadows_dropped == 0


async def test_a_full_pool_drops_its_shadows_and_closing_ends_them(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    shadow = {"share": 1, "policy": LARGE}
    pool = opened({"policy": STATIC, "shadow": shadow, "log": {"path": str(path)}}, max_ongoing_requests=1)
    await ask_auto(pool, ignore_eos=True, max_tokens=60)
    assert pool.stats().shadows == 1
    together = [call_of([70 + place], "plain", ignore_eos=True, tenant="t") for place in range(3)]
    await ask_all(pool, together)
    assert (pool.stats().shadows, pool.stats().shadows_dropped) == (0, 1)
    await ask_auto(pool, ignore_eos=True, max_tokens=200)
    while not pool.engines["large"].batcher.tables:
        await asyncio.sleep(0)
    await pool.close()
    assert pool.stats().shadows_dropped == 2
    assert [(each["kind"], each["outcome"]["status"]) for each in read_log(path)][-1] == ("shadow", "CANCELLED")
