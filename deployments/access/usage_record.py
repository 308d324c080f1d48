"""What is recorded of one request."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict


class Spent(BaseModel):
    """The cost meters of a request: paper's, relative to the large model alone; FLOPs; seconds of answering."""

    model_config = ConfigDict(frozen=True)

    paper: float | None = None
    flops: float
    wall_s: float


class UsageRecord(BaseModel):
    """What one request used.

    Attributes:
        time: when it ended.
        kind: "score" reads only: all its tokens are of the prompt.
        key_id: of the key it came with; "" without.
        model: the pool or model asked.
        method: how it was decoded; None where it ended before that was known.
        prompt_tokens: those read, cached ones included; 0 where it ended before it was begun.
        completion_tokens: those written, in all answers; of a request that was cut short, those that were sent.
        tokens_by_model: the completion tokens by the model that wrote them.
        cost: the meters.
        estimated: whether the meters are a guess from other requests: it was cut short.
        outcome: OK, or the code of the error it ended with.
        batch_id: the batch it belongs to; "" without.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: AwareDatetime
    request_id: str
    kind: Literal["generate", "score"] = "generate"
    tenant: str
    key_id: str = ""
    model: str
    method: str | None = None
    priority: str = "interactive"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_by_model: dict[str, int] = {}
    cost: Spent = Spent(flops=0.0, wall_s=0.0)
    estimated: bool = False
    outcome: str = "OK"
    batch_id: str = ""
