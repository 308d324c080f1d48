"""Replicas that are killed while they answer: the client sees a pause, and the answer of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.scripted_pool import expected, load_scripted, scripted_config
from tests.deployments.served_pool import (
    Got,
    ServedPool,
    call,
    kill,
    kill_after,
    pid_of,
    read,
    read_one,
    served_pool,
    until,
)
from turnout.calls import Chunk, ScoreCall, Usage
from turnout.errors import Code, TurnoutError

# The module's pool is one backend, which lives in one loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def pool(cluster: object, folder: Path) -> Iterator[ServedPool]:
    with served_pool("replay", scripted_config(folder, replicas=2), load_scripted, routed=True) as served:
        asyncio.run(served.wait_for_replicas(2))
        yield served


async def running(pool: ServedPool, count: int) -> None:
    async def all_of_them() -> bool:
        return await pool.requests() == count

    await until(all_of_them, f"{count} calls run")


def same_everywhere(ids: list[int], sources: list[str], seed: int) -> None:
    """A routed answer: its tokens are a function of the first decision, which names the first process."""
    assert ids == expected(seed, len(ids), salt=f"decided by {sources[0].removeprefix('pid ')}")


async def test_a_stream_whose_replica_is_killed_goes_on_in_the_other_one(pool: ServedPool) -> None:
    got = await read_one(pool.backend, call("step=0.03", max_tokens=30), kill_after(5))
    assert len(got.ids) == 30
    assert len(got.sources) == 2
    same_everywhere(got.ids, got.sources, 5)
    assert got.text == "".join(map(chr, got.ids))
    assert got.reasons == ["length"]
    assert got.usage is not None
    assert (got.usage.completion_tokens, got.usage.seed) == (30, 5)
    assert got.usage.wall_s > 30 * 0.03
    await pool.wait_for_replicas(2)


async def test_every_answer_of_a_call_goes_on(pool: ServedPool) -> None:
    got = await read(pool.backend, call("step=0.02", n=3, max_tokens=12), kill_after(4))
    salt = f"decided by {got[0].sources[0].removeprefix('pid ')}"
    for index, answer in got.items():
        assert answer.ids == expected(5, 12, index, salt)
        assert answer.reasons == ["length"]
    await pool.wait_for_replicas(2)


async def test_many_calls_survive_the_loss_of_a_replica(pool: ServedPool) -> None:
    calls = [call("step=0.02", f"many{seed}", seed=seed, max_tokens=120) for seed in range(1, 13)]
    begun: list[Got] = []

    async def kill_when_all_have_begun(got: Got) -> None:
        if not got.tokens or any(got is each for each in begun):
            return
        begun.append(got)
        if len(begun) == len(calls):
            kill(pid_of(got.sources[-1]))

    answers = await asyncio.gather(*(read_one(pool.backend, each, kill_when_all_have_begun) for each in calls))
    for seed, got in enumerate(answers, 1):
        assert len(got.ids) == 120
        same_everywhere(got.ids, got.sources, seed)
    assert any(len(got.sources) == 2 for got in answers)
    assert any(len(got.sources) == 1 for got in answers)
    await pool.wait_for_replicas(2)


async def test_a_whole_answer_and_a_score_are_asked_for_again(pool: ServedPool, folder: Path) -> None:
    once = folder / "complete"
    *chunks, usage = await pool.backend.complete(call(f"step=0 die_once={once}", "whole", max_tokens=8))
    assert once.exists()
    assert isinstance(usage, Usage)
    [chunk] = [each for each in chunks if isinstance(each, Chunk)]
    same_everywhere([t.id for t in chunk.tokens], [chunk.tokens[0].source], 5)
    await pool.wait_for_replicas(2)
    once = folder / "score"
    [scored] = await pool.backend.score(ScoreCall("score", "p", f"step=0 die_once={once}", ("x",)))
    assert once.exists()
    assert scored.tokens[0].logprob == -0.5
    await pool.wait_for_replicas(2)


async def test_an_interrupted_answer_goes_on(pool: ServedPool, folder: Path) -> None:
    got = await read_one(pool.backend, call("interrupt=4", "interrupted", max_tokens=9))
    assert (folder / "interrupted-interrupted").exists()
    same_everywhere(got.ids, got.sources, 5)
    assert got.usage is not None
    assert "lost once" in got.usage.notes[-1]


async def test_only_the_call_that_ends_processes_fails(pool: ServedPool) -> None:
    others = [call("step=0.05", f"other{seed}", seed=seed, max_tokens=60) for seed in range(1, 7)]
    tasks = [asyncio.create_task(read_one(pool.backend, each)) for each in others]
    await running(pool, 6)
    with pytest.raises(TurnoutError) as failure:
        await read_one(pool.backend, call("step=0.2 die=3", "poison"))
    assert failure.value.code is Code.INTERNAL
    assert "'poison'" in failure.value.message
    assert "not tried again" in failure.value.message
    for seed, got in enumerate(await asyncio.gather(*tasks), 1):
        assert len(got.ids) == 60
        same_everywhere(got.ids, got.sources, seed)
    await pool.wait_for_replicas(2)


async def test_with_no_replica_left_a_call_waits_for_the_next_one(pool: ServedPool) -> None:
    pids = await pool.pids()
    asked = asyncio.create_task(read_one(pool.backend, call("step=0.05", "alone", max_tokens=40)))
    await running(pool, 1)
    for pid in pids:
        kill(pid)
    got = await asked
    assert len(got.ids) == 40
    same_everywhere(got.ids, got.sources, 5)
    assert not set(await pool.wait_for_replicas(2)) & set(pids)


async def test_a_replica_that_cannot_go_on_is_replaced(pool: ServedPool, folder: Path) -> None:
    sick, *_ = await pool.pids()
    (folder / f"sick-{sick}").touch()

    async def replaced() -> bool:
        pids = await pool.pids()
        return sick not in pids and len(pids) == 2

    await until(replaced, "it is replaced", 60.0)
    assert (await read_one(pool.backend, call("step=0", max_tokens=3))).reasons == ["length"]
