"""Weights as integers in groups of inputs that share a scale, and how plain weights are rounded to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

Bits = Literal[4, 8]
GROUP = 32  # inputs that share a scale where we choose; every other group is a multiple
ROUNDED_BITS = {"int8": 8.5, "int4": 5.0}  # what a number takes with its share of scale and minimum
LARGEST_GROUP = 128  # of the kernels; the scale of more inputs is repeated
CHUNK = 1 << 20  # numbers that are rounded at once
MOST = {4: 15, 8: 127}  # the largest integer
SHRINKS = (1.0, 0.92)  # of a group's range, that are tried for the least squared error


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A linear layer's weight [rows, width]: scale * (q - zero), or scale * q + minimum; in groups of a row's inputs.

    Attributes:
        codes: uint8 of `small_bits`, or int8 (8 bits) [rows, width].
        scales: float16 [rows, groups]; with `blocks` int8.
        zeros: float16 [rows, groups], whole numbers; None: 8 of 4 bits, 16 of 5, 32 of 6, 0 of 8.
        minimums: of the type of `scales` [rows, groups], in place of zeros.
        group: inputs of a group; the last one may be cut off.
        blocks: float16 [rows, super-blocks, 1 or 2]: what the scales, and the minimums, of a super-block's groups are
            multiplied with; there are no zeros then, and the super-blocks make up the width.
        small_bits: 4, 5 or 6, of codes that are uint8.
        order: int32 [width], which input each column of codes is of; None: they are in the inputs' order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    group: int = GROUP
    blocks: torch.Tensor | None = None
    small_bits: int = 4
    order: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        """Of an integer."""
        return self.small_bits if self.codes.dtype == torch.uint8 else 8

    @property
    def kind(self) -> tuple[int, int, bool, bool, int, bytes]:
        """What is alike in weights whose rows may be in one matrix.

        Bits, group, whether there are zeros, whether minimums, the groups of a super-block (0: there are none), and
        the order of inputs.
        """
        order = b"" if self.order is None else self.order.numpy().tobytes()
        return self.bits, self.group, self.zeros is not None, self.minimums is not None, self.blocked, order

    @property
    def blocked(self) -> int:
        """Groups of a super-block; 0: there are none."""
        return 0 if self.blocks is None else self.scales.shape[1] // self.blocks.shape[1]

    def dense(self) -> torch.Tensor:
        """The numbers it stands for, float32 [rows, width]."""
        rows, width = self.codes.shape
        numbers = self._grouped(self.codes.float())
        if self.minimums is None:
            middle = 0 if self.bits == 8 else 1 << (self.bits - 1)
            zeros = middle if self.zeros is None else self.zeros.float()[..., None]
            numbers = (numbers - zeros) * self._factors(self.scales, 0)
        else:
            numbers = numbers * self._factors(self.scales, 0) + self._factors(self.minimums, 1)
        numbers = numbers.view(rows, -1)[:, :width]
        return numbers if self.order is None else torch.empty_like(numbers).index_copy_(1, self.order.long(), numbers)

    def _factors(self, stored: torch.Tensor, which: int) -> torch.Tensor:
        """float32 [rows, groups, 1] of scales (0) or minimums (1); exact, since 8 times 11 bits are fewer than 24."""
        factors = stored.float()
        if self.blocks is not None:
            factors = factors * self.blocks[..., which].float().repeat_interleave(self.blocked, dim=1)
        return factors[..., None]

    def _grouped(self, numbers: torch.Tensor) -> torch.Tensor:
        return F.pad(numbers, (0, -numbers.shape[1] % self.group)).view(len(numbers), -1, self.group)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> IntegerWeight:
        """The weight with its rows (of any number of columns) in another order, or padded with rows of 0."""
        codes, scales = change(self.codes), change(self.scales)
        zeros, minimums, blocks = (
            None if each is None else change(each) for each in (self.zeros, self.minimums, self.blocks)
        )
        return replace(self, codes=codes, scales=scales, zeros=zeros, minimums=minimums, blocks=blocks)

    @staticmethod
    def joined(
        weights: Sequence[IntegerWeight], join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat
    ) -> IntegerWeight | None:
        """Rows of several weights in one; None where they are of more than one kind."""
        if len({weight.kind for weight in weights}) != 1:
            return None

        def together(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
            present = [part for part in parts if part is not None]
            return join(present) if present else None

        return IntegerWeight(
            join([weight.codes for weight in weights]),
            join([weight.scales for weight in weights]),
            together([weight.zeros for weight in weights]),
            together([weight.minimums for weight in weights]),
            weights[0].group,
            together([weight.blocks for weight in weights]),
            weights[0].small_bits,
            weights[0].order,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of integers, scales, offsets and the order, as the kernels keep them."""
        factors = (self.scales, self.zeros, self.minimums, self.blocks, self.order)
        return self.scales.numel() * self.group * self.bits // 8 + sum(
            each.numel() * each.element_size() for each in factors if each is not None
        )


