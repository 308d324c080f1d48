"""Ranks that do not come, cannot load, die or stop: who it was is said, in time, and nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.parallel import join, load_sharded
from engine.parallel.connections import BEAT_S, SILENT_BEATS
from engine.parallel.framing import Op
from tests.engine.harness import Reference
from tests.engine.split import HOST, RankProcess, split
from tests.kvstore.servers import until
from training.random_models import llama_config, random_model
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.free_ports import free_port
from turnout.types import SamplingParams

PROMPT = [5, 6, 7, 8, 9]
STEP_S = 8.0  # a busy machine may stop a process for seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(llama_config(), seed=3, spread=0.2).save_pretrained(path)
    return path


@pytest.fixture
def rank() -> Iterator[RankProcess]:
    """One for each test: some of them end it."""
    process = RankProcess()
    yield process
    process.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_follower_that_is_gone_fails_the_next_forward(folder: Path, rank: RankProcess, how: str) -> None:
    with split(rank, folder, step_timeout_s=60.0 if how == "killed" else STEP_S) as model:
        seq = Sequence(PROMPT, SamplingParams(max_tokens=40), seed=0)
        await model.extend(seq)
        if how == "killed":
            rank.kill()
            says, within_s = "has ended", 20.0
        else:
            os.kill(rank.pid, signal.SIGSTOP)
            says, within_s = "gives no sign of life", STEP_S + (SILENT_BEATS + 1) * BEAT_S + 30.0
        started = time.monotonic()
        with pytest.raises(Interrupted, match=rf"rank 1 \({HOST}, pid {rank.pid}\) {says}"):
            await model.extend(seq, (3,))
        assert time.monotonic() - started < within_s
        started = time.monotonic()
        with pytest.raises(Interrupted, match="must be started again"):
            await model.extend(seq, (3,))
        with pytest.raises(Interrupted, match="must be started again"):
            model.embed([3])
        assert time.monotonic() - started < 5.0
        model.release(seq)
        await model.close()


async def test_a_follower_that_fails_says_why(folder: Path, rank: RankProcess) -> None:
    with split(rank, folder, step_timeout_s=STEP_S) as model:
        group = model.batcher.runner.plan._group  # type: ignore[attr-defined]
        started = time.monotonic()
        said = rf"rank 1 .*pid {rank.pid}\) failed: RuntimeError: the leader asks for"
        with pytest.raises(Interrupted, match=said), group.leading(Op.WELCOME):
            group.gather(torch.zeros(1))
        assert time.monotonic() - started < STEP_S + 20.0
        await model.close()
    assert rank.outcome()["error"] == "Interrupted"


async def test_of_three_ranks_the_one_that_ended_is_named_and_the_others_end(tmp_path: Path, rank: RankProcess) -> None:
    config = llama_config(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    random_model(config, seed=3, spread=0.2).save_pretrained(tmp_path)
    plain = Reference(random_model(config, seed=3, spread=0.2))
    second = RankProcess()
    with split([rank, second], tmp_path, step_timeout_s=STEP_S) as model:
        seq = Sequence(PROMPT, SamplingParams(max_tokens=40), seed=0)
        [row] = await model.extend(seq, want=ReadSpec(draw=None, logits=True))
        assert row.logits is not None
        torch.testing.assert_close(row.logits, plain.logits(PROMPT)[-1], atol=1e-4, rtol=0)
        second.kill()
        with pytest.raises(Interrupted, match=rf"rank 2 \({HOST}, pid {second.pid}\) has ended; all of them must"):
            await model.extend(seq, (3,))
        assert rank.outcome()["error"] == "Interrupted"
        model.release(seq)
        await model.close()
    second.close()


async def test_a_follower_that_ends_in_a_pause_is_noticed(folder: Path, rank: RankProcess) -> None:
    with split(rank, folder) as model:
        group = model.batcher.runner.plan._group  # type: ignore[attr-defined]
        group.tell(Op.WELCOME)  # it fails by itself; nobody waits for it
        until(lambda: group.lost is not None, 30.0)
        assert f"pid {rank.pid}) failed: RuntimeError: the leader asks for WELCOME; all of them must" in group.lost
        with pytest.raises(Interrupted, match="cannot go on after a pause"):
            model.embed([3])
        await model.close()
    assert rank.outcome()["error"] == "Interrupted"


async def test_followers_end_when_the_leader_is_gone(folder: Path, rank: RankProcess) -> None:
    with split(rank, folder) as model:
        for link in model.batcher.runner.plan._group.links:  # type: ignore[attr-defined]
            link.close()
        outcome = rank.outcome()
        assert outcome["error"] == "Interrupted"
        assert f"the leader, rank 0 ({HOST}" in outcome["message"]
        await model.close()


def test_a_rank_that_does_not_come_is_named_by_all(rank: RankProcess, folder: Path) -> None:
    address = {"world": 3, "address": HOST, "port": free_port(), "timeout_s": 1.5}
    rank.start(rank=1, folder=str(folder), **address)
    with pytest.raises(TurnoutError, match="rank 2 of 3 did not join") as refused:
        join(0, **address)
    assert refused.value.code is Code.UNAVAILABLE
    assert "rank 2 of 3 did not join" in rank.outcome()["message"]


def test_a_leader_that_does_not_come_is_named(rank: RankProcess, folder: Path) -> None:
    rank.start(rank=1, folder=str(folder), world=2, address=HOST, port=free_port(), timeout_s=1.0)
    assert "rank 0 does not answer" in rank.outcome()["message"]


def test_a_rank_outside_the_group_is_refused() -> None:
    for rank, world in ((2, 2), (-1, 2), (0, 1)):
        with pytest.raises(TurnoutError, match="two at least"):
            join(rank, world, HOST, free_port(), 1.0)


def loading(rank: RankProcess, mine: Path, theirs: Path, timeout_s: float = 20.0) -> TurnoutError:
    """What the leader says when the ranks load from these folders."""
    address = {"world": 2, "address": HOST, "port": free_port(), "timeout_s": 20.0}
    rank.start(rank=1, folder=str(theirs), **address)
    group = join(0, **address)
    with pytest.raises(TurnoutError) as refused:
        load_sharded(group, "m", mine, torch.float32, timeout_s=timeout_s)
    return refused.value


def test_a_rank_that_cannot_load_is_named(rank: RankProcess, folder: Path, tmp_path: Path) -> None:
    error = loading(rank, folder, tmp_path)
    assert error.code is Code.UNAVAILABLE
    assert f"rank 1 ({HOST}, pid {rank.pid}) could not find 'm'" in error.message
    missing = f"models.m.path: no checkpoint (config.json) in '{tmp_path}'"
    assert rank.outcome() == {"error": "TurnoutError", "message": missing}
    assert missing in error.message


def test_a_rank_with_other_files_is_named(rank: RankProcess, folder: Path, tmp_path: Path) -> None:
    random_model(llama_config(), seed=4, spread=0.2).save_pretrained(tmp_path)
    error = loading(rank, folder, tmp_path)
    assert f"rank 1 ({HOST}, pid {rank.pid}) did not find 'm'" in error.message
    assert rank.outcome()["error"] == "Interrupted"


def test_a_rank_that_dies_while_it_loads_is_named(rank: RankProcess, folder: Path) -> None:
    address = {"world": 2, "address": HOST, "port": free_port(), "timeout_s": 20.0}
    rank.start(rank=1, folder=str(folder), **address)
    group = join(0, **address)
    os.kill(rank.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(load_sharded, group, "m", folder, torch.float32, timeout_s=20.0)
        rank.kill()
        with pytest.raises(TurnoutError) as refused:
            load.result(30)
    assert "rank 1" in refused.value.message
