"""Read specifications, readouts of a position of a sequence, and stop rules that look at them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch

from decoding.state import settle, twin
from decoding.vocabulary import SubVocabulary
from turnout.types import Segment, Token

FEED_FORWARD = -2  # what goes into the last layer's feed-forward block, after its norm where it has one


class NoiseKind(Enum):
    """Kind of noise that a row's token is chosen with; see `decoding.noise.Purpose`.

    sample: as the target draws. draft: a draft's own, by position, for whom each place is judged once. round: a draft's
    own too, and other noise in each round, by how long the sequence is when it begins.
    """

    SAMPLE = "sample"
    DRAFT = "draft"
    ROUND = "round"


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """Specification of what to read from each row of logits. Nothing else is computed.

    Attributes:
        draw: choose a token by the sequence's sampling parameters (None: no token).
        entropy: of the raw distribution, in bits; where a structure holds, of the tokens it allows, renormalised.
        logprob: raw log-probability of the chosen token, in nats.
        top: that many most probable tokens with raw log-probabilities.
        top_processed: that many most probable tokens of the distribution that tokens are drawn from, with their
            log-probabilities there; at temperature 0 it is that of temperature 1, and not truncated. Excluded tokens
            have -inf.
        processed_of: ids whose log-probabilities in the same distribution are read.
        probs: the processed distribution the token was drawn from (one-hot when greedy).
        logits: the raw logits.
        hidden: layers after which hidden states are read (-1: before the head, after the last norm; -2,
            `FEED_FORWARD`: into the last layer's feed-forward block, missing where the architecture names none).
        before: for the first row of a call, numbers of layers, from 0, after which hidden states are read of the
            sequence's tokens that the call had to compute before it.
        mean: for the first row of a call, the mean of the hidden states before the head, after the last norm, over the
            row's token and all tokens before it. All of these are computed: the cache holds no hidden states.
        margin: how far, in nats and after noise, the chosen token was ahead of the next one.
        surprise: -log2 of the chosen token's probability in the distribution that it was drawn from; greedy rows have
            none.
        among: the only ids there are for this reading, which is a draft's: no structure holds for it. None: all.
        unmasked: entropy of all tokens also where a structure holds: for heads trained on answers without one.
        certainty: how far the raw distribution p is from uniform, KL(uniform || p), in nats.
    """

    draw: NoiseKind | None = NoiseKind.SAMPLE
    entropy: bool = False
    logprob: bool = False
    top: int = 0
    probs: bool = False
    logits: bool = False
    hidden: frozenset[int] = frozenset()
    before: frozenset[int] = frozenset()
    mean: bool = False
    margin: bool = False
    surprise: bool = False
    among: SubVocabulary | None = None
    unmasked: bool = False
    top_processed: int = 0
    processed_of: tuple[int, ...] = ()
    certainty: bool = False

    @property
    def weighs(self) -> bool:
        """True if log-probabilities of the distribution that a token is drawn from are wanted."""
        return self.top_processed > 0 or bool(self.processed_of)

    @property
    def chooses(self) -> bool:
        """True if the distribution that a token is drawn from is wanted, not only the model's raw output."""
        return self.draw is not None or self.probs or self.margin or self.weighs

    @property
    def reads_logits(self) -> bool:
        """True if anything but hidden states is wanted."""
        return self.chooses or self.logits or self.measures

    @property
    def measures(self) -> bool:
        """True if numbers about the raw distribution are wanted."""
        return self.entropy or self.logprob or self.certainty or self.top > 0

    def __or__(self, other: ReadSpec) -> ReadSpec:
        """Return the union of both, for one row. A row has one entropy: both must be masked, or both unmasked."""
        alike = self.unmasked is other.unmasked or not (self.entropy and other.entropy)
        assert alike, "one row cannot hold both the entropy under a structure and the unmasked one: read it twice"
        return ReadSpec(
            draw=self.draw or other.draw,
            entropy=self.entropy or other.entropy,
            logprob=self.logprob or other.logprob,
            top=max(self.top, other.top),
            probs=self.probs or other.probs,
            logits=self.logits or other.logits,
            hidden=self.hidden | other.hidden,
            before=self.before | other.before,
            mean=self.mean or other.mean,
            margin=self.margin or other.margin,
            surprise=self.surprise or other.surprise,
            among=self.among if self.among is other.among else None,
            unmasked=self.unmasked or other.unmasked,
            top_processed=max(self.top_processed, other.top_processed),
            processed_of=tuple(dict.fromkeys(self.processed_of + other.processed_of)),
            certainty=self.certainty or other.certainty,
        )


@dataclass(slots=True)
class Readout:
    """Readout of one position; fields that were not wanted stay at their defaults. See `ReadSpec`.

    `before` is [n, hidden] for each layer, for the n tokens right before the row's that were not cached; `mean` is
    float32 [hidden]. `processed_of` has ids and log-probabilities, as `top` and `top_processed` have. Where a structure
    holds, an entropy comes with `forced`, whether only one token, or only the end, is allowed, and with
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
    mean: torch.Tensor | None = None
    margin: float | None = None
    surprise_bits: float | None = None
    forced: bool = False
    allowed_logprob: float | None = None
    top_processed: tuple[tuple[int, float], ...] = ()
    processed_of: tuple[tuple[int, float], ...] = ()
    certainty: float | None = None

    @property
    def bears_tensors(self) -> bool:
        """True if it holds tensors, not only numbers."""
        tensors = (self.probs, self.logits, self.mean)
        return bool(self.hidden or self.before) or any(each is not None for each in tensors)


class Decision(Enum):
    """Decision of a stop rule after a token."""

    GO_ON = "go_on"
    STOP = "stop"
    DROP = "drop"  # stop, and do not append this token: the model that continues chooses it again


class StopRule(Protocol):
    """Condition that ends a decoding stretch. Stateful, picklable, made of plain values.

    A stretch works on a twin of the rule, which then takes over the twin's state; see `decoding.state`.
    """

    name: str
    want: ReadSpec

    def observe(self, token: int, row: Readout) -> Decision:
        """Look at the token about to be appended (fed once per generated token, in order)."""
        ...


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Stop condition of a decoding stretch: any rule says so, `max_tokens` were appended, or the sequence ended."""

    rules: tuple[StopRule, ...] = ()
    max_tokens: int | None = None

    def twins(self) -> StopCondition:
        """Return the same condition with independent copies of the rules."""
        return replace(self, rules=tuple(twin(rule) for rule in self.rules)) if self.rules else self

    def settle(self, rules: tuple[StopRule, ...]) -> None:
        """Let the rules take over the state of twins, in place."""
        for rule, state in zip(self.rules, rules, strict=True):
            settle(rule, state)

    def __or__(self, other: StopCondition) -> StopCondition:
        limits = [limit for limit in (self.max_tokens, other.max_tokens) if limit is not None]
        return StopCondition(self.rules + other.rules, min(limits) if limits else None)

    @property
    def want(self) -> ReadSpec:
        """Union of what the rules need to read."""
        want = ReadSpec()
        for rule in self.rules:
            want = want | rule.want
        return want


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of a decoding stretch: the appended tokens, and the rules as they are now, in their order."""

    segment: Segment
    rules: tuple[StopRule, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of a continuation, token by token, in nats.

    `greedy` says whether a token was the most probable; `top` are the most probable ones (id, log-probability);
    `ranks` are the places of the tokens among all, from 1.
    """

    token_logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def total(self) -> float:
        """Sum over the continuation."""
        return sum(self.token_logprobs)


def token_of(row: Readout, source: str) -> Token:
    """Return the token a row chose, with the log-probability and entropy read with it."""
    token = Token(row.token, source, logprob=row.logprob, entropy_bits=row.entropy_bits, top=row.top)
    return token if row.surprise_bits is None else token._replace(surprise_bits=row.surprise_bits)
