"""The shapes of answers, for the document only: what writes them is `deployments.openai_format` and its neighbours."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from deployments.batches.records import Counts, Status
from deployments.console.reports import Report
from turnout.access_config import TenantLimits
from turnout.calls import DriftReading, MethodDescription, ModelDescription, PoolStats
from turnout.cost import CostReport, ModelMeter, SpeculationMeter


class Answer(BaseModel):
    """A JSON object that has these members and no others."""

    model_config = ConfigDict(extra="forbid")


def _of(name: str, source: type, leave: frozenset[str] = frozenset(), **more: Any) -> Any:
    """A dataclass as it is written: all its fields, without those to leave, and what is added to them."""
    fields: Any = {key: (kind, ...) for key, kind in get_type_hints(source).items() if key not in leave}
    fields |= {key: (kind, ...) for key, kind in more.items()}
    return create_model(name, __base__=Answer, **fields)


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


class ModelObject(Answer):
    """A name that a request may put in `model`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    turnout: ModelDetails


class ModelList(Answer):
    """Pools and their members."""

    object: Literal["list"]
    data: list[ModelObject]


class MethodList(Answer):
    """Decoding methods; `params` is the JSON schema of a method's parameters."""

    object: Literal["list"]
    data: list[Method]


class PromptDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class UsageDetails(Answer):
    """Work by model, drafts, and the three cost meters."""

    method: str
    params: dict[str, Any]
    seed: int
    models: dict[str, ModelWork]
    speculation: SpeculationDetails
    switches: int
    cost: CostReport
    ttft_s: float
    wall_s: float
    queue_s: float
    notes: list[str]
    drift: DriftReading | None
    route: dict[str, Any] | None


class UsageObject(Answer):
    """What an answer used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
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
    kind: Literal["decoded", "accepted", "recovered", "bonus"]
    entropy_bits: float | None
    logprob: float | None
    top: list[TopText]
    rejected: list[str]


class ChoiceDetails(Answer):
    """Turnout's own part of a choice."""

    tokens: list[TokenDetails]


class Logprobs(Answer):
    """Log-probabilities in nats; those of an echoed prompt begin with null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One answer."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]
    turnout: ChoiceDetails = ChoiceDetails(tokens=[])


class CompletionAnswer(Answer):
    """The whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
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
    tool_calls: list[ToolCallObject] = []


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    turnout: ChoiceDetails = ChoiceDetails(tokens=[])


class ChatAnswer(Answer):
    """The whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject


class TenantObject(Answer):
    """A tenant's limits, what is left of them, and what it used this month."""

    tenant: str
    limits: TenantLimits
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
    store: Annotated[str, Field(description="degraded: and why; absent where all of the prefix store is reached")] = ""


class StatusAnswer(Answer):
    """By pool, what its replicas hold; under `errors`, why a pool does not answer."""

    pools: dict[str, list[PoolStats]]
    errors: dict[str, str]


class FileObject(Answer):
    """A file that was uploaded or written by a batch; times in seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


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


class BatchFaultObject(Answer):
    """Why a line, or the whole batch, was refused."""

    code: str
    message: str
    line: int | None
    param: str | None


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
    """Work of all answers so far, beside that of the large model alone."""

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


class BatchObject(Answer):
    """A batch; times in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status
    errors: BatchFaults | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    usage: BatchUsageObject
    metadata: dict[str, str] | None


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
