"""Small random models with heads for every drafter, behind the wire in this process and in real actors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import ray
import torch

from actors.ray_start import start_ray
from decoding.exit_heads import ExitHead
from decoding.heads import MedusaHeads, RecurrentHead
from decoding.sampling_heads import SamplingHeads
from engine.loading import load_checkpoint
from pool.local_pool import LocalPool
from tests.actors.hosts import RemotePool, close_in_process, open_in_process, open_local
from tests.decoding.head_models import save_head
from tests.near_pair import WIDTH, save_near_pair
from tests.ray_mode import read_again, without_authentication
from training.random_models import BYTE_VOCAB
from turnout.config import EngineConfig, ModelConfig, PoolConfig, TurnoutConfig

EXIT = 2


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `large` and `small`, which often, not always, agree; in `artifacts` random heads for `large`."""
    folder = tmp_path_factory.mktemp("models")
    save_near_pair(folder)
    digest = load_checkpoint(folder / "large", torch.float32, torch.device("cpu")).digest
    heads = {
        "eesd": (ExitHead(WIDTH, 4, 2, 8, inner=24), {"exit_layer": EXIT}),
        "kangaroo": (ExitHead(WIDTH, 4, 2, 8), {"exit_layer": EXIT}),
        "medusa": (MedusaHeads(WIDTH, heads=3), {"accuracies": [[0.5, 0.3, 0.2]] * 3}),
        "autodeco": (SamplingHeads(WIDTH, 16), {}),
        "redrafter": (RecurrentHead(WIDTH, BYTE_VOCAB), {}),
    }
    for kind, (head, settings) in heads.items():
        torch.manual_seed(3)
        for each in head.parameters():
            if each.ndim > 1:
                torch.nn.init.normal_(each, std=0.1)
        save_head(folder / "artifacts", kind, head, digest, **settings)
    return folder


@pytest.fixture(scope="session")
def actors_config(models_folder: Path) -> TurnoutConfig:
    """The pool `pair` in float32; on one thread, as a member would else take all cores from this process."""
    return TurnoutConfig(
        models={
            name: ModelConfig(path=str(models_folder / name), dtype="float32", kv_memory_bytes=8 << 20)
            for name in ("small", "large")
        },
        pools={"pair": PoolConfig(small="small", large="large", artifacts=str(models_folder / "artifacts"))},
        engine=EngineConfig(block_size=8, token_budget=64, threads=1),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools(actors_config: TurnoutConfig) -> AsyncIterator[tuple[LocalPool, RemotePool]]:
    """The pool in one piece, and behind the wire in this process."""
    local, remote = open_local(actors_config), await open_in_process(actors_config)
    yield local, remote
    await close_in_process(remote)
    await local.close()


@pytest.fixture
def waits_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine KV may come late. A test in which it is given up sets its own limit."""
    monkeypatch.setattr("actors.disaggregated_prefill.PATIENCE_S", 60.0)


@pytest_asyncio.fixture(loop_scope="module")
async def local(pools: tuple[LocalPool, RemotePool]) -> AsyncIterator[LocalPool]:
    """The module's pool in one piece; idle after the test."""
    yield pools[0]
    assert pools[0].stats().sequences == pools[0].stats().used_blocks == 0


@pytest_asyncio.fixture(loop_scope="module")
async def remote(pools: tuple[LocalPool, RemotePool]) -> AsyncIterator[RemotePool]:
    """The module's pool behind the wire; idle on both sides after the test."""
    yield pools[1]
    await pools[1].settle()
    pools[1].assert_idle()


@pytest_asyncio.fixture(loop_scope="module")
async def fragile(actors_config: TurnoutConfig) -> AsyncIterator[RemotePool]:
    """Another one, for tests that leave it broken."""
    pool = await open_in_process(actors_config)
    yield pool
    await close_in_process(pool)


@pytest.fixture
async def own_remote(actors_config: TurnoutConfig) -> AsyncIterator[RemotePool]:
    """A pool behind the wire for one test; idle on both sides after it."""
    pool = await open_in_process(actors_config)
    yield pool
    await pool.settle()
    pool.assert_idle()
    await close_in_process(pool)


class Cluster:
    """One Ray for all tests of this folder; tests of other folders start theirs."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._folder = ""

    def open(self) -> None:
        if ray.is_initialized():
            return
        without_authentication(self._patch)
        self._patch.setenv("RAY_worker_niceness", "0")  # else a slow core needs minutes to import torch
        self._folder = tempfile.mkdtemp(prefix="ta", dir="/tmp")
        start_ray(self._folder, num_cpus=8, object_store_memory=80 << 20)

    def close(self) -> None:
        if self._folder:
            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._patch.undo()
            read_again()
            self._folder = ""


CLUSTER = Cluster()
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    """A running Ray."""
    CLUSTER.open()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or HERE not in nextitem.path.parents:
        CLUSTER.close()
