"""Types of the HTTP API's answers, checked where they are written; the OpenAPI document is derived from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from deployments.batches.records import BatchFault, BatchRecord, FileRecord
from deployments.console.reports import Report
from deployments.openapi.extras import Answer, ChoiceExtras, PromptExtras
from turnout.access_config import TenantLimits
from turnout.calls import CandidateSet, Doubt, DriftReading, MethodDescription, ModelDescription, PoolStats
from turnout.cost import CostReport, ModelMeter, SpeculationMeter
from turnout.types import FinishReason, TokenKind


def _of(name: str, source: type, leave: frozenset[str] = frozenset(), doc: str | None = None, **more: Any) -> Any:
    """Derive an object from a dataclass or model: its fields without those in `leave`, and `more`."""
    if issubclass(source, BaseModel):
        hints = {key: field.annotation for key, field in source.model_fields.items()}
    else:
        hints = get_type_hints(source)
    fields: Any = {key: (kind, ...) for key, kind in (hints | more).items() if key not in leave}
    return create_model(name, __config__=ConfigDict(extra="forbid"), __doc__=doc, **fields)


class Fault(Answer):
    """What was refused or failed; `param` names the field at fault."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every refusal and failure."""

    error: Fault


ModelDetails: Any = _of("ModelDetails", ModelDescription, frozenset({"name"}))
ModelWork: Any = _of("ModelWork", ModelMeter, flops=float)
SpeculationDetails: Any = _of(
    "SpeculationDetails", SpeculationMeter, tokens_per_round=float, acceptance=list[float], draft_time_share=float
)
Method: Any = _of("Method", MethodDescription, frozenset({"seeds", "params_schema"}), params=dict[str, Any])
CostDetails: Any = CostReport
Drift: Any = DriftReading
Limits: Any = TenantLimits
Stats: Any = PoolStats


class ModelObject(Answer):
    """A name that a request may put in `model`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    turnout: ModelDetails


class ModelList(Answer):
    """Pools and their members."""

    object: Literal["list"]
    data: list[ModelObject]


class MethodList(Answer):
    """Decoding methods; `params`: JSON schema of a method's; `request`: of the parts that any request may choose."""

    object: Literal["list"]
    data: list[Method]
    request: dict[str, Any]


class PromptDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Tokens that were thought, and of drafted ones those that stayed and those that were refused."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageDetails(Answer):
    """Work by model, drafts, and the four cost meters."""

    method: str
    params: dict[str, Any]
    seed: int
    sampling: dict[str, Any]
    models: dict[str, ModelWork]
    speculation: SpeculationDetails
    switches: int
    cost: CostDetails
    ttft_s: float
    wall_s: float
    queue_s: float
    notes: list[str]
    measures: dict[str, float]
    candidates: list[CandidateSet]
    doubts: list[Doubt]
    drift: Drift | None
    route: dict[str, Any] | None


class UsageObject(Answer):
    """What an answer used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    turnout: UsageDetails


class TopText(Answer):
    """An alternative; nats."""

    text: str
    logprob: float


class TokenDetails(Answer):
    """A token with its provenance, where `decoding.tokens` asked for it; `bytes` where it is a part of a character."""

    id: int
    text: str
    bytes: list[int] | None
    source: str
    kind: TokenKind
    entropy_bits: float | None
    logprob: float | None
    top: list[TopText]
    rejected: list[str]
    thinking: bool


class ChoiceDetails(Answer):
    """Turnout's own part of a choice."""

    tokens: list[TokenDetails]


class Logprobs(Answer):
    """Log-probabilities in nats; those of an echoed prompt begin with null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceExtras, PromptExtras):
    """One answer."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason
    turnout: NotRequired[ChoiceDetails]


class CompletionAnswer(Answer):
    """The whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageObject


class AnyLogprob(Answer):
    """A token and its log-probability in nats."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(AnyLogprob):
    """... and its alternatives."""

    top_logprobs: list[AnyLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of a message."""

    content: list[ChatLogprob]
    refusal: None


class Called(Answer):
    """What the model asks for; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


class ToolCallObject(Answer):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: Called


class Message(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class ChatChoice(ChoiceExtras):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    turnout: NotRequired[ChoiceDetails]


class ChatAnswer(PromptExtras):
    """The whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    service_tier: Literal["default"]


class TenantObject(Answer):
    """A tenant's limits, what is left of them, and what it used this month."""

    tenant: str
    limits: Limits
    left: dict[str, float]
    usage: dict[str, float]


class TenantList(Answer):
    """All tenants; `faults` says why files, or tenants in them, are not used as they are now."""

    object: Literal["list"]
    data: list[TenantObject]
    faults: list[str]


class Health(Answer):
    """ok; degraded, some pool cannot reach its prefix store; or unavailable."""

    status: Literal["ok", "degraded", "unavailable"]
    store: NotRequired[Annotated[str, Field(description="why degraded; absent: all of the prefix store is reached")]]
    endpoints: NotRequired[Annotated[str, Field(description="why degraded; absent: every endpoint is asked")]]


class StatusAnswer(Answer):
    """By pool, what its replicas hold; under `errors`, why a pool does not answer."""

    pools: dict[str, list[Stats]]
    errors: dict[str, str]


FileObject: Any = _of(
    "FileObject",
    FileRecord,
    frozenset({"owner"}),
    "A file that was uploaded or written by a batch; times in seconds since 1970.",
    object=Literal["file"],
    expires_at=int,
    status=Literal["processed"],
)


class _Page(Answer):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    """A page of files."""

    data: list[FileObject]


class DeletedFile(Answer):
    """The file is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


BatchFaultObject: Any = _of("BatchFaultObject", BatchFault, doc=BatchFault.__doc__)


class BatchFaults(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[BatchFaultObject]


class ReadDetails(Answer):
    """Of the tokens read."""

    cached_tokens: int


class WrittenDetails(Answer):
    """Of the tokens written."""

    reasoning_tokens: int


class BatchCost(Answer):
    """Work of all answers so far, and that of the large model alone."""

    flops: float
    flops_large_only: float


class BatchUsageObject(Answer):
    """Tokens of all answers so far."""

    input_tokens: int
    input_tokens_details: ReadDetails
    output_tokens: int
    output_tokens_details: WrittenDetails
    total_tokens: int
    turnout: BatchCost


BatchObject: Any = _of(
    "BatchObject",
    BatchRecord,
    frozenset({"tenant", "key_id", "entry", "seed"}),
    "A batch; times in seconds since 1970.",
    object=Literal["batch"],
    errors=BatchFaults | None,
    usage=BatchUsageObject,
)


class BatchList(_Page):
    """A page of batches."""

    data: list[BatchObject]


class ReportName(Answer):
    """A report, and when its file was changed, in seconds since 1970."""

    name: str
    modified: float


class ReportList(Answer):
    """The newest first."""

    object: Literal["list"]
    data: list[ReportName]


class ReportObject(Report):
    """One of them."""

    model_config = ConfigDict(extra="forbid")

    name: str
