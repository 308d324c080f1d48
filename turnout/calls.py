"""What front ends and pools say to each other: plain picklable values, the same in process and over Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from turnout.candidate_sets import CandidateSet as CandidateSet
from turnout.candidate_sets import Doubt as Doubt
from turnout.chat_template import NO_OPTIONS, TemplateOptions
from turnout.cost import CostReport, ModelMeter, SpeculationMeter
from turnout.descriptions import EndToken as EndToken
from turnout.descriptions import MethodDescription as MethodDescription
from turnout.descriptions import ModelDescription as ModelDescription
from turnout.errors import TurnoutError, invalid
from turnout.moved_calls import Moved
from turnout.part_choice import PartChoice
from turnout.pool_stats import AuditDiff as AuditDiff
from turnout.pool_stats import AuditStats as AuditStats
from turnout.pool_stats import CacheStats as CacheStats
from turnout.pool_stats import EndpointStats as EndpointStats
from turnout.pool_stats import MemberStats as MemberStats
from turnout.pool_stats import PoolStats as PoolStats
from turnout.tools import Tool, ToolCall, ToolCallPart
from turnout.types import NO_LIMITS, FinishReason, RouteLimits, SamplingParams, SharingPolicy, TokenKind

CacheClass = Literal["exact", "lossy"]
CACHE_CLASSES: tuple[CacheClass, ...] = ("exact", "lossy")
Priority = Literal["interactive", "batch"]
# Where an answer's thinking goes: apart from its text, nowhere, or into the text as the model wrote it.
ReasoningMode = Literal["split", "hide", "raw"]
AUTO = "auto"  # instead of a method: the pool's routing
READ = "read"  # instead of a tool format


def cache_class(given: str) -> CacheClass:
    """Which cached KV a call may use; nothing given is "exact".

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    for known in CACHE_CLASSES:
        if (given or "exact") == known:
            return known
    raise invalid("cache", f"must be one of {', '.join(CACHE_CLASSES)} (got {given[:40]!r})")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is system, user, assistant or tool.

    `tool_calls` are what an assistant asked for; a tool's turn names the call it answers in `tool_call_id`.
    `reasoning` is what an assistant thought before it.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a client already has of one answer of a call that is made again elsewhere.

    Attributes:
        tokens: ids of its tokens.
        chars: length of its text, in characters; text may lag behind tokens.
        finished: whether the client has the finish reason: nothing more of the answer is sent.
        reasoning_chars: length of its reasoning, in characters.
    """

    tokens: tuple[int, ...] = ()
    chars: int = 0
    finished: bool = False
    reasoning_chars: int = 0


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation. Exactly one of `prompt` (text or token ids) and `messages` is given.

    Attributes:
        request_id: chosen by the front end, used to cancel and to log.
        model: a pool's name (its models answer together) or a member model's name (it answers alone).
        method: decoding method; None is the pool's default: its routing where it has one. "auto" is the routing.
        params: the method's parameters, not yet validated.
        tenant: whose request it is.
        sharing: with whom the tenant shares prefix caches, which the service sets; None: as is configured.
        logprobs: report per-token log-probabilities (count of alternatives is in `sampling.logprobs`).
        deadline_s: seconds this call may take; None is the server's limit.
        session: what the caller groups requests by, for routing; "" without.
        explain: whether the usage is to say why the request was routed as it was.
        limits: for routing.
        parse_special: whether special tokens that a raw prompt spells out are meant; in messages they never are.
        add_special_tokens: whether a raw text begins with what the tokenizer puts before every text.
        cache: "exact" uses only KV that was computed as this call would; "lossy" also what was kept with a loss.
        delivered: by answer, what the client has already: the same answers are computed (the call has a seed), and
            only what comes after it is sent.
        moved: what the replica that answered so far handed over; None where it could not.
        include_decision: whether a routed answer begins with a `Decided`, so that the call can be made again.
        decided: what was decided when the call was made before, or for its session (`router.decision.Decision` as
            JSON); None: decide.
        priority: a "batch" call yields to every "interactive" one, within a step.
        rank: of its tenant's calls that wait for a place, the one with the lowest is next.
        cache_salt: within what the tenant shares, only calls with the same one find its KV; "" without.
        batch_id: the batch it belongs to, for records of use; "" without.
        key_id: which of the tenant's keys it came with; "" without.
        billed: whether the tenant pays for it; internal calls are not billed.
        trace: `traceparent` of the span it is in, "" where it is not traced; as it arrives, the caller's.
        whole: whether the client waits for the whole answer: then events come in large batches.
        tools: offered to the model by the chat template.
        template: what else the chat template gets.
        reasoning: where the thinking of a conversation's answer goes.
        tool_choice: which of the tools is to be called: "", the model decides; none, required, or the name of one.
        contrast: streams that the answering model's logits are combined with; None: there are none.
        context: text that the question is about, before the prompt or the last user message; "" without.
        uncertainty: what measures the doubt about each answer; None: it is not measured.
        abstain_above: doubt above which an answer is not given; None: it is only reported.
        candidates: whether the usage is to hold what answers were chosen from, or a search found.
    """

    request_id: str
    model: str
    sampling: SamplingParams
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    method: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    tenant: str = "default"
    deadline_s: float | None = None
    session: str = ""
    explain: bool = False
    limits: RouteLimits = NO_LIMITS
    cache: CacheClass = "exact"
    parse_special: bool = True
    delivered: tuple[Delivered, ...] = ()
    moved: Moved | None = None
    include_decision: bool = False
    decided: dict[str, Any] | None = None
    key_id: str = ""
    billed: bool = True
    priority: Priority = "interactive"
    batch_id: str = ""
    include_prompt_len: bool = False
    whole: bool = False
    trace: str = ""
    tools: tuple[Tool, ...] = ()
    template: TemplateOptions = NO_OPTIONS
    sharing: SharingPolicy | None = None
    rank: int = 0
    cache_salt: str = ""
    reasoning: ReasoningMode = "split"
    tool_choice: str = ""
    contrast: PartChoice | None = None
    context: str = ""
    add_special_tokens: bool = True
    uncertainty: PartChoice | None = None
    abstain_above: float | None = None
    candidates: bool = False


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One emitted token as a client sees it.

    `text` is its part of the answer's text, which all of them joined are: characters that the token completes, none
    where it is special or the first part of a character. `top` is (id, text it would have had here, log-probability in
    nats), special tokens by name; `rejected` are texts of drafted tokens refused in its place. `broken` has the bytes
    of those ids, here and in `top`, whose text is not just what they hold. `thinking`: it was thought, or is a marker
    of thinking, and no part of the answer.
    """

    id: int
    text: str
    source: str
    kind: TokenKind
    logprob: float | None = None
    entropy_bits: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()
    rejected: tuple[str, ...] = ()
    broken: tuple[tuple[int, bytes], ...] = ()
    thinking: bool = False

    def __reduce__(self) -> tuple[type[TokenOut], tuple[Any, ...]]:
        """Pickle as the call that makes it, without what is as usual: most of a stream's messages are tokens."""
        usual = (self.id, self.text, self.source, self.kind, self.logprob, self.entropy_bits)
        if self.top or self.rejected or self.broken or self.thinking:
            return TokenOut, (*usual, self.top, self.rejected, self.broken, self.thinking)
        return TokenOut, usual

    @property
    def data(self) -> bytes:
        """Bytes that it holds. Those of all tokens joined are the text's UTF-8, wherever they are valid."""
        return dict(self.broken).get(self.id, self.text.encode())


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of answer `index`. Text may lag behind tokens (half a character, a possible stop string).

    `reasoning` is what the model thought before its answer, as text; it is no part of `text`, its tokens are among
    `tokens`. `tool_calls` are what front ends read out of an answer, and leave out of its text: all of it, whole, with
    its last chunk; `call_parts` is what is new of them in a stream. `tool_format` names how calls are written in
    `text`, where there may be any (`turnout.tool_formats`; READ: they were read where the answer comes from). `stop`
    comes with the last chunk: the stop string or token id that ended the answer, of those that the request gave.
    """

    index: int
    text: str
    tokens: tuple[TokenOut, ...]
    finish_reason: FinishReason | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    call_parts: tuple[ToolCallPart, ...] = ()
    reasoning: str = ""
    stop: str | int | None = None
    tool_format: str = ""

    def __reduce__(self) -> tuple[type[Chunk], tuple[Any, ...]]:
        """See `TokenOut.__reduce__`."""
        head = (self.index, self.text, self.tokens, self.finish_reason, self.tool_calls, self.call_parts)
        if self.reasoning or self.stop is not None or self.tool_format:
            return Chunk, (*head, self.reasoning, self.stop, self.tool_format)
        return Chunk, head[:3] if self.finish_reason is None and not (self.tool_calls or self.call_parts) else head


@dataclass(frozen=True, slots=True)
class DriftReading:
    """How far what a pool's threshold sees is from what its calibration, or its router, was made on.

    Attributes:
        calibration: the artifact's name.
        version: what it held.
        index: population stability index over the last answers, or the last requests routed.
        limit: beyond it there is drift.
        answers: how many were looked at.
    """

    calibration: str
    version: str
    index: float
    limit: float
    answers: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What the whole call used; the last event of a stream.

    `seed` reproduces the call; `ttft_s` and `wall_s` are seconds from arrival at the pool; `notes` say what was done
    otherwise than asked, and which calibration set a parameter; `drift` is how far live answers are from it, and
    `router_drift` how far live requests are from what the routers that decided were trained on; front ends count it.
    `sampling` are the parameters that tokens were chosen with, defaults included; `measures` are what a method measured
    of its answers, by name. `reasoning_tokens` are those of the completion that are thinking, its markers included.
    `queue_s` is the time it waited for a place in the pool before that. `route` is the decision of a routed request
    (`router.decision.Decision`); features, scores and limits are in it where the call asked for an explanation.
    `candidates` are those of every choice, where the call asked for them; `doubts` were measured of its answers.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    models: dict[str, ModelMeter]
    speculation: SpeculationMeter
    switches: int
    cost: CostReport
    method: str
    params: dict[str, Any]
    seed: int
    ttft_s: float
    wall_s: float
    notes: tuple[str, ...] = ()
    drift: DriftReading | None = None
    route: dict[str, Any] | None = None
    queue_s: float = 0.0
    router_drift: tuple[DriftReading, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    reasoning_tokens: int = 0
    measures: dict[str, float] = field(default_factory=dict)
    candidates: tuple[CandidateSet, ...] = ()
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal or failure, as a value: exceptions do not cross process borders."""

    error: TurnoutError


