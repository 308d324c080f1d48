"""A program: a connection over an actor of real Ray whose store and disk take no more; writes how it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ray
from ray.exceptions import OutOfDiskError

from actors.connection import ActorConnection, RayChannel
from actors.protocol import ModelCard
from actors.ray_start import start_ray

STORE_BYTES, PIECE_BYTES = 80 << 20, 8 << 20
NO_DISK = {
    "automatic_object_spilling_enabled": False,
    "local_fs_capacity_threshold": 1e-5,
    "object_store_full_delay_ms": 10,
}


class Wordy:
    """Answers with more than the store has left."""

    async def replies(self) -> AsyncIterator[bytes]:
        yield bytes(2 * PIECE_BYTES)

    async def post(self, number: int, blob: bytes) -> None:
        """Nothing."""

    async def ip(self) -> str:
        return str(ray.util.get_node_ip_address())


async def listen(actor: object, card: ModelCard) -> ActorConnection:
    connection = ActorConnection(RayChannel(actor), card)
    async with asyncio.timeout(60):
        await connection.lost.wait()
    return connection


def main(folder: str) -> None:
    start_ray(folder, object_store_memory=STORE_BYTES, _system_config=NO_DISK)
    actor, held = ray.remote(num_cpus=0)(Wordy).remote(), list[Any]()
    ip = ray.get(actor.ip.remote())
    try:
        while len(held) * PIECE_BYTES <= STORE_BYTES:
            held.append(ray.put(np.zeros(PIECE_BYTES, np.uint8)))
    except OutOfDiskError:
        card = ModelCard("m", "llama", 1, 2, 3, 4, "d", "c", {}, ip, "", 1)
        connection = asyncio.run(listen(actor, card))
        sys.stdout.write(json.dumps({"blameless": connection.blameless, "reason": str(connection.reason), "ip": ip}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
