"""Calls for embeddings and tasks, and their results; and what calls there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turnout.calls import GenerateCall, Priority, ScoreCall
from turnout.types import SharingPolicy

Pooling = Literal["mean", "last"]
WHOLE_CONTEXT = -1  # as `truncate`: what the model can read


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """Embeddings of texts or token ids by one model: hidden states before its head, pooled and L2-normalised.

    What is not named here is as in `GenerateCall`.

    Attributes:
        input: what is embedded, each by itself.
        pooling: mean of the states of all tokens, or the last token's; None: the pool's own.
        dimensions: that many first numbers are kept, and normalised again; None: all.
        truncate: that many first tokens of a longer input are read, WHOLE_CONTEXT: as many as the model can; None: a
            longer one is refused.
        most_numbers: that the answer has room for.
    """

    request_id: str
    model: str
    input: tuple[str | tuple[int, ...], ...]
    pooling: Pooling | None = None
    dimensions: int | None = None
    truncate: int | None = None
    most_numbers: int = 6 << 20
    tenant: str = "default"
    key_id: str = ""
    billed: bool = True
    sharing: SharingPolicy | None = None
    parse_special: bool = True
    priority: Priority = "interactive"
    batch_id: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Unit vectors in the order of the inputs.

    Attributes:
        data: float32, little-endian, [inputs, dimensions].
        dimensions: numbers of one vector.
        prompt_tokens: read of each input.
    """

    data: bytes
    dimensions: int
    prompt_tokens: tuple[int, ...]

    @property
    def vectors(self) -> list[bytes]:
        """The vectors one by one, as they are in `data`."""
        size = 4 * self.dimensions
        return [self.data[start : start + size] for start in range(0, len(self.data), size)]


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A task of a pool: what it does with its models that writes no answer; see `decoding.tasks`.

    What is not named here is as in `GenerateCall`.

    Attributes:
        model: a member model, or a pool, whose large model does it.
        name: of the task.
        params: its parameters.
    """

    request_id: str
    model: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = "default"
    key_id: str = ""
    billed: bool = True
    sharing: SharingPolicy | None = None
    priority: Priority = "interactive"
    batch_id: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """What a task came to.

    Attributes:
        result: JSON, as the schema of the task's result says.
        prompt_tokens: that were read for it.
    """

    result: Mapping[str, Any]
    prompt_tokens: int


ReadCall = ScoreCall | EmbedCall | TaskCall
AnyCall = GenerateCall | ReadCall
