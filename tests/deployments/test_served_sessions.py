"""What a session was given first holds on every replica."""

from __future__ import annotations

import asyncio

import pytest

from deployments.remote import _request_router
from tests.deployments.scripted_pool import expected, load_scripted, scripted_config
from tests.deployments.served_pool import Got, call, read_one, served_pool, until


async def test_a_served_session_keeps_its_decision_where_its_replica_is_full(
    cluster: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each replica decides for itself, and differently."""
    routing = {"policy": {"name": "static"}, "sticky": {}}
    folder = tmp_path_factory.mktemp("marks")
    config = scripted_config(folder, replicas=2, routing=routing)
    with served_pool("full", config, load_scripted, routed=True) as pool:
        pids = await pool.wait_for_replicas(2)
        [home] = (await read_one(pool.backend, call("step=0", session="mine", max_tokens=1))).sources
        writing: dict[str, list[str]] = {}

        def begin(name: str) -> asyncio.Task[Got]:
            async def note(got: Got) -> None:
                writing[name] = got.sources

            asked = call("step=0.05", name, session="mine", max_tokens=2000)
            return asyncio.create_task(read_one(pool.backend, asked, note))

        async def both() -> bool:
            return len(writing) == 2

        load = [begin(name) for name in ("r1", "r2")]
        await until(both, "two calls of the session are answered")
        choice = _request_router(pool.backend._handle)
        choice._room = 1
        got = await read_one(pool.backend, call("step=0", "r3", session="mine", max_tokens=8))
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        await pool.backend.forget("default")
        again = await read_one(pool.backend, call("step=0", "r4", session="mine", max_tokens=8))
    # What is forgotten is forgotten everywhere, and the session begins anew.
    assert {path.name for path in folder.glob("forgot-*")} == {f"forgot-default-{pid}" for pid in pids}
    assert again.ids == expected(5, 8, salt=f"decided by {again.sources[0].removeprefix('pid ')}")
    assert list(writing.values()) == [[home]] * 2
    assert home not in got.sources
    assert got.ids == expected(5, 8, salt=f"decided by {home.removeprefix('pid ')}")
