"""What a replica must fit is compiled beside the actor's loop: operations wait for it, messages do not."""

from __future__ import annotations

import asyncio

import pytest

from actors.sequence_replica import Replica
from decoding.constraints.base import Constraint
from decoding.sequence import Sequence
from tests.constrained import char_compiler
from turnout.errors import TurnoutError, invalid
from turnout.structure import Structure
from turnout.types import SamplingParams


async def test_twins_wait_for_one_compilation_and_get_constraints_of_their_own() -> None:
    gate = asyncio.Event()

    async def compiled() -> Constraint:
        await gate.wait()
        return char_compiler().compile(Structure(kind="regex", value="ab"))

    making = asyncio.create_task(compiled())
    replicas = [Replica(Sequence([5], SamplingParams(), 0), making=making) for _ in range(3)]
    waiting = [asyncio.create_task(replica.ready()) for replica in replicas]
    await asyncio.sleep(0)
    waiting[0].cancel()  # one operation that is given up ends nobody else's compilation
    gate.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [replica.making is None for replica in replicas] == [False, True, True]
    await replicas[0].ready()
    assert len({id(replica.seq.constraint) for replica in replicas} - {id(None)}) == 3


async def test_a_structure_that_cannot_be_compiled_fails_the_operation() -> None:
    async def refused() -> Constraint:
        raise invalid("structure", "is too complex")

    replica = Replica(Sequence([5], SamplingParams(), 0), making=asyncio.create_task(refused()))
    for _ in range(2):
        with pytest.raises(TurnoutError, match="too complex"):
            await replica.ready()
    assert replica.seq.constraint is None
