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

from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import EngineConfig, ModelConfig, PoolConfig, TurnoutConfig

STORE_BYTES = 80 << 20


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `large` and `small`, which often, not always, agree; two ranks can share their heads."""
    folder = tmp_path_factory.mktemp("pair")
    shape = {"hidden_size": 32, "intermediate_size": 64}
    large = random_model(llama_config(num_hidden_layers=4, **shape), seed=2, spread=0.25)
    with torch.no_grad():
        large.model.layers[3].self_attn.o_proj.weight.mul_(0.2)
        large.model.layers[3].mlp.down_proj.weight.mul_(0.2)
        large.model.norm.weight.mul_(2.0)
    small = random_model(llama_config(num_hidden_layers=3, **shape), seed=2)
    small.load_state_dict(large.state_dict(), strict=False)
    for name, model in (("small", small), ("large", large)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
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
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")  # else a slow core needs minutes to import torch
        folder = tempfile.mkdtemp(prefix="tc", dir="/tmp")
        node = {"num_cpus": 4, "object_store_memory": STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(**node)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