def stored(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int,
    index: torch.Tensor | None = None,
) -> IntegerWeight | None:
    """A weight from a checkpoint: scale * (q - zero), zero being 0 without zeros.

    Args:
        codes: whole numbers [rows, width], unsigned of `bits` bits, or int8 (signed).
        scales: [rows, groups].
        zeros: [rows, groups], counted as the codes are.
        bits: of the codes.
        group: inputs that share a scale.
        index: [width], the group of each input; None: inputs of a group are neighbours.

    Returns:
        None where these are not 4 or 8 bits, a scale is no number of float16, a group has more or fewer inputs, or
        there are more or fewer scales than groups.
    """
    if scales.shape[1] != -(-codes.shape[1] // max(group, 1)):
        return None
    order: torch.Tensor | None = None
    if index is not None:
        whole = torch.arange(codes.shape[1]) // max(group, 1)
        if not torch.equal(index, whole):
            order = torch.argsort(index, stable=True)
            if not torch.equal(index[order], whole):
                return None
            codes, order = codes[:, order], order.int()
    small = scales.half()
    if bits not in (4, 8) or not torch.equal(small.float(), scales.float()):
        return None
    if group > LARGEST_GROUP:
        if scales.shape[1] > 1 and group % LARGEST_GROUP:
            return None
        parts = -(-codes.shape[1] // LARGEST_GROUP)
        each = torch.arange(parts) * LARGEST_GROUP // group
        small, group = small[:, each], LARGEST_GROUP
        zeros = None if zeros is None else zeros[:, each]
    middle = 1 << (bits - 1)
    if codes.dtype == torch.int8:
        unsigned, zeros = codes.int() + middle, None if zeros is None else zeros.float() + middle
        zeros = torch.full_like(small, middle) if zeros is None else zeros
    else:
        unsigned = codes.int()
        zeros = torch.zeros_like(small) if zeros is None else zeros.float()
    plain = bool((zeros == middle).all())
    if bits == 4:
        return IntegerWeight(unsigned.to(torch.uint8), small, None if plain else zeros.half(), None, group, order=order)
    zeros = None if plain else (zeros - middle).half()
    return IntegerWeight((unsigned - middle).to(torch.int8), small, zeros, None, group, order=order)


def rounded(weight: torch.Tensor, bits: Bits) -> IntegerWeight:
    """A plain weight [rows, width] rounded to integers, in groups of 32.

    8 bits are symmetric. 4 bits have a minimum, and of several ranges a group takes the one of least squared error; its
    scale and minimum are then refitted to the integers by least squares, as llama.cpp's k-quants are.
    """
    rows = max(1, CHUNK // weight.shape[1])
    parts = [weight[start : start + rows] for start in range(0, len(weight), rows)]
    whole = IntegerWeight.joined([_rounded_8(part) if bits == 8 else _rounded_4(part) for part in parts])
    assert whole is not None
    return whole


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """float32 [rows, groups, GROUP]; what is missing in the last group repeats the row's last number."""
    missing = -weight.shape[1] % GROUP
    numbers = weight.detach().float()
    if missing:
        numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, missing)], dim=1)
    return numbers.reshape(len(weight), -1, GROUP)


def _rounded_8(weight: torch.Tensor) -> IntegerWeight:
    numbers = _groups(weight)
    scales = (numbers.abs().amax(dim=2) / MOST[8]).half()
    codes = _codes(numbers, scales, torch.zeros_like(scales), -MOST[8], MOST[8]).to(torch.int8)
    return IntegerWeight(codes.view(len(weight), -1)[:, : weight.shape[1]], scales)


def _rounded_4(weight: torch.Tensor) -> IntegerWeight:
    numbers = _groups(weight)
    least, most = numbers.amin(dim=2), numbers.amax(dim=2)
    middle, half = (least + most) / 2, (most - least) / 2
    best: tuple[torch.Tensor, ...] | None = None
    for shrink in SHRINKS:
        scales, minimums = (2 * half * shrink / MOST[4]).half(), (middle - half * shrink).half()
        scales, minimums = _refitted(numbers, _codes(numbers, scales, minimums, 0, MOST[4]), scales, minimums)
        codes = _codes(numbers, scales, minimums, 0, MOST[4])
        made = codes * scales.float()[..., None] + minimums.float()[..., None]
        tried = ((made - numbers).square().sum(dim=2), scales, minimums, codes)
        if best is None:
            best = tried
            continue
        better = tried[0] < best[0]
        best = tuple(
            torch.where(better[..., None] if new.ndim == 3 else better, new, old)
            for new, old in zip(tried, best, strict=True)
        )
    assert best is not None
    _, scales, minimums, codes = best
    codes = codes.to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]]
    return IntegerWeight(codes, scales, minimums=minimums)


def _codes(numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, least: int, most: int) -> torch.Tensor:
    steps = torch.where(scales > 0, 1 / scales.float(), 0)[..., None]
    return ((numbers - minimums.float()[..., None]) * steps).round_().clamp_(least, most)


def _refitted(
    numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of each group that fit its integers best; those given where all integers are one."""
    code, number = codes.mean(dim=2), numbers.mean(dim=2)
    centred = codes - code[..., None]
    spread = centred.square().sum(dim=2)
    slope = (centred * numbers).sum(dim=2) / spread.clamp_min(1e-9)
    fits = (spread > 0) & (slope > 0)
    return (
        torch.where(fits, slope.half(), scales),
        torch.where(fits, (number - slope * code).half(), minimums),
    )
