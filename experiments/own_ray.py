"""A Ray of a run's own, on this machine."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._raylet import Config as RayNativeConfig  # type: ignore[attr-defined]

from actors.ray_start import start_ray


@contextmanager
def ray_of_its_own(num_cpus: int = 4) -> Iterator[None]:
    """A Ray for this run; another one on the machine is left alone.

    Args:
        num_cpus: logical ones: how many actors and tasks there may be, not how many cores they get.
    """
    environment = os.environ  # noqa: TID251 - Ray has no other way to pass these to its processes
    environment.setdefault("RAY_AUTH_MODE", "token")
    environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    environment.setdefault("RAY_worker_niceness", "0")  # workers run at 15 otherwise
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    RayNativeConfig.initialize("")  # importing ray has read the authentication mode already
    with tempfile.TemporaryDirectory(prefix="turnout-", ignore_cleanup_errors=True) as folder:
        start_ray(f"{folder}/ray", num_cpus=num_cpus, object_store_memory=256 << 20, _node_ip_address="127.0.0.1")
        try:
            yield
        finally:
            ray.shutdown()
