"""Operations that move cached keys and values out of a model's pool, and into it; see `engine.kv_transfer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from decoding.operations import Operation
from decoding.sequence import Sequence


@dataclass(frozen=True, slots=True)
class HeldKV(Operation[int]):
    """Count the leading tokens of a sequence whose KV the model has; see `engine.kv_transfer.held_tokens`."""

    name: ClassVar[str] = "held_kv"
    fills_cache: ClassVar[bool] = False

    async def run(self, model: Any, seq: Sequence) -> int:
        """Look into the pool of a model in this process."""
        from engine.kv_transfer import held_tokens

        return held_tokens(model, seq)


@dataclass(frozen=True, slots=True)
class ExportKV(Operation[Any]):
    """Copy KV of cached tokens; see `engine.kv_transfer.export_kv`.

    Attributes:
        start: first token.
        stop: end of the tokens; None: of the sequence.
        stays: a model in another process keeps the copy and returns a handle; otherwise it comes here, to the CPU.
    """

    name: ClassVar[str] = "export_kv"
    fills_cache: ClassVar[bool] = False
    start: int = 0
    stop: int | None = None
    stays: bool = False

    @property
    def left_bytes(self) -> int | None:
        """All of it, or nothing."""
        return 0 if self.stays else None

    async def run(self, model: Any, seq: Sequence) -> Any:
        """Copy it out of the pool of a model in this process."""
        from engine.kv_transfer import export_kv

        return await export_kv(model, seq, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class ImportKV(Operation[int]):
    """Put KV of a sequence's tokens into the pool; see `engine.kv_transfer.import_kv`.

    Attributes:
        start: first token.
        kv: a tensor, or for a model elsewhere the handle of one, which goes from actor to actor.
        longest: see `engine.kv_transfer.import_kv`.
    """

    name: ClassVar[str] = "import_kv"
    fills_cache: ClassVar[bool] = False
    start: int
    kv: Any
    longest: int | None = None

    async def run(self, model: Any, seq: Sequence) -> int:
        """Write it into the pool of a model in this process."""
        from engine.kv_transfer import import_kv

        return await import_kv(model, seq, self.start, self.kv, self.longest)
