"""Files and batches as they are kept and shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.access.callers import owner_of

if TYPE_CHECKING:
    from deployments.batches.spent import Spent
    from deployments.openapi.answers import BatchFaults, BatchUsageObject

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
BatchState = Literal["waiting", "running", "done", "failed"]  # of a line
MAX_ERRORS = 100  # listed in a batch; all of them are in its error file


class FileRecord(BaseModel):
    """A file of a tenant's; times in seconds since 1970.

    Attributes:
        owner: whose it is, as `Caller.owner` says it; kept as `tenant`.
    """

    model_config = ConfigDict(extra="forbid", validate_by_name=True, serialize_by_alias=True)

    id: str
    owner: str = Field(alias="tenant")
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]

    def shown(self, retention_s: float) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            **self.model_dump(exclude={"owner"}),
            "object": "file",
            "status": "processed",
            "expires_at": self.created_at + int(retention_s),
        }


class Counts(BaseModel):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(BaseModel):
    """Why a line, or the whole batch, was refused."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchUsage(BaseModel):
    """Tokens of all answers so far, and FLOPs, also those of the large model alone."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    flops: float = 0.0
    flops_large_only: float = 0.0

    def add(self, spent: Spent) -> None:
        """Add what an answer used."""
        self.input_tokens += spent.prompt_tokens
        self.cached_tokens += spent.cached_tokens
        self.output_tokens += spent.completion_tokens
        self.reasoning_tokens += spent.reasoning_tokens
        self.flops += spent.flops
        self.flops_large_only += spent.flops_large_only


class BatchRecord(BaseModel):
    """A batch; times in seconds since 1970.

    Attributes:
        tenant: whose it is, and `key_id` with which key it was made: its calls are theirs.
        entry: of the tenant in the tenants file, see `Caller`.
        seed: from which lines that name none get theirs.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    tenant: str
    key_id: str
    entry: str = ""
    seed: int
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    errors: list[BatchFault] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None

    @property
    def owner(self) -> str:
        """Whose it is, as `Caller.owner` says it."""
        return owner_of(self.tenant, self.entry)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        errors: BatchFaults | None = None
        if self.errors:
            errors = {"object": "list", "data": [each.model_dump() for each in self.errors]}
        used = self.usage
        usage: BatchUsageObject = {
            "input_tokens": used.input_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.output_tokens,
            "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
            "total_tokens": used.input_tokens + used.output_tokens,
            "turnout": {"flops": used.flops, "flops_large_only": used.flops_large_only},
        }
        return {
            **self.model_dump(exclude={"tenant", "key_id", "entry", "seed", "errors", "usage"}),
            "object": "batch",
            "errors": errors,
            "usage": usage,
        }


def progress_of(record: BatchRecord, num_asked: int = 0) -> dict[BatchState, int]:
    """A batch's lines by state, with the number that is being asked just now."""
    counts = record.request_counts
    left = counts.total - counts.completed - counts.failed
    running = min(num_asked, left)
    return {"waiting": left - running, "running": running, "done": counts.completed, "failed": counts.failed}
