"""One model of a pool, loaded alone in a process of its own."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.costs.limits import check_memory
from engine.device import Device
from engine.fingerprint import Marks
from engine.loading import Checkpoint, load_checkpoint
from engine.model import EngineModel
from engine.threads import measured
from pool.local_pool import DTYPES
from pool.prefix_stores import mark_contents, open_stores, reuse_spans
from pool.text import TextTokenizer
from turnout.config import TurnoutConfig, artifacts_path, model_path

if TYPE_CHECKING:
    from engine.parallel import Group
    from kvstore.build import SharedStore


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that one copy of a model is split over.

    Attributes:
        rank: of this one; 0 leads.
        world: how many there are.
        address: of the leader, as the others reach it.
        port: a free one there.
        timeout_s: longest time to wait for all of them.
        listen_fd: of a socket of the leader's that listens there already, see `engine.parallel.tcp_store.listen`.
    """

    rank: int
    world: int
    address: str
    port: int
    timeout_s: float
    listen_fd: int | None = None


@dataclass(slots=True)
class LoadedMember:
    """A checkpoint in memory; `begin` makes a model of it once the pool's vocabulary is known.

    Attributes:
        name: the model's.
        pool: its pool's.
        config: the whole configuration.
        checkpoint: the weights.
        device: where they are.
        tokenizer: the pool's.
        marks: of the files it was loaded from, see `pool.prefix_stores.mark_contents`.
        group: of the ranks it is split over; None: it is whole.
        model: the model, after `begin`.
        stores: what it shares with other processes, after `begin`; None: nothing.
    """

    name: str
    pool: str
    config: TurnoutConfig
    checkpoint: Checkpoint
    device: Device
    tokenizer: TextTokenizer
    marks: dict[str, Marks]
    group: Group | None = None
    model: EngineModel | None = None
    stores: SharedStore | None = None

    def begin(self, vocab_size: int) -> EngineModel:
        """Open the model for tokens below `vocab_size`, with its cache, its store and what else the pool says.

        Raises:
            TurnoutError: the memory does not do; the store is configured wrongly; KV cannot be moved for reuse; files
                changed since they were loaded.
        """
        pool, settings = self.config.pools[self.pool], self.config.models[self.name]
        self.checkpoint.vocab_size = self.checkpoint.plan.vocab_size = vocab_size
        model = EngineModel(self.name, self.checkpoint, settings, self.config.engine, self.device)
        reuse_spans(pool, [model])
        tokenizer = model_path(self.config.models[pool.large], weights=False)
        folders = (tokenizer, artifacts_path(pool))
        self.stores = open_stores(self.config, {self.name: model}, self.tokenizer, *folders, self.marks)
        self.model = model
        return model

    async def close(self) -> None:
        """Free everything."""
        if self.model is not None:
            await self.model.close()
        if self.stores is not None:
            await asyncio.to_thread(self.stores.close)
        if self.group is not None:
            await asyncio.to_thread(self.group.close)
        await asyncio.to_thread(self.device.close)


def load_member(
    name: str, pool: str, config: TurnoutConfig, threads: int | None = None, ranks: Ranks | None = None
) -> LoadedMember:
    """Load one model, as `LocalPool.load` would, or this process's share of it as the leader of its ranks. Blocks.

    Args:
        name: the model's, as in the configuration.
        pool: the pool it is loaded for: its large model has the tokenizer.
        config: the whole configuration.
        threads: CPU threads of its forwards; None: as the configuration says, or as many as there are CPUs.
        ranks: the processes it is split over; None: it is whole.

    Raises:
        TurnoutError: unsupported architecture, or a model that does not fit into memory; a rank that does not come.
    """
    settings, engine = config.models[name], config.engine
    _set_threads(threads, config)
    check_memory({name: settings}, engine, ranks.world if ranks is not None else 1)
    large = config.pools[pool].large
    folder = model_path(config.models[large], f"models.{large}.path", weights=False)  # the tokenizer's
    marks = mark_contents(config, [name], folder)
    fixed = threads or config.engine.threads or ranks is not None  # ranks wait for each other in any case
    device = Device(settings.device, None if fixed else measured(settings.device, torch.get_num_threads()))
    rest = (model_path(settings), DTYPES[settings.dtype])
    group: Group | None = None
    if ranks is None:
        source = f"models.{name}.path"
        kept = (settings.weights, settings.kv_dtype)
        checkpoint = load_checkpoint(*rest, device.torch_device, engine.kernels, engine.shared_attention, source, *kept)
    else:
        from engine.parallel import join, load_sharded

        place = (ranks.rank, ranks.world, ranks.address, ranks.port, ranks.timeout_s)
        group = join(*place, settings.device, listen_fd=ranks.listen_fd)
        checkpoint = load_sharded(group, name, *rest, engine.kernels, engine.shared_attention, ranks.timeout_s)
    return LoadedMember(name, pool, config, checkpoint, device, TextTokenizer(folder), marks, group)


def follow_leader(name: str, config: TurnoutConfig, ranks: Ranks, threads: int | None = None) -> None:
    """Hold a share of a model that another process leads, until that ends it. Blocks.

    Args:
        name: the model's.
        config: the whole configuration.
        ranks: which this is.
        threads: as of `load_member`.

    Raises:
        TurnoutError: the model cannot be split so, its share does not fit into memory, or a rank does not come.
        Interrupted: the leader is gone, or a rank failed.
    """
    from engine.parallel import follow, join

    settings, engine = config.models[name], config.engine
    _set_threads(threads, config)
    check_memory({name: settings}, engine, ranks.world)
    group = join(ranks.rank, ranks.world, ranks.address, ranks.port, ranks.timeout_s, settings.device)
    rest = (model_path(settings), DTYPES[settings.dtype], engine.kernels, engine.shared_attention)
    try:
        follow(group, name, *rest, ranks.timeout_s)
    finally:
        group.close()


def _set_threads(threads: int | None, config: TurnoutConfig) -> None:
    # Named always: a cluster tells its workers to use as few threads as they reserved CPUs.
    torch.set_num_threads(threads or config.engine.threads or os.cpu_count() or 1)
