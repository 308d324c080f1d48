"""A pool in this process: models that answer together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from decoding.artifacts import Artifacts
from engine.costs.limits import check_memory, claim, give_up
from engine.device import Device
from engine.loading import Checkpoint, load_checkpoint
from engine.model import EngineModel
from engine.threads import measured
from pool.components import larger_draft, open_parts, pool_of, prepare
from pool.concurrency import ConcurrencyLimiter
from pool.pool import PLAIN, DefaultMethod, Pool
from pool.prefix_stores import mark_contents, open_stores, reuse_spans, share_of
from pool.text import TextTokenizer
from turnout.config import TurnoutConfig, model_path

if TYPE_CHECKING:
    from kvstore.build import SharedStore

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class LocalPool(Pool):
    """Models loaded in this process, and the methods that run over them. Use `load`.

    Args:
        name: what requests put in `model`.
        models: members by name.
        roles: role -> member name; "small" and "large" are always among them.
        tokenizer: shared by the members.
        places: how many calls are worked on at once, and who is next.
        default: for requests that name no method.
        artifacts: what was trained for the members.
        devices: where the members run; closed with the pool.
        foreign: tokenizers of the members with another vocabulary.

    Attributes:
        engines: the members.
        notes: findings of loading for the operator of the pool, each once: slower kernels than
            could be had, and why; sequences shorter than a checkpoint allows.
        stores: what the members share with other processes; None: nothing.
    """

    def __init__(
        self,
        name: str,
        models: dict[str, EngineModel],
        roles: dict[str, str],
        tokenizer: TextTokenizer,
        places: ConcurrencyLimiter,
        default: DefaultMethod = PLAIN,
        artifacts: Artifacts | None = None,
        devices: tuple[Device, ...] = (),
        foreign: Mapping[str, TextTokenizer] | None = None,
    ) -> None:
        super().__init__(name, models, roles, tokenizer, places, default, artifacts, foreign)
        self.engines = models
        self.notes = list(dict.fromkeys(note for model in models.values() for note in model.notes))
        self._devices = devices
        self.stores: SharedStore | None = None

    @classmethod
    def load(cls, name: str, config: TurnoutConfig, most_threads: int | None = None) -> LocalPool:
        """Load a configured pool's models and tokenizer.

        Args:
            name: the pool's.
            config: the whole configuration.
            most_threads: CPU threads of a forward at most, where the configuration leaves that open; None: as many as
                torch is set to.

        Raises:
            TurnoutError: unknown pool, unsupported architecture, models that do not fit into memory; other tokenizers
                that cannot be drafted with; files that change meanwhile, where a store is shared.
        """
        pool = pool_of(name, config)
        torch.set_num_threads(config.engine.threads or most_threads or torch.get_num_threads())
        devices: dict[str, Device] = {}
        models: dict[str, EngineModel] = {}
        checkpoints: dict[str, Checkpoint] = {}
        members = pool.members
        needs = check_memory({member: config.models[member] for member in members}, config.engine)
        marks = mark_contents(config, members, model_path(config.models[pool.large]))
        for member in members:
            settings = config.models[member]
            if settings.device not in devices:
                threads = None if config.engine.threads else measured(settings.device, torch.get_num_threads())
                devices[settings.device] = Device(settings.device, threads)
            device = devices[settings.device]
            checkpoints[member] = load_checkpoint(
                model_path(settings),
                DTYPES[settings.dtype],
                device.torch_device,
                config.engine.kernels,
                config.engine.shared_attention,
                f"models.{member}.path",
                settings.weights,
                settings.kv_dtype,
            )
        parts = open_parts(name, config)
        native = [checkpoint.vocab_size for member, checkpoint in checkpoints.items() if member not in parts.foreign]
        for member, checkpoint in checkpoints.items():
            if member not in parts.foreign:
                checkpoint.vocab_size = checkpoint.plan.vocab_size = min(native)
            settings = config.models[member]
            models[member] = EngineModel(member, checkpoint, settings, config.engine, devices[settings.device])
        shared = (parts.roles, parts.tokenizer, parts.places, parts.default, parts.artifacts)
        loaded = cls(name, models, *shared, tuple(devices.values()), parts.foreign)
        sizes = {member: checkpoint.num_parameters for member, checkpoint in checkpoints.items()}
        loaded.notes += parts.notes + larger_draft(pool, sizes)
        claim(loaded, needs)
        prepare(loaded, config)
        reuse_spans(pool, models.values())
        loaded.stores = open_stores(config, models, parts.tokenizer, parts.folder, parts.artifacts.folder, marks)
        loaded.share = share_of(config, loaded.stores)
        return loaded

    def check(self) -> None:
        """Return: models in this process live as long as it does."""

    async def close(self) -> None:
        """Cancel what runs, shadows first; end the store's threads and the forward threads."""
        await super().close()
        if self.stores is not None:
            await asyncio.to_thread(self.stores.close)
        for device in self._devices:
            await asyncio.to_thread(device.close)
        give_up(self)
