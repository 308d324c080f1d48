"""The values every layer speaks of: sampling parameters, tokens with provenance, segments, whose cache is whose."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, NewType

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from turnout.errors import FieldError
from turnout.part_choice import PartChoice
from turnout.structure import Structure

BlockHash = NewType("BlockHash", bytes)

MAX_SEED = 2**63 - 1
MOST_PROCESSORS = 16  # of a request
MOST_WIDTH = 128  # hypotheses that a search follows at once
EarlyStopping = Literal[False, True, "never"]  # of a beam search; see `decoding.search._beams.BeamParams`
MOST_TOKENS = 1_000_000  # of an answer, whatever its context


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may find a piece of cache: one tenant (private), a group of tenants, or everybody (public).

    Attributes:
        policy: the kind.
        id: which of its kind: the tenant, the group, or the registered prefix.
    """

    policy: Literal["private", "group", "public"]
    id: str

    @property
    def key(self) -> bytes:
        """The name as bytes; lengths come first, so that no two names run into each other."""
        return b"".join(len(part).to_bytes(4, "little") + part for part in (self.policy.encode(), self.id.encode()))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whose cache a sequence's tokens belong to.

    Attributes:
        rest: of what lies behind the spans.
        spans: (end, namespace) of the leading tokens, from the start on, most public first.
        salt: part of the hash of every block and chunk: other sequences find them only with the same one.
    """

    rest: Namespace = Namespace("private", "default")
    spans: tuple[tuple[int, Namespace], ...] = ()
    salt: str = ""

    @classmethod
    def private(cls, tenant: str) -> Sharing:
        """Everything belongs to one tenant."""
        return cls(Namespace("private", tenant))

    @property
    def salt_key(self) -> bytes:
        """The salt as 32 bytes; empty without one."""
        return hashlib.sha256(self.salt.encode()).digest() if self.salt else b""

    def namespace(self, end: int) -> Namespace:
        """Of a block or chunk whose last token is end - 1: the most private one it touches."""
        for stop, namespace in self.spans:
            if end <= stop:
                return namespace
        return self.rest


class SharingPolicy(BaseModel):
    """With whom a tenant shares its cache; with everybody, only prefixes that are registered as public."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Annotated[
        Literal["private", "group"], Field(description="private: no other tenant; group: all of its group")
    ]
    group: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=128,
            description="its group; with policy private, only what is registered for it is shared",
        ),
    ] = None

    @model_validator(mode="after")
    def _check_group(self) -> SharingPolicy:
        if self.policy == "group" and self.group is None:
            raise FieldError("group", "must be named where the policy is group")
        return self

    def home(self, tenant: str) -> Namespace:
        """Where the tenant's own blocks and chunks are."""
        if self.policy == "group" and self.group is not None:
            return Namespace("group", self.group)
        return Namespace("private", tenant)


class TokenKind(StrEnum):
    """How a token came to be emitted (speculation's terms; everything else is `decoded`)."""

    DECODED = "decoded"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


