"""The `Model` protocol: what a method may ask of a model, wherever the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from decoding.artifacts import Artifacts
from decoding.sequence import Sequence
from decoding.sketch import Sketch
from decoding.stores import Stores
from decoding.tree import DraftTree
from decoding.vocabulary import SubVocabulary
from turnout.types import Segment, Token

if TYPE_CHECKING:
    from decoding.drafters.base import Drafter, Room
    from decoding.lengths.base import LengthPolicy
    from decoding.verifiers.base import Verdict, Verifier


class Draw(Enum):
    """With which noise a row's token is chosen; see `decoding.noise.Purpose`.

    sample: as the target draws. draft: a draft's own, by position, for whom each place is judged once. round: a draft's
    own too, and other noise in each round, by how long the sequence is when it begins.
    """

    SAMPLE = "sample"
    DRAFT = "draft"
    ROUND = "round"


@dataclass(frozen=True, slots=True)
class Want:
    """What to read from each row of logits. Only what is asked for is computed.

    Attributes:
        draw: choose a token by the sequence's sampling parameters (None: no token).
        entropy: of the raw distribution, in bits; where a structure holds, of the tokens it allows, renormalised.
        logprob: raw log-probability of the chosen token, in nats.
        top: that many most probable tokens with raw log-probabilities.
        probs: the processed distribution the token was drawn from (one-hot when greedy).
        logits: the raw logits.
        hidden: hidden states after so many layers each (-1: before the head, after the last norm).
        before: for the first row of a call, hidden states after so many layers each, from 0, of the sequence's tokens
            that the call had to compute before it.
        margin: how far, in nats and after noise, the chosen token was ahead of the next one.
        among: the only ids there are for this reading, which is a draft's: no structure holds for it. None: all.
        unmasked: entropy of all tokens also where a structure holds: for heads trained on answers without one.
    """

    draw: Draw | None = Draw.SAMPLE
    entropy: bool = False
    logprob: bool = False
    top: int = 0
    probs: bool = False
    logits: bool = False
    hidden: frozenset[int] = frozenset()
    before: frozenset[int] = frozenset()
    margin: bool = False
    among: SubVocabulary | None = None
    unmasked: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the distribution that a token is drawn from is wanted, not only what the model says."""
        return self.draw is not None or self.probs or self.margin

    @property
    def reads_logits(self) -> bool:
        """Whether anything but hidden states is wanted."""
        return self.chooses or self.entropy or self.logprob or self.logits or self.top > 0

    def __or__(self, other: Want) -> Want:
        """What either wants, of one row; not for entropies of which one is unmasked: a row has only one of them."""
        alike = self.unmasked is other.unmasked or not (self.entropy and other.entropy)
        assert alike, "one row cannot hold both the entropy under a structure and the unmasked one: read it twice"
        return Want(
            draw=self.draw or other.draw,
            entropy=self.entropy or other.entropy,
            logprob=self.logprob or other.logprob,
            top=max(self.top, other.top),
            probs=self.probs or other.probs,
            logits=self.logits or other.logits,
            hidden=self.hidden | other.hidden,
            before=self.before | other.before,
            margin=self.margin or other.margin,
            among=self.among if self.among is other.among else None,
            unmasked=self.unmasked or other.unmasked,
        )


@dataclass(slots=True)
class Row:
    """What was read at one position; what was not wanted stays at its default. See `Want`.

    `before` is [n, hidden] for each layer, for the n tokens right before the row's that were not cached. Where a
    structure holds, an entropy comes with `forced`, whether only one token, or only the end, is allowed, and with
    `allowed_logprob`, of all allowed tokens together, in nats (None: no structure holds, or the entropy is unmasked).
    """

    token: int = -1
    entropy_bits: float | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    margin: float | None = None
    forced: bool = False
    allowed_logprob: float | None = None


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


@dataclass(frozen=True, slots=True)
class Busy:
    """What a model works on now: sequences it holds a cache for, and the tokens of these caches."""

    sequences: int
    cached_tokens: int


