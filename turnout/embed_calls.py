"""Calls for embeddings, and their results; and what calls there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


ReadCall = ScoreCall | EmbedCall
AnyCall = GenerateCall | ReadCall
