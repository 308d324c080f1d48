"""The mixed requests of the correctness test, several at a time; as a program, an engine process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence as Calls
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pool.local_pool import LocalPool
from tests.engine.harness import Reply, answer, call_of
from tests.engine.mixed import SAMPLING
from tests.kvstore.forked_calls import METHODS, open_pool, settle, tokens
from turnout.calls import GenerateCall

AT_ONCE = 4
PER_TRUNK = 10


def requests(count: int) -> list[GenerateCall]:
    """Every ten requests share a new prefix, with forks of two depths, of two tenants, by all methods and samplings."""
    found = []
    for i in range(count):
        prompt = [*tokens(48, start=i // PER_TRUNK), *tokens(33, start=60 + i % 3), *tokens(1 + 5 * i % 13, start=i)]
        method, params = METHODS[i % len(METHODS)]
        options = {"max_tokens": 8, "seed": 100 + i, **SAMPLING[i // 2 % len(SAMPLING)]}
        found.append(call_of(prompt, method, params, tenant="ab"[i % 4 == 3], **options))
    return found


async def answers_of(pool: LocalPool, calls: Calls[GenerateCall]) -> list[Reply]:
    """Of all calls, a few at a time, so that they also share what is just being computed or fetched."""
    replies: list[Reply] = []
    for start in range(0, len(calls), AT_ONCE):
        replies += await asyncio.gather(*(answer(pool, call) for call in calls[start : start + AT_ONCE]))
    return replies


def plain(reply: Reply) -> dict[str, Any]:
    """What another process is told of an answer."""
    sources = [token.source for token in reply.tokens]
    meters = reply.usage.models.values()
    return {
        "ids": reply.ids,
        "text": reply.text,
        "reasons": [reason and reason.value for reason in reply.reasons],
        "sources": sources,
        "computed": sum(meter.prompt_tokens for meter in meters),
        "fetched": sum(meter.fetched_tokens for meter in meters),
    }


def from_plain(said: dict[str, Any]) -> Any:
    """The other way round, as far as answers are compared."""
    tokens = [SimpleNamespace(source=source) for source in said["sources"]]
    return SimpleNamespace(ids=said["ids"], text=said["text"], reasons=said["reasons"], tokens=tokens)


async def _main(folder: str, store: str, count: str) -> None:
    pool = open_pool(Path(folder), json.loads(store))
    replies = await answers_of(pool, requests(int(count)))
    cache = pool.stats().cache
    assert cache is not None
    await settle(pool)
    await pool.close()
    sys.stdout.write(json.dumps({"replies": [plain(reply) for reply in replies], "faults": cache.faults}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_main(*sys.argv[1:]))
