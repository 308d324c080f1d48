"""The same between GPUs, over NCCL; it connects no GPU with itself, so it takes two."""

from __future__ import annotations

import asyncio

import pytest
import torch

from actors.flat_buffer import meta_of
from actors.transport import GroupBroken, Transport
from tests.actors.test_pickling import DTYPES, LAYOUTS, same

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch.cuda.device_count() is less than 2"),
]


async def formed(generation: int, transports: list[Transport]) -> None:
    address, port = transports[0].listen()
    await asyncio.gather(*(t.join(generation, rank, 2, address, port, 60.0) for rank, t in enumerate(transports)))


async def test_tensors_arrive_in_both_directions_and_a_late_sender_breaks_the_group() -> None:
    pair = [Transport(torch.device("cuda", index)) for index in range(2)]
    await formed(1, pair)
    tensors = [torch.tensor([0, 1, 2, 3, 1]).to(dtype) for dtype in DTYPES] + list(LAYOUTS.values())
    metas = [meta_of(tensor) for tensor in tensors]
    pair[0].ship([tensor.cuda(0) for tensor in tensors], 1, 1)
    there = pair[1].receive(metas, 0, 1, 60.0)
    back = pair[0].receive(metas, 1, 2, 60.0)
    arrived = await there
    assert all(tensor.device == torch.device("cuda", 1) for tensor in arrived)
    pair[1].ship(arrived, 0, 2)
    assert all(same(mine, theirs.cpu()) for mine, theirs in zip(tensors, await back, strict=True))
    with pytest.raises(GroupBroken, match="rank 0"):
        await pair[1].receive(metas, 0, 3, 1.0)
    await formed(2, pair)
    pair[1].ship([tensors[0].cuda(1)], 0, 1)
    [again] = await pair[0].receive(metas[:1], 1, 1, 60.0)
    assert same(tensors[0], again.cpu())
    await asyncio.gather(*(each.close() for each in pair))
