"""What the replicas of a pool agree on: the program they run and the models they loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ray.experimental import internal_kv as kv

from deployments.build_info import Program, compare, this_program
from deployments.serve_status import running_pools
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.file_names import one_part

NAMESPACE = "turnout"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a replica's deployment was made with.

    Attributes:
        version: as Serve knows it; replicas of one version run the same models.
        program: of the process that deployed it.
    """

    version: str
    program: Program

    def check_program(self, address: str) -> None:
        """Refuse to be a replica among replicas of another program: nodes may join after the checks of the start.

        Args:
            address: of this node.

        Raises:
            TurnoutError: UNAVAILABLE, naming the node, what differs, and what to do.
        """
        compare(address, this_program(), self.program, "the process that deployed this pool")


def begin(application: str, versions: Mapping[str, str]) -> None:
    """Before an application is deployed: forget which models its pools had, but where replicas run and stay.

    Args:
        application: its name in Serve.
        versions: of its pools, by name, as they are to be.
    """
    there = running_pools(application)
    for pool, version in versions.items():
        prefix = _prefix(application, pool)
        before = _get(f"{prefix}version") if pool in there else None
        kept = {f"{prefix}version", f"{prefix}models/{before}"}
        for key in kv._internal_kv_list(prefix, namespace=NAMESPACE):
            if key.decode() not in kept:
                kv._internal_kv_del(key, namespace=NAMESPACE)
        kv._internal_kv_put(f"{prefix}version", version, overwrite=True, namespace=NAMESPACE)


def agree(
    application: str, pool: str, version: str, digests: Mapping[str, str], place: str, config: TurnoutConfig
) -> None:
    """Be the first replica of a version to say which models it has loaded, or have the same as that one.

    Args:
        application: its name in Serve.
        pool: the pool's name.
        version: of its deployment.
        digests: of the models, by name.
        place: node and process of this replica.
        config: says where the models lie.

    Raises:
        TurnoutError: UNAVAILABLE, naming the node, the path, both digests and what to do.
    """
    key = f"{_prefix(application, pool)}models/{version}"
    kv._internal_kv_put(key, json.dumps({"place": place, "digests": dict(digests)}), False, namespace=NAMESPACE)
    first = json.loads(_get(key) or "null")
    if first is None:  # the application is deployed anew at this moment, and this replica is to go
        return
    for name, digest in digests.items():
        if first["digests"].get(name) != digest:
            theirs = f"{first['place']} loaded one with {first['digests'].get(name)}"
            path = config.models[name].path
            message = (
                f"node {place}: model {name!r} at {path} has the digest {digest}, and {theirs}: put the same checkpoint"
                f" on every node; a new one needs a folder of its own, named in models.{name}.path, or the application"
                " stopped and served again"
            )
            raise TurnoutError(Code.UNAVAILABLE, message, f"models.{name}.path")


def _prefix(application: str, pool: str) -> str:
    """Beginning of a pool's keys; escaped, so that those of a pool `a` do not begin those of a pool `a/b`."""
    return f"{application}/{one_part(pool)}/"


def _get(key: str) -> str | None:
    value = kv._internal_kv_get(key, namespace=NAMESPACE)
    return value.decode() if value is not None else None
