"""The `Model` protocol: what a method may ask of a model, wherever the model runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.types import Segment, Token

if TYPE_CHECKING:
    from decoding.drafters.base import Drafter
    from decoding.verifiers.base import Verdict, Verifier


class Draw(Enum):
    """With which noise a row's token is chosen; see `decoding.noise.Purpose`."""

    SAMPLE = "sample"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Want:
    """What to read from each row of logits. Only what is asked for is computed.

    Attributes:
        draw: choose a token by the sequence's sampling parameters (None: no token).
        entropy: entropy of the raw distribution, in bits.
        logprob: raw log-probability of the chosen token, in nats.
        top: that many most probable tokens with raw log-probabilities.
        probs: the processed distribution the token was drawn from (one-hot when greedy).
        logits: the raw logits.
        hidden: the hidden state after that many layers (-1: before the head, after the last norm).
        margin: how far, in nats and after noise, the chosen token was ahead of the next one.
    """

    draw: Draw | None = Draw.SAMPLE
    entropy: bool = False
    logprob: bool = False
    top: int = 0
    probs: bool = False
    logits: bool = False
    hidden: int | None = None
    margin: bool = False

    def __or__(self, other: Want) -> Want:
        return Want(
            draw=self.draw or other.draw,
            entropy=self.entropy or other.entropy,
            logprob=self.logprob or other.logprob,
            top=max(self.top, other.top),
            probs=self.probs or other.probs,
            logits=self.logits or other.logits,
            hidden=self.hidden if self.hidden is not None else other.hidden,
            margin=self.margin or other.margin,
        )


@dataclass(slots=True)
class Row:
    """What was read at one position; fields that were not wanted stay at their defaults. See `Want`."""

    token: int = -1
    entropy_bits: float | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    margin: float | None = None


class Decision(Enum):
    """What a stop rule says after a token."""

    GO_ON = "go_on"
    STOP = "stop"
    DROP = "drop"  # stop, and do not append this token: whoever goes on chooses it again


class StopRule(Protocol):
    """Ends a decoding stretch. Stateful, picklable, made of plain values: it travels with the segment."""

    name: str
    want: Want

    def observe(self, token: int, row: Row) -> Decision:
        """Look at the token about to be appended (fed once per generated token, in order)."""
        ...


@dataclass(frozen=True, slots=True)
class Until:
    """When a decoding stretch ends: any rule says so, `max_tokens` were appended, or the sequence ended."""

    rules: tuple[StopRule, ...] = ()
    max_tokens: int | None = None

    def __or__(self, other: Until) -> Until:
        limits = [limit for limit in (self.max_tokens, other.max_tokens) if limit is not None]
        return Until(self.rules + other.rules, min(limits) if limits else None)

    @property
    def want(self) -> Want:
        """Everything the rules must be shown."""
        want = Want()
        for rule in self.rules:
            want = want | rule.want
        return want


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of a continuation, token by token, in nats.

    `greedy` tells whether a token was the most probable; `top` are the most probable ones (id, log-probability).
    """

    token_logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def total(self) -> float:
        """Sum over the continuation."""
        return sum(self.token_logprobs)


class Model(Protocol):
    """A causal language model with a KV cache per sequence.

    The sequence is the truth: every call first computes whatever the cache lacks of it (catch-up), in the
    same forward pass as its own work. Cached positions that no longer agree with the sequence are dropped.
    """

    name: str
    num_parameters: int
    vocab_size: int
    max_length: int

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: Want = Want(), every: bool = False
    ) -> list[Row]:
        """Feed what is missing of `seq`, then `tokens` (hypothetical, not appended); read the next position.

        Returns:
            One row, for the last position; with `every`, one for the last of `seq` and one for each of `tokens`.
        """
        ...

    async def decode(self, seq: Sequence, until: Until = Until()) -> Segment:
        """Generate and append tokens until `until` or the end of the sequence.

        Returns:
            The appended tokens; `stopped_by` is the rule's name, "max_tokens" or "finish".
        """
        ...

    async def propose(self, seq: Sequence, drafter: Drafter, budget: int) -> DraftTree:
        """Run a drafter next to this model; at most `budget` nodes."""
        ...

    async def verify(self, seq: Sequence, draft: DraftTree, verifier: Verifier) -> Verdict:
        """Feed the draft in one forward, judge it, keep the accepted path's KV. Appends nothing."""
        ...

    async def score(self, seq: Sequence, continuations: list[tuple[int, ...]], top: int = 0) -> list[Score]:
        """Log-likelihood of each continuation of `seq` under the raw logits, with `top` alternatives per token."""
        ...

    async def absorb(self, seq: Sequence) -> None:
        """Compute what the cache lacks of `seq`, except its last token, when the batch has room (shadow catch-up)."""
        ...

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """A twin of `seq` that shares its cached blocks until one of them writes."""
        ...

    def release(self, seq: Sequence) -> None:
        """Forget `seq`; its full blocks stay reusable as a prefix."""
        ...

    def step_seconds(self) -> float:
        """Recent wall-clock time of one decode step, in seconds (0.0 before the first)."""
        ...


class TokenText(Protocol):
    """The one thing methods may know about text: what a token looks like."""

    def __hash__(self) -> int:
        """By identity: what is worked out from a tokenizer once is kept for it."""
        ...

    def text(self, token_id: int) -> str:
        """The token's own text; bytes that are no complete character show as U+FFFD."""
        ...


@dataclass(slots=True)
class ModelPool:
    """The models a method may use, by role; `models` maps every name to its model."""

    models: dict[str, Model]
    roles: dict[str, str]
    tokenizer: TokenText

    def role(self, role: str) -> Model:
        """The model that fills a role ("small", "large")."""
        return self.models[self.roles[role]]

    @property
    def small(self) -> Model:
        """The cheap model: draft, or first to answer."""
        return self.role("small")

    @property
    def large(self) -> Model:
        """The strong model: target, or called when the small one is unsure."""
        return self.role("large")

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters by model name."""
        return {name: model.num_parameters for name, model in self.models.items()}


@dataclass(slots=True)
class Request:
    """One answer to produce: what a method is given. Wire types never get here."""

    id: str
    sequence: Sequence
    tenant: str = "default"
    extra: dict[str, Any] = field(default_factory=dict)


def token_of(row: Row, source: str) -> Token:
    """The token a row chose, with what was read beside it."""
    return Token(row.token, source, logprob=row.logprob, entropy_bits=row.entropy_bits, top=row.top)
