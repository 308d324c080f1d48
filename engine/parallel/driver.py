"""The leader's side of a split model: a layer plan and a KV store that look like any other, and have others follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from decoding.partial_forward import WHOLE, LayerSelection
from engine.architectures.base import ModelParts
from engine.attention.layout import Layout
from engine.attention.step import AttentionStep
from engine.backends.base import Backend, TorchBackend
from engine.backends.llama_fused import FusedLlamaStack
from engine.backends.stacks import Head, LayerStack
from engine.cache.paged_kv import PagedKV
from engine.loaded_model import LoadedModel
from engine.parallel.framing import Op, integers, pack_step, rows_of
from engine.parallel.group import Group


class ShareBackend:
    """How a rank computes its share: layers in torch operations, between which the ranks add up, and attention as ever.

    Args:
        whole: what would run the whole model on this device.
        world: ranks it is split over.
    """

    def __init__(self, whole: Backend, world: int) -> None:
        self.name = f"{whole.name}/{world}"  # other sums: keys and values differ by rounding from the whole model's
        self.keeps_trees, self.kv_dtypes = whole.keeps_trees, whole.kv_dtypes
        self._whole = whole

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """See `engine.backends.base.Backend.stack`."""
        backend = self._whole if self._whole.name == "plain" else TorchBackend()
        return backend.stack(parts, dtype)

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `engine.backends.base.Backend.step`."""
        return self._whole.step(layout, store)


class LeadingBackend(ShareBackend):
    """The leader's: its stack has the others follow.

    Args:
        whole: what would run the whole model on this device.
        group: the ranks.
    """

    def __init__(self, whole: Backend, group: Group) -> None:
        super().__init__(whole, group.world)
        self._group = group

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """See `engine.backends.base.Backend.stack`."""
        stack = super().stack(parts, dtype)
        return LeadingStack(stack, not isinstance(stack, FusedLlamaStack), self._group)


class LeadingStack:
    """A stack that tells the other ranks what it runs, and runs its own share; see `engine.backends.stacks.LayerStack`.

    Args:
        stack: the leader's share.
        whole_layers: whether it skips whole layers only.
        group: the ranks.
    """

    def __init__(self, stack: LayerStack, whole_layers: bool, group: Group) -> None:
        self._stack = stack
        self._whole_layers = whole_layers
        self._group = group

    def hidden(
        self,
        layout: Layout,
        step: AttentionStep,
        taps: frozenset[int],
        depth: LayerSelection = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `engine.backends.stacks.LayerStack.hidden`.

        Raises:
            Interrupted: a rank is lost.
        """
        self._check(depth)
        with self._group.leading(Op.HIDDEN, *pack_step(layout, depth, states)):
            return self._stack.hidden(layout, step, taps, depth, states)

    def _check(self, depth: LayerSelection) -> None:
        """What the stack would refuse is refused before the others begin it; raises ValueError."""
        if self._whole_layers and any(each ^ 1 not in depth.skipped for each in depth.skipped):
            raise ValueError("this architecture skips whole layers only")

    def setups(self, most_blocks: int) -> Iterable[tuple[int, int, int]]:
        """See `engine.backends.stacks.LayerStack.setups`; a share is launched kernel by kernel."""
        return ()

    def queries(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """None: no rank has those of all heads."""
        return None

    def norm(self, hidden: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.norm`."""
        return self._stack.norm(hidden, picked)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.logits`.

        Raises:
            Interrupted: a rank is lost.
        """
        with self._group.leading(Op.LOGITS, rows_of(normed)):
            return self._stack.logits(normed)

    def head_of(self, ids: torch.Tensor) -> Head | None:
        """None: each rank has the head of ids of its own."""
        return None


class LeadingStore(PagedKV):
    """The leader's keys and values, [num_slots, 2, its kv_heads, head_dim] per layer; whole where they come or go.

    Of all stores of a group only the one made last may be used.

    Args:
        num_layers: decoder layers.
        num_slots: tokens it can hold.
        kv_heads: key/value heads of each rank.
        head_dim: width of a head.
        dtype: of keys and values.
        group: the ranks.
    """

    def __init__(
        self, num_layers: int, num_slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, group: Group
    ) -> None:
        with group.leading(Op.STORE, integers(num_slots)):
            super().__init__(num_layers, num_slots, kv_heads, head_dim, dtype, group.device)
        self.kv_heads = kv_heads * group.world
        self._group = group

    def copy_block(self, source: int, target: int, block_size: int) -> None:
        """See `engine.cache.paged_kv.PagedKV.copy_block`."""
        with self._group.leading(Op.COPY_BLOCK, integers(source, target, block_size)):
            super().copy_block(source, target, block_size)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `engine.cache.paged_kv.PagedKV.move`."""
        with self._group.leading(Op.MOVE, integers(*sources), integers(*targets)):
            super().move(sources, targets)

    @torch.inference_mode()
    def gather_blocks(self, blocks: list[int], block_size: int) -> torch.Tensor:
        """See `engine.cache.paged_kv.PagedKV.gather_blocks`; all heads, on the CPU."""
        with self._group.leading(Op.READ_BLOCKS, integers(block_size), integers(*blocks)):
            share = super().gather_blocks(blocks, block_size).to("cpu")
            return torch.cat(self._group.gather(share), dim=3)

    @torch.inference_mode()
    def write_blocks(self, blocks: list[int], block_size: int, kv: torch.Tensor) -> None:
        """See `engine.cache.paged_kv.PagedKV.write_blocks`; all heads."""
        expected = (len(self.layers), len(blocks) * block_size, 2, self.kv_heads, self.head_dim)
        if kv.shape != expected or kv.dtype != self.dtype:
            raise ValueError(f"keys and values are {kv.dtype} {list(kv.shape)}, not {self.dtype} {list(expected)}")
        parts = [part.contiguous() for part in kv.to("cpu").chunk(self._group.world, dim=3)]
        with self._group.leading(Op.WRITE_BLOCKS, integers(block_size), integers(*blocks)):
            super().write_blocks(blocks, block_size, self._group.scatter(torch.empty_like(parts[0]), parts))


class LeadingPlan(LoadedModel):
    """The leader's plan: a `LoadedModel` whose stack and stores have the others follow.

    Args:
        model: this rank's share, localised.
        backend: what would run the whole model.
        group: the ranks.
    """

    def __init__(self, model: Any, backend: Backend, group: Group) -> None:
        super().__init__(model, LeadingBackend(backend, group))
        self.ranks = group.world
        self.kv_heads //= group.world
        self._group = group

    def cache(self, num_slots: int, device: torch.device) -> PagedKV:
        """See `engine.loaded_model.LoadedModel.cache`."""
        return LeadingStore(self.num_layers, num_slots, self.kv_heads, self.head_dim, self.dtype, self._group)

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """See `engine.loaded_model.LoadedModel.embed`."""
        with self._group.leading(Op.EMBED, integers(*tokens)):
            return super().embed(tokens)
