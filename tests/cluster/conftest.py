"""A small random pair, and a cluster of three raylets for it: one for the coordinator, one for each model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from actors.ray_start import try_to_start
from tests.near_pair import save_near_pair
from tests.ray_mode import read_again, without_authentication
from turnout.config import EngineConfig, ModelConfig, PoolConfig, TurnoutConfig

STORE_BYTES = 80 << 20


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `large` and `small`, which often, not always, agree."""
    folder = tmp_path_factory.mktemp("pair")
    save_near_pair(folder)
    return folder


@pytest.fixture(scope="session")
def config(pair_folder: Path) -> TurnoutConfig:
    """The pool `pair` in float32, in one process."""
    return TurnoutConfig(
        models={
            name: ModelConfig(path=str(pair_folder / name), dtype="float32", kv_memory_bytes=8 << 20)
            for name in ("small", "large")
        },
        pools={"pair": PoolConfig(small="small", large="large")},
        engine=EngineConfig(block_size=8, token_budget=64),
    )


@pytest.fixture(scope="module")
def raylets() -> Iterator[None]:
    """Three raylets, which only look like three machines. Tests of other folders start their own Ray."""
    with pytest.MonkeyPatch.context() as patch:
        without_authentication(patch)
        patch.setenv("RAY_worker_niceness", "0")  # else a slow core needs minutes to import torch
        folder = tempfile.mkdtemp(prefix="tc", dir="/tmp")
        # `Cluster` writes its address there, and would into a folder that all of a machine's Rays share.
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        node = {"num_cpus": 4, "object_store_memory": STORE_BYTES}

        def start() -> Cluster:
            head = {**node, "temp_dir": folder, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            for _ in range(2):
                cluster.add_node(**node)
            return cluster

        cluster = try_to_start(start, folder)
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
    read_again()
