"""A member of a group in a process of its own: it does what it is told on stdin."""

from __future__ import annotations

import asyncio
import sys

import torch

from actors.transport import Transport


async def main(generation: int, rank: int, world: int, port: int) -> None:
    transport = Transport(torch.device("cpu"))
    await transport.join(generation, rank, world, "127.0.0.1", port, 60.0)
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if line[0] == "ship":
            transport.ship([torch.full((int(line[3]),), float(line[2]))], int(line[1]), int(line[2]))
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