class Token(NamedTuple):
    """One emitted token.

    `source` is the name of the model that wrote it: for an accepted draft token, the drafting one.
    `logprob` and `top` (id, log-probability) are in nats under the raw logits of the model that decided;
    `entropy_bits` is that distribution's entropy before temperature, in bits. `rejected` are drafted tokens that were
    refused in its place, where the request asked for details. `surprise_bits` is -log2 of its probability in the
    distribution that it was drawn from, where a logits processor reads that.
    """

    id: int
    source: str
    kind: TokenKind = TokenKind.DECODED
    logprob: float | None = None
    entropy_bits: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rejected: tuple[int, ...] = ()
    surprise_bits: float | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Emitted tokens.

    Attributes:
        tokens: in their order.
        stopped_by: the rule that ended them; "finish" when the sequence ended.
        answer: which of the request's answers they belong to; other than 0 only from joint methods.
    """

    tokens: tuple[Token, ...]
    stopped_by: str
    answer: int = 0


class SamplingParams(BaseModel):
    """How tokens are chosen. Applied in this order: logit bias, repetition, presence and frequency
    penalties, structure, allowed ids, bad words, least length, temperature, top-k, top-p, min-p. Of allowed ids, bad
    words and the least length, each is skipped where it would leave no token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[FiniteFloat, Field(ge=0.0, le=2.0, description="0 is greedy")] = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0, description="nucleus mass; 1 is off")] = 1.0
    top_k: Annotated[
        int, Field(ge=-1, description="candidates kept; 0 and -1 are off"), AfterValidator(lambda top_k: max(top_k, 0))
    ] = 0
    min_p: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="share of the top probability; 0 is off")] = 0.0
    repetition_penalty: Annotated[
        FiniteFloat, Field(gt=0.0, le=10.0, description="divides positive logits of seen tokens; 1 is off")
    ] = 1.0
    presence_penalty: Annotated[
        FiniteFloat, Field(ge=-2.0, le=2.0, description="subtracted once per token already generated")
    ] = 0.0
    frequency_penalty: Annotated[
        FiniteFloat, Field(ge=-2.0, le=2.0, description="subtracted per occurrence already generated")
    ] = 0.0
    logit_bias: Annotated[
        dict[int, Annotated[FiniteFloat, Field(ge=-100.0, le=100.0)]],
        Field(max_length=1024, description="added to the logit of a token id"),
    ] = {}
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=16, description="strings that end the answer and are cut from it"),
    ] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64, description="token ids that end the answer")
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Field(description="leave the stop string, or the text of the token, that ended the answer in its text")
    ] = False
    ignore_eos: Annotated[bool, Field(description="go on after the end-of-text token")] = False
    min_tokens: Annotated[
        int, Field(ge=0, le=MOST_TOKENS, description="tokens before which no end token, stop token or stop string ends")
    ] = 0
    allowed_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None,
        Field(min_length=1, max_length=65536, description="the only token ids that may be written; absent: all"),
    ] = None
    bad_words: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=256, description="words never written, as the tokenizer writes them, with a space or without"),
    ] = ()
    bad_word_ids: Annotated[tuple[tuple[int, ...], ...], Field(description="tokens of bad_words; set by the pool")] = ()
    skip_special_tokens: Annotated[bool, Field(description="leave special tokens out of the text")] = True
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(ge=-1, description="number of last tokens of the prompt that are kept; -1: what fits the context"),
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=-MAX_SEED - 1, le=MAX_SEED, description="same seed, same tokens; absent: random"),
        AfterValidator(lambda seed: seed if seed is None else seed & MAX_SEED),
    ] = None
    max_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=MOST_TOKENS,
            description="most tokens generated; absent: what the context has room for, or the pool's max_answer_tokens",
            json_schema_extra=lambda schema: schema.pop("default", None) and None,
        ),
    ] = MOST_TOKENS
    thinking_token_budget: Annotated[
        int | None,
        Field(ge=-1, description="of chats: tokens of thinking after which its end is forced; absent and -1: no limit"),
        AfterValidator(lambda budget: None if budget == -1 else budget),
    ] = None
    n: Annotated[int, Field(ge=1, le=64, description="answers to the one prompt")] = 1
    logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="alternatives reported per token; absent: no log-probabilities")
    ] = None
    structure: Annotated[Structure | None, Field(description="what the answer's text must fit; absent: nothing")] = None
    processors: Annotated[
        tuple[PartChoice, ...],
        Field(
            max_length=MOST_PROCESSORS,
            description="logits processors, each by name or with parameters; last in their stages, in this order",
            json_schema_extra={"x-slot": "processors"},
        ),
    ] = ()
    token_details: Annotated[
        bool, Field(description="report each token's entropy, and drafted tokens refused in its place")
    ] = False

    @model_validator(mode="after")
    def _check_least(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise FieldError("min_tokens", f"must be at most max_tokens, {self.max_tokens} (got {self.min_tokens})")
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "must be -1, or at least 1 (got 0)")
        return self

    @property
    def bans_tokens(self) -> bool:
        """Whether some tokens may not be written, or not yet."""
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_word_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


# Updates that lift what bans tokens by their ids or their number.
UNBANNED: dict[str, Any] = {"min_tokens": 0, "allowed_token_ids": None, "bad_words": (), "bad_word_ids": ()}


class RouteLimits(BaseModel):
    """What a caller sets for a routed request; absent: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_cost: Annotated[
        FiniteFloat | None, Field(gt=0, description="most the answer may cost, relative to the large model alone")
    ] = None
    max_latency_s: Annotated[FiniteFloat | None, Field(gt=0, description="most seconds the whole answer may take")] = (
        None
    )
    quality: Annotated[
        FiniteFloat | None, Field(ge=0, le=1, description="least share of the large model's quality expected")
    ] = None


NO_LIMITS = RouteLimits()


def given_limits(limits: RouteLimits) -> list[str]:
    """Names of the limits that a caller has set."""
    return [name for name, value in limits if value is not None]
