from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.app import start
from tests.deployments.in_process import make_config
from turnout.config import RayConfig
from turnout.errors import Code, TurnoutError
from turnout.free_ports import free_port


@pytest.mark.parametrize(
    "module", ["deployments.ingress", "deployments.grpc_wire", "deployments.app", "turnout.client"]
)
def test_front_ends_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


@pytest.mark.parametrize("field", ["grpc_port", "http_port"])
def test_a_taken_port_is_refused_by_name(field: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TurnoutError) as refusal:
            start(make_config(**{"grpc_port": free_port(), "http_port": free_port(), field: port}))
    assert (refusal.value.code, refusal.value.field) == (Code.INVALID_ARGUMENT, f"server.{field}")
    assert str(port) in refusal.value.message


def test_a_cluster_too_small_for_the_pools_is_refused() -> None:
    config = make_config(grpc_port=free_port(), http_port=free_port())
    pool = config.pools["demo"].model_copy(update={"replicas": 2})
    small = config.model_copy(update={"pools": {"demo": pool}, "ray": RayConfig(num_cpus=1)})
    with pytest.raises(TurnoutError) as refusal:
        start(small)
    assert refusal.value.field == "ray.num_cpus"