@dataclass(frozen=True, slots=True)
class Decided:
    """Decision on a routed call, for the process that may have to repeat the call; clients never see it."""

    decision: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Regained:
    """An answer that is made again has a token that its client has already: it gets on. Clients never see it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Lengths of the prompt and of a contrast's others, with the first event of a call with `include_prompt_len`.

    Those of the contrast include the most tokens that it lets the model write to choose among them.
    """

    prompt_tokens: int
    stream_tokens: int = 0


Event = Chunk | Usage | Failure | Decided | Regained | Begun


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Log-likelihood of `completion` after `prompt` under one model (text or token ids each).

    What is not named here is as in `GenerateCall`.

    Attributes:
        prompts: one for each completion, in place of `prompt`; () without.
        suffix: a text after each of `prompts`.
        truncate: that many first tokens of one of `prompts` are read, before the suffix; -1: as many as the model can;
            None: a longer one is refused.
    """

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    completions: tuple[str | tuple[int, ...], ...]
    tenant: str = "default"
    top: int = 0
    key_id: str = ""
    billed: bool = True
    sharing: SharingPolicy | None = None
    parse_special: bool = True
    cache_salt: str = ""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str = ""
    truncate: int | None = None
    priority: Priority = "interactive"
    batch_id: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt as a client sees it; `top` and `broken` as in `TokenOut`.

    `logprob` is None of the first one, which follows nothing; `rank` is its place among all tokens by probability, from
    1, None where it is not known.
    """

    id: int
    text: str
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, str, float], ...] = ()
    broken: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """One scored completion: tokens with `logprob` filled, in order.

    Inside the server also how many tokens its prompt has, and the place of each token among all, from 1.
    """

    tokens: tuple[TokenOut, ...]
    greedy: tuple[bool, ...]
    prompt_tokens: int = 0
    ranks: tuple[int, ...] = ()
