"""A model in this process: `decoding.model.Model` over the batcher and its KV cache."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from decoding.drafter_state import Stores
from decoding.drafters.base import Drafter
from decoding.model import Busy
from decoding.operations import Operation
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from engine.cache.blocks import BlockPool
from engine.cache.paged_kv import PagedKV
from engine.cache.table import BlockTable
from engine.choices import Choices
from engine.costs.limits import cache_size
from engine.costs.prefill_estimate import prefill_forecast
from engine.costs.probe import Probe, profile
from engine.device import Device
from engine.fingerprint import KV_LAYOUT, numerics_class
from engine.kv_transfer import token_bytes
from engine.loading import Checkpoint
from engine.member import PoolMember
from engine.operations import HANDLERS, stream
from engine.rope import length_notes
from engine.runner import Runner
from engine.scheduler.batcher import Batcher
from engine.scheduler.limits import Limits
from engine.soft_likelihood import SoftReaders
from turnout.calls import CacheStats, MemberStats
from turnout.config import EngineConfig, ModelConfig
from turnout.errors import invalid
from turnout.types import Segment

if TYPE_CHECKING:
    from engine.cache.connector import SharedPrefixes
    from engine.fixed_lanes import FixedLanes
    from engine.reuse.edits import Edit
    from engine.reuse.lookup import SpanReuse
    from engine.reuse.settings import ReuseSettings
    from kvstore.store import PrefixStore
    from kvstore.types import ModelLayout

R = TypeVar("R")

log = logging.getLogger(__name__)


class EngineModel(PoolMember):
    """One loaded model.

    Args:
        name: what requests and meters call it.
        checkpoint: the loaded weights and their layer plan.
        config: memory and device.
        engine: block size and budgets.
        device: shared with other models on the same hardware.

    Attributes:
        notes: findings of loading, for the operator: see `pool.local_pool.LocalPool.notes`.
        draft_vocabulary: the ids that drafters may propose with this model; None: all.
        lanes: caches of forwards of a fixed shape, by the sequence that owns them.
        soft_readers: its weights with a gradient, while sequences need them.
        config: of the model.
        weights: how its linear weights are kept, see `ModelConfig`.
    """

    runs_here = True

    def __init__(
        self, name: str, checkpoint: Checkpoint, config: ModelConfig, engine: EngineConfig, device: Device
    ) -> None:
        plan = checkpoint.plan
        self.name, self.config = name, config
        self.architecture = checkpoint.architecture
        self.num_parameters = checkpoint.num_parameters
        self.vocab_size = checkpoint.vocab_size
        self.digest = checkpoint.digest
        kept = checkpoint.draft_vocabulary
        self.draft_vocabulary = None if kept is None else kept.below(checkpoint.vocab_size)
        self.num_layers, self.by_length = plan.num_layers, plan.by_length
        self.stores = Stores()
        slot_bytes = PagedKV.slot_bytes(plan.num_layers, plan.kv_heads, plan.head_dim, checkpoint.dtype, plan.kv_dtype)
        size = cache_size(name, slot_bytes, checkpoint.max_length, config, engine)
        self.max_length, num_blocks = size.max_length, size.num_blocks
        self.notes = [*checkpoint.notes, *length_notes(name, plan.rotary, self.max_length)]
        if config.max_length is None and size.max_length < checkpoint.max_length:
            note = (
                f"{name}: sequences are limited to {size.max_length} of the {checkpoint.max_length} tokens the"
                f" checkpoint allows; models.{name}.kv_memory_bytes is {config.kv_memory_bytes} and would have to be"
                f" {size.bytes_needed}"
            )
            log.warning("%s", note)
            self.notes.append(note)
        self.dtype = checkpoint.dtype
        self.numerics = numerics_class(plan.backend.name, device.torch_device, plan.kv_dtype)
        self.weights = config.weights
        most = size.max_length
        self.pool = BlockPool(num_blocks, engine.block_size, lambda longest: plan.rope_length(min(longest, most)))
        self.pool.model, self.pool.num_layers = self.digest, self.num_layers
        self.store = plan.cache(num_blocks * engine.block_size, device.torch_device)
        self.block_size, self.token_bytes = engine.block_size, token_bytes(self)
        runner = Runner(plan, self.store, engine.block_size, device.torch_device)
        device.minimum_share.share = engine.batch_share
        probe = Probe(runner, num_blocks, self.max_length, engine.max_batch, engine.token_budget)
        probe.set_up(plan.stack.setups(-(-self.max_length // engine.block_size)))
        self.step_time = profile(probe)
        self.batcher = Batcher(name, self.num_parameters, runner, device, _limits(engine), self.step_time)
        self.batcher.step_seconds = self.step_time.seconds(fed=1, attended=1, sequences=1)
        self.choices = Choices(device)
        self.shared: SharedPrefixes | None = None
        self.spans: SpanReuse | None = None
        self.lanes: dict[Sequence, FixedLanes] = {}
        self.soft_readers = SoftReaders()

    def _table(self, seq: Sequence) -> BlockTable:
        table = self.batcher.tables.get(seq)
        if table is not None and table.content.rope_length != self.pool.rope_length(seq):
            self.release(seq)  # a router made its answer shorter: the keys are those of another length
            table = None
        if table is None:
            table = self.batcher.tables[seq] = BlockTable(seq, self.pool, self.store)
        return table

    def share(self, store: PrefixStore) -> None:
        """From now on, fill the pool from a store before sequences start, and offer it what is computed.

        Raises:
            ValueError: the store's chunks are not made of whole blocks.
        """
        from engine.cache.connector import SharedPrefixes

        tables = self.batcher.tables.values
        step = self.batcher.limits.token_budget
        forecast = partial(prefill_forecast, self.batcher, self.step_time)
        self.shared = SharedPrefixes(store, self.pool, self.store, self.batcher.device, tables, forecast, step)

    def reuse(self, settings: ReuseSettings) -> None:
        """From now on, let sequences that may be inexact take over spans of other prompts; before any operation.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the KV of this model cannot be moved, or only partly be computed again.
        """
        from engine.reuse.forward import reusing_runner
        from engine.reuse.lookup import SpanReuse

        self.batcher.use(reusing_runner(self.batcher.runner, settings))
        self.spans = SpanReuse(settings, self.pool)

    def edit(self, seq: Sequence, edits: list[Edit]) -> Sequence:
        """A sequence with some places edited, whose cache keeps what stands behind them; see `engine.reuse.edits`.

        Raises:
            TurnoutError: INVALID_ARGUMENT or OUT_OF_RANGE: the edits; INVALID_ARGUMENT: `reuse` was not called.
        """
        from engine.reuse.edits import edited

        if self.spans is None:
            raise invalid("reuse", f"is off for {self.name!r}: cached keys cannot be moved")
        return edited(self.batcher.tables, seq, edits)

    def layout(self, digests: Mapping[str, str], profiles: Mapping[str, Any] | None = None) -> ModelLayout:
        """What a store must know of the cache.

        Args:
            digests: of the checkpoint and the tokenizer, by name; of all their content.
            profiles: what codecs know of the model, by codec family.
        """
        from kvstore.types import ModelLayout

        parts: dict[str, str | int] = {
            **digests,
            "dtype": str(self.dtype),
            "layout": KV_LAYOUT,
            "numerics": self.numerics,
        }
        store = self.store
        shape = (self.num_layers, store.kv_heads, store.head_dim, store.dtype, self.pool.block_size)
        return ModelLayout(parts, *shape, profiles or {})

    async def ready(self, seq: Sequence) -> BlockTable:
        """A sequence's cache; before its first operation, what the store has of its prefix is brought into the pool."""
        table = self._table(seq)
        if self.shared is not None and not table.origin.sought:
            await self.shared.seek(table)
        if self.spans is not None:
            await self.spans.fill(table)
        return table

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        return await HANDLERS.do(self, seq, op)

    def stream(self, seq: Sequence) -> AsyncIterator[Segment]:
        """See `decoding.decode_loop.Streams`."""
        return stream(self, seq)

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """See `decoding.model.Model.embed`."""
        return self.batcher.runner.plan.embed(tokens)

    def observe(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: VerifyResult) -> None:
        """See `decoding.model.Model.observe`."""
        drafter.observe(self, seq, draft, verdict)

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `decoding.model.Model.fork`."""
        twin = seq.fork(seed)
        table = self.batcher.tables.get(seq)
        if table is not None and table.content.rope_length == self.pool.rope_length(twin):
            self.batcher.tables[twin] = table.fork(twin)
        return twin

    def release(self, seq: Sequence) -> None:
        """See `decoding.model.Model.release`."""
        table = self.batcher.tables.pop(seq, None)
        if table is not None:
            if self.shared is not None:
                self.shared.release(table)
            self.batcher.release(table)
        self.soft_readers.release(seq)
        if (lanes := self.lanes.pop(seq, None)) is not None:
            lanes.release()
            self.batcher.device.notify()
        if (companion := seq.companions.pop(self.name, None)) is not None:
            self.release(companion)

    def step_seconds(self) -> float:
        """See `decoding.model.Model.step_seconds`."""
        return self.batcher.step_seconds

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        """See `decoding.model.Model.forward_seconds`."""
        return self.step_time.seconds(fed, attended, sequences)

    def forget(self, tenant: str) -> None:
        """See `engine.member.PoolMember.forget`."""
        self.stores.forget(tenant)

    def busy(self) -> Busy:
        """See `decoding.model.Model.busy`."""
        tables = self.batcher.tables.values()
        return Busy(len(tables), sum(map(len, tables)), self.pool.num_slots, self.block_size)

    def reading_seconds(self) -> float:
        """See `decoding.speculation.RunsHere.reading_seconds`."""
        return self.batcher.reading_s

    def stats(self) -> MemberStats:
        """What it holds right now."""
        return MemberStats(
            model=self.name,
            sequences=len(self.batcher.tables),
            used_blocks=self.pool.num_held,
            cached_blocks=self.pool.num_cached,
            total_blocks=self.pool.num_blocks,
            waiting=self.batcher.num_waiting,
            waiting_tokens=self.batcher.num_waiting_tokens,
            step_seconds=self.step_seconds(),
            working_s=self.batcher.device.working_s,
            block_size=self.block_size,
        )

    def cache_stats(self) -> CacheStats | None:
        """What its prefix store did; None: it has none."""
        if self.shared is None:
            return None
        from engine.cache.connector import stats_of

        return stats_of(self.shared)

    async def close(self) -> None:
        """Stop batching; what waits is cancelled."""
        self.soft_readers.close()
        if self.shared is not None:
            await self.shared.close()
        await self.batcher.close()


def _limits(engine: EngineConfig) -> Limits:
    return Limits(
        engine.token_budget,
        engine.max_batch,
        max_slowdown=engine.max_slowdown,
        order=engine.order,
        max_overtaken=engine.max_overtaken,
        low_priority_slowdown=engine.batch_slowdown,
        low_priority_slowdown_interactive=engine.batch_slowdown_beside,
        short_s=engine.short_step_s,
    )
