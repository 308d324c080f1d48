"""The Ray cluster that a job runs on: one that is named, or one of its own, and how its copies lie on it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from deployments.app import start_local_ray
from deployments.pool_options import replica_bundles
from turnout.config import RayConfig, TurnoutConfig

if TYPE_CHECKING:
    from deployments.batches.offline import Job

DATA_CPUS = 4  # logical ones, for Ray Data: to read, to leave out what is done, and to write


@contextmanager
def connected(job: Job) -> Iterator[None]:
    """A Ray cluster, started here unless one is named."""
    if ray.is_initialized():
        yield
        return
    if job.address is not None:
        from deployments.cluster import connect, leave

        connect(job.address)
        try:
            yield
        finally:
            leave()
        return
    folder = start_local_ray(job.config.model_copy(update={"ray": _ray(job.config, cpus_for(job))}))
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder or "", ignore_errors=True)


def _ray(config: TurnoutConfig, num_cpus: int) -> RayConfig:
    return config.ray.model_copy(update={"num_cpus": max(num_cpus, config.ray.num_cpus or 0)})


def num_processes(job: Job) -> int:
    """How many of its copies share a machine, where forwards run in the copies themselves: Ray Data spreads them."""
    pool = job.config.pools[job.pool]
    if pool.placement.models == "actors":
        return 1  # these have processes and threads of their own
    wanted = replica_bundles(job.config, pool)[0]
    machines = {
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items())
    }
    return math.ceil(job.actors / max(len(machines), 1))


def cpus_for(job: Job) -> int:
    """Logical CPUs of a Ray of its own: for all processes of its copies, and for Ray Data."""
    bundles = replica_bundles(job.config, job.config.pools[job.pool])
    return math.ceil(job.actors * sum(each.get("CPU", 0.0) for each in bundles)) + DATA_CPUS