class Model(Protocol):
    """A causal language model with a KV cache per sequence.

    The sequence is the truth: every call first computes whatever the cache lacks of it (catch-up), in the
    same forward pass as its own work. Cached positions that no longer agree with the sequence are dropped.

    Attributes:
        digest: names configuration and weights, whatever the model is called; see `decoding.artifacts`.
    """

    name: str
    num_parameters: int
    vocab_size: int
    max_length: int
    num_layers: int
    digest: str
    stores: Stores

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

    async def expand(self, seq: Sequence, tree: DraftTree, start: int, want: Want) -> list[Row]:
        """Feed nodes of a draft that grows, after the sequence's last token: nothing of it is kept.

        Args:
            seq: the sequence; the reading at its end is `extend`'s.
            tree: all nodes so far; those before `start` are as in the call before, whose cache is used again.
            start: first node to read.
            want: what to read.

        Returns:
            One row per node from `start` on.
        """
        ...

    async def sketch(self, seq: Sequence, sketch: Sketch, want: Want) -> list[Row]:
        """Run hypothetical tokens through some of the layers; nothing of it is kept but for `verify`.

        A draft in a row after the sequence's last token that was run with it through the first layers, and through no
        others, is verified from the next layer on.

        Args:
            seq: the sequence.
            sketch: the tokens and the layers; the last norm and the head follow for what is read.
            want: what to read; hidden states of layers that run.

        Returns:
            One row per token from `sketch.start` on.
        """
        ...

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: list[tuple[int, ...]], want: Want, normed: bool = False
    ) -> list[Row]:
        """Read hidden states through the last norm and the head; no forward.

        Args:
            seq: whose they are.
            states: [R, hidden].
            paths: [R] the hypothetical tokens each stands after.
            want: what to read.
            normed: whether the last norm has been applied.
        """
        ...

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """What goes into the first layer for these tokens: float32 [n, hidden], on the CPU."""
        ...

    async def propose(self, seq: Sequence, drafter: Drafter, room: Room, length: LengthPolicy) -> DraftTree:
        """Run a drafter next to this model."""
        ...

    async def verify(
        self, seq: Sequence, draft: DraftTree, verifier: Verifier, want: Want = Want(draw=None)
    ) -> Verdict:
        """Feed the draft in one forward, judge it, keep the accepted path's KV. Appends nothing.

        Args:
            seq: what the draft continues.
            draft: the tree.
            verifier: judges it.
            want: what else to read at the root, every node and every extra row: `Verdict.rows`.
        """
        ...

    def teach(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: Verdict) -> None:
        """Let a drafter that runs beside this model learn from a round."""
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

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        """Predicted wall time of a forward, in seconds; 0.0 where nothing is known.

        Args:
            fed: tokens in it.
            attended: positions each attends to, its own included, summed over them.
            sequences: sequences in it.
        """
        ...

    def busy(self) -> Busy:
        """What it works on now."""
        ...


class TokenText(Protocol):
    """Text of tokens, as far as methods may know it."""

    def __hash__(self) -> int:
        """By identity: what is worked out from a tokenizer once is kept for it."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens left out. What is compared or counted is compared or counted in it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token inside a text: joined, the text's UTF-8; a special token's name."""
        ...


@dataclass(slots=True)
class ModelPool:
    """The models a method may use, by role.

    Attributes:
        models: every name's model.
        roles: the name of the model that fills a role.
        tokenizer: theirs.
        artifacts: trained for them.
        clock: seconds; what learns from times reads it, for it stands still while a request has to wait for others.
    """

    models: dict[str, Model]
    roles: dict[str, str]
    tokenizer: TokenText
    artifacts: Artifacts = field(default_factory=Artifacts)
    clock: Callable[[], float] = perf_counter

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
    """One answer to produce: what a method is given. Wire types never get here.

    Attributes:
        id: of the call.
        sequence: holds the prompt; what is generated is appended.
        tenant: whose request it is.
        extra: what a method leaves for the answer's usage.
        notes: for the person who reads the answer.
        delivered: where the answer is made again, its first tokens as its reader has them: what no seed tells, such as
            when a verdict came, is done as it was done then.
    """

    id: str
    sequence: Sequence
    tenant: str = "default"
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    delivered: tuple[int, ...] = ()


def token_of(row: Row, source: str) -> Token:
    """The token a row chose, with what was read beside it."""
    return Token(row.token, source, logprob=row.logprob, entropy_bits=row.entropy_bits, top=row.top)
