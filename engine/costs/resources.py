"""FLOPs, bytes and memory that a model's shape alone decides, and the bounds they set on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import floor
from typing import Any

from engine.architectures.base import kv_shape
from engine.cache.kv_formats import KVDtype, head_bytes
from turnout.errors import Code, TurnoutError

PANEL = 32  # columns of a packed matrix are padded to a multiple of at most this; panels of narrower vectors have 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer, as far as its costs go.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        vocab_size: rows of the embedding.
        num_parameters: every weight counted once.
        tied: whether embedding and head are one matrix.
        bytes_per_number: of weights and cache.
        body_bits: of a number in the body, where its matrices are kept as integers; with scales.
        head_bits: likewise, of the head.
        kv_dtype: how keys and values are kept, as `models.NAME.kv_dtype`.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    tied: bool
    bytes_per_number: int
    body_bits: float | None = None
    head_bits: float | None = None
    kv_dtype: KVDtype = "auto"

    @classmethod
    def of(cls, config: Any, num_parameters: int, bytes_per_number: int) -> ModelShape:
        """From a Hugging Face configuration of a supported architecture."""
        kv_heads, head_dim = kv_shape(config)
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            num_parameters=num_parameters,
            tied=bool(config.tie_word_embeddings),
            bytes_per_number=bytes_per_number,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers: kappa of paper #220."""
        return 2 * self.layers * self.kv_heads * head_bytes(self.kv_dtype, self.head_dim, self.bytes_per_number)

    @property
    def embedding_parameters(self) -> int:
        """Rows are looked up, so a forward reads almost none of them."""
        return self.vocab_size * self.hidden

    @property
    def body_parameters(self) -> int:
        """Weights that every fed token is multiplied with: all but embedding and head."""
        return self.num_parameters - self.embedding_parameters * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.num_parameters * self.bytes_per_number

    def held_bytes(self, packed: bool, ranks: int = 1) -> int:
        """Memory that the weights take at most in one process, once they are loaded.

        Args:
            packed: matrices are kept in panels for the CPU's kernels; an embedding that is the head as well is then
                held twice, and norms are held in float32.
            ranks: processes they are split over; each may hold embedding and head whole.
        """
        embedding = self.embedding_parameters * self.bytes_per_number
        if ranks > 1:
            return -(-self.body_parameters * self.bytes_per_number // ranks) + 2 * embedding
        if not packed:
            return self.weight_bytes
        head = self._kept(-(-self.vocab_size // PANEL) * PANEL * self.hidden, self.head_bits)
        norms = 4 * (2 * self.layers * (self.hidden + self.head_dim) + self.hidden)
        return self._kept(self.body_parameters, self.body_bits) + embedding + head + norms

    def _kept(self, numbers: int, bits: float | None) -> int:
        return numbers * self.bytes_per_number if bits is None else math.ceil(numbers * bits / 8)

    @property
    def weight_bytes_read(self) -> int:
        """Weights a forward reads once, whatever it feeds: body and head."""
        return self._kept(self.body_parameters, self.body_bits) + self._kept(self.embedding_parameters, self.head_bits)

    def flops(self, fed: int, attended: int, rows: int) -> float:
        """Floating-point operations of one forward (a multiplication and an addition are two).

        An upper bound for mixtures of experts, whose tokens use a part of the weights.

        Args:
            fed: tokens in the forward.
            attended: sum over them of the positions each attends to.
            rows: positions whose logits are read.
        """
        matrices = 2.0 * (self.body_parameters * fed + self.embedding_parameters * rows)
        return matrices + 4.0 * self.layers * self.heads * self.head_dim * attended

    def bytes_moved(self, fed: int, read: int) -> float:
        """Least memory traffic of one forward: weights once, cached positions `read`, those of `fed` tokens written."""
        return float(self.weight_bytes_read + (read + fed) * self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and an answer, in tokens."""

    prompt: int
    output: int

    def flops(self, shape: ModelShape) -> float:
        """Of prefill and decoding together; nothing cached before."""
        length = self.prompt + self.output - 1  # the last token is not fed
        return shape.flops(length, length * (length + 1) // 2, self.output)

    def bytes_moved(self, shape: ModelShape) -> float:
        """At batch 1: one prefill forward, then one forward per token."""
        steps = self.output - 1
        read = steps * self.prompt + steps * (steps - 1) // 2
        prefill = shape.bytes_moved(self.prompt, 0)
        return prefill + steps * shape.weight_bytes_read + (read + steps) * shape.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device can do.

    Attributes:
        memory_bytes: for weights and cache.
        read_bytes_per_s: reading memory.
        copy_bytes_per_s: moving a cache out of the device's memory, or back.
        flops_per_s: matrix products in the model's number format.
    """

    memory_bytes: int
    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float

    def least_s(self, flops: float, bytes_moved: float) -> float:
        """Seconds that so much work takes at least: the slower of arithmetic and memory (the roofline)."""
        return max(flops / self.flops_per_s, bytes_moved / self.read_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Session:
    """One user's conversation: `turns` questions of `prompt` tokens, answers of `output`, `think_s` between turns."""

    turns: int
    prompt: int
    output: int
    think_s: float


class Planner:
    """What a model can serve on a machine, from shapes alone: bounds that no implementation passes.

    Paper #220 (Challenges in Deploying Long-Context Transformers: A Theoretical Peak Performance Analysis). Every
    extra cost of a long context comes from the size of its KV cache, in four terms: users that fit, prefill time,
    decode time, and time to switch between users.

    Args:
        shape: the model.
        machine: the device.
        kv_fraction: share of the KV cache that a compression leaves; it acts on every term but prefill.
    """

    def __init__(self, shape: ModelShape, machine: Machine, kv_fraction: float = 1.0) -> None:
        self.shape = shape
        self.machine = machine
        self.kv_fraction = kv_fraction

    def kv_bytes(self, context: int) -> float:
        """Return the cache size of one user with a context of `context` tokens."""
        return self.kv_fraction * self.shape.kv_bytes_per_token * context

    def users(self, context: int) -> int:
        """Return the number of contexts that fit into memory together with the weights."""
        left = self.machine.memory_bytes - self.shape.weight_bytes
        return max(floor(left / self.kv_bytes(context)), 0)

    def prefill_s(self, context: int) -> float:
        """Least time to first token: arithmetic."""
        flops = self.shape.flops(context, context * (context + 1) // 2, 1)
        return flops / self.machine.flops_per_s

    def decode_s(self, context: int, users: int = 1) -> float:
        """Least time of one token for each of `users`: weights read once, every user's cache."""
        moved = self.shape.weight_bytes_read + users * self.kv_bytes(context)
        return moved / self.machine.read_bytes_per_s

    def switch_s(self, context: int) -> float:
        """Time to move one user's cache out of memory, or back."""
        return self.kv_bytes(context) / self.machine.copy_bytes_per_s

    def sessions_s(self, users: int, context: int, session: Session) -> float:
        """Time until `users` have finished a session each over documents of `context` tokens.

        Users beyond those that fit are moved out while they think and back before their turn. Turns of users who
        fit together are decoded together.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED, not even one context fits.
        """
        longest = context + session.turns * (session.prompt + session.output)
        fitting = self.users(longest)
        if fitting < 1:
            message = f"a context of {longest} tokens does not fit into memory with the weights"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, message)
        together = min(users, fitting)
        groups = -(-users // together)
        turn_s = together * self._extend_s(longest, session.prompt)
        turn_s += session.output * self.decode_s(longest, together)
        if groups > 1:
            turn_s += 2 * together * self.switch_s(longest)
        # While one group thinks, the others are served; no user waits for the thoughts after the last turn.
        round_s = max(groups * turn_s, turn_s + session.think_s)
        return users * self.prefill_s(context) + (session.turns - 1) * round_s + groups * turn_s

    def _extend_s(self, context: int, tokens: int) -> float:
        return self.shape.flops(tokens, tokens * context, 1) / self.machine.flops_per_s
