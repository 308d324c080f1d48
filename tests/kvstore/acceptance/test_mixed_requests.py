"""Mixed requests with shared and forked prefixes: the same tokens without a store, cold, warm and elsewhere."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import conftest as engine_fixtures
from tests.engine.mixed import assert_same_reply
from tests.kvstore.acceptance.mixed import answers_of, from_plain, plain, requests
from tests.kvstore.forked_calls import open_pool, settle
from tests.kvstore.test_end_to_end import redis, store
from tests.telling import tell

pair_folder = engine_fixtures.pair_folder
__all__ = ["pair_folder", "redis", "store"]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.exactness)])
async def test_the_store_changes_no_token(pair_folder: Path, store: dict[str, Any], count: int) -> None:
    calls = requests(count)
    without = open_pool(pair_folder, None)
    expected = await answers_of(without, calls)
    await without.close()
    first = open_pool(pair_folder, {**store, "host_memory_bytes": 1 << 20})
    cold = await answers_of(first, calls)
    await settle(first)
    warm = await answers_of(first, calls)
    await settle(first)
    await first.close()
    elsewhere = await _in_another_process(pair_folder, store, count)
    runs = {"cold": list(map(plain, cold)), "warm": list(map(plain, warm)), "elsewhere": elsewhere["replies"]}
    different = 0
    for said in runs.values():
        assert len(said) == count
        for call, mine, theirs in zip(calls, expected, said, strict=True):
            different += mine.ids != theirs["ids"]
            assert_same_reply(pair_folder, call, mine, from_plain(theirs))
    computed = {name: sum(reply["computed"] for reply in said) for name, said in runs.items()}
    fetched = {name: sum(reply["fetched"] for reply in said) for name, said in runs.items()}
    assert elsewhere["faults"] == {}
    assert fetched["elsewhere"] > 10 * count
    assert computed["elsewhere"] < 0.6 * computed["cold"]
    tell(
        f"{count} mixed requests: {3 * count} answers as without a store, {different} of them different at a tie;"
        f" prompt tokens computed {computed}, fetched {fetched}"
    )


async def _in_another_process(folder: Path, store: dict[str, Any], count: int) -> Any:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.kvstore.acceptance.mixed", str(folder), json.dumps(store), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
