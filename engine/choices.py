"""Readouts of given logits: what waits while the device is busy is read in one pass."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

import torch

from decoding.model import Readout, ReadSpec
from decoding.readout import read
from decoding.row_context import RowContext
from engine.device import Device, to_its_end


@dataclass(slots=True, eq=False)
class _Asked:
    """Logits to read.

    Attributes:
        logits: [R, vocab].
        histories: [R] whose row is whose.
        want: what to read.
        rows: what was read; empty before.
    """

    logits: torch.Tensor
    histories: list[RowContext]
    want: ReadSpec
    rows: list[Readout] = field(default_factory=list)


class Choices:
    """Reads given logits on a device, between two forwards.

    Args:
        device: where the model is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiting: list[_Asked] = []

    async def read(self, logits: torch.Tensor, histories: list[RowContext], want: ReadSpec) -> list[Readout]:
        """Read what each row asks for, together with whatever else waits.

        Args:
            logits: [R, vocab], on any device.
            histories: [R] whose row is whose.
            want: what to read of each.
        """
        if not histories:
            return []
        asked = _Asked(logits, histories, want)
        self._waiting.append(asked)
        try:
            async with self._device.quiet():
                if not asked.rows:
                    await self._read_waiting(asked)
        finally:
            if asked in self._waiting:
                self._waiting.remove(asked)
        return asked.rows

    async def _read_waiting(self, asked: _Asked) -> None:
        alone = asked not in self._waiting  # it was read with others before, which failed
        together = [asked] if alone else self._waiting
        if not alone:
            self._waiting = []
        try:
            await self._run(together)
        except Exception:
            if len(together) == 1:
                raise
            # One of them may be to blame: each is read by itself, when its turn comes.
            await self._run([asked])

    async def _run(self, together: list[_Asked]) -> None:
        # To its end even if this caller gives up: the others have their rows from it.
        await to_its_end(self._device.run(partial(_read, together, self._device.torch_device)))


@torch.inference_mode()
def _read(together: Items[_Asked], device: torch.device) -> None:
    logits = torch.cat([each.logits.to(device, torch.float32) for each in together])
    histories = [history for each in together for history in each.histories]
    rows = read(logits, histories, [each.want for each in together for _ in each.histories])
    for each in together:
        each.rows, rows = rows[: len(each.histories)], rows[len(each.histories) :]
