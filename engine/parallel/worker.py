"""A rank that does not lead: it loads its share and repeats what the leader does."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.backends.base import Kernels, choose_backend
from engine.cache.paged_kv import PagedKV
from engine.loaded_model import LoadedModel
from engine.parallel.connections import Link, LinkClosedError
from engine.parallel.driver import ShareBackend
from engine.parallel.framing import Array, Op, unpack_step
from engine.parallel.group import Group
from engine.parallel.loading import load_share
from turnout.errors import Interrupted, TurnoutError

log = logging.getLogger(__name__)


def follow(
    group: Group,
    name: str,
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels = "auto",
    shared_attention: bool = True,
    timeout_s: float = 300.0,
) -> None:
    """Load this rank's share of a model, and repeat what the leader does until it closes its group. Blocks.

    When it raises, the process is to be ended: the leader may be waiting for it within a step, and learns at once that
    a process has ended, but only after `step_timeout_s` that one has given up.

    Args:
        group: of `join`; closed when this returns.
        name: the model's.
        path: its checkpoint folder, with the same content as the leader's.
        dtype: of its weights.
        kernels: see `engine.backends.base.choose_backend`; as the leader's.
        shared_attention: likewise.
        timeout_s: longest time to wait for all ranks to have loaded.

    Raises:
        TurnoutError: INVALID_ARGUMENT: this model cannot be split so, or its configuration not be read.
        Interrupted: the leader is gone, or a rank failed; all ranks must be started again.
    """
    try:
        share = load_share(group, name, path, dtype, timeout_s)
        backend = ShareBackend(choose_backend(kernels, group.device, shared_attention, dtype=dtype), group.world)
        Follower(group, LoadedModel(share.model, backend)).run()
    except TurnoutError as error:
        group.fail(error.message)
        raise
    except Exception as error:
        if isinstance(error, LinkClosedError) or _has_ended(group.links[0]):
            group.close()
            raise Interrupted(f"rank {group.rank}: the leader, {group.links[0]}, is gone") from error
        log.exception("rank %d failed", group.rank)
        group.fail(f"{type(error).__name__}: {error}")
        raise Interrupted(f"rank {group.rank} of {group.world} of {name!r} failed: {error}") from error
    group.close()


def _has_ended(leader: Link) -> bool:
    """Whether it has, so that nothing could be done with it."""
    try:
        return any(frame.op is Op.END for frame in leader.drain())
    except LinkClosedError:
        return True


class Follower:
    """Repeats operations on this rank's share.

    Args:
        group: the ranks.
        plan: the share, as a plan of the whole.
    """

    def __init__(self, group: Group, plan: LoadedModel) -> None:
        self._group = group
        self._plan = plan
        self._kv_heads = plan.kv_heads // group.world
        self._store: PagedKV | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Run the leader's operations until it ends the group; raises LinkClosedError when the leader is gone."""
        link = self._group.links[0]
        while (frame := link.receive()).op is not Op.END:
            self._repeat(frame.op, frame.arrays)

    def _repeat(self, op: Op, arrays: list[Array]) -> None:
        plan = self._plan
        if op is Op.HIDDEN:
            layout, depth, states = unpack_step(arrays)
            states = states if states is None else states.to(plan.device)
            plan.stack.hidden(layout, plan.backend.step(layout, self._kv), frozenset(), depth, states)
        elif op is Op.LOGITS:
            plan.stack.logits(torch.from_numpy(arrays[0]).to(plan.device, plan.dtype))
        elif op is Op.EMBED:
            plan.embed(arrays[0].tolist())
        elif op is Op.STORE:
            self._store = None  # its memory is free before the next one is made
            [num_slots] = arrays[0].tolist()
            shape = (plan.num_layers, num_slots, self._kv_heads, plan.head_dim)
            self._store = PagedKV(*shape, plan.dtype, self._group.device)
        else:
            self._repeat_on_store(op, arrays)

    def _repeat_on_store(self, op: Op, arrays: list[Array]) -> None:
        store, lists = self._kv, [array.tolist() for array in arrays]
        if op is Op.COPY_BLOCK:
            store.copy_block(*lists[0])
        elif op is Op.MOVE:
            store.move(lists[0], lists[1])
        elif op is Op.READ_BLOCKS:
            self._group.gather(store.read_blocks(lists[1], lists[0][0]))
        elif op is Op.WRITE_BLOCKS:
            [size], blocks = lists
            shape = (len(store.layers), len(blocks) * size, 2, store.kv_heads, store.head_dim)
            store.write_blocks(blocks, size, self._group.scatter(torch.empty(shape, dtype=store.dtype), None))
        else:
            raise RuntimeError(f"the leader asks for {op.name}")

    @property
    def _kv(self) -> PagedKV:
        if self._store is None:
            raise RuntimeError("the leader uses a KV store before it made one")
        return self._store
