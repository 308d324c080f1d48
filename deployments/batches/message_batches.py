"""Message batches as Anthropic's API shows them, made of the records of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

from deployments.batches.job import EXPIRED
from deployments.batches.records import BatchRecord
from deployments.messages.answers import MessageError, MessageObject
from deployments.messages.writer import error_body
from deployments.openapi.extras import Answer
from turnout.json_lines import json_line

PREFIX = "msg"  # before the id of a batch: msgbatch_...


class MessageBatchCounts(Answer):
    """Requests of a message batch by what became of them; their sum is the number of its requests."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Answer):
    """A message batch; times in RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchList(Answer):
    """A page of message batches, the newest first."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(Answer):
    """The batch is gone."""

    id: str
    type: Literal["message_batch_deleted"]


class BatchResult(TypedDict, total=False):
    """What became of a request of a message batch.

    Attributes:
        type: succeeded, errored, canceled or expired.
        message: the answer, if it succeeded.
        error: the API's error object, if it erred.
    """

    type: Literal["succeeded", "errored", "canceled", "expired"]
    message: MessageObject
    error: MessageError


def shown_id(record: BatchRecord) -> str:
    """Return the id by which the API names a batch."""
    return PREFIX + record.id


def batch_object(record: BatchRecord, num_expired: int, results_url: str) -> MessageBatch:
    """Return a batch in the API's form.

    Args:
        record: the batch.
        num_expired: its requests that were not answered in time, of those that failed.
        results_url: where its results are, once it has ended.
    """
    counts, ended = record.request_counts, record.ended
    left = counts.total - counts.completed - counts.failed
    at = record.completed_at or record.failed_at or record.expired_at or record.cancelled_at
    return {
        "id": shown_id(record),
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if record.status == "cancelling" else "in_progress",
        "request_counts": {
            "processing": 0 if ended else left,
            "succeeded": counts.completed,
            "errored": counts.failed - num_expired,
            "canceled": left if ended else 0,
            "expired": num_expired,
        },
        "created_at": _time(record.created_at),
        "expires_at": _time(record.expires_at),
        "ended_at": _time(at) if ended and at is not None else None,
        "cancel_initiated_at": None if record.cancelling_at is None else _time(record.cancelling_at),
        "archived_at": None,
        "results_url": results_url if ended else None,
    }


def results(
    answers: Iterable[dict[str, Any]], failures: Iterable[dict[str, Any]], asked: Iterable[str]
) -> Iterator[str]:
    """Write a line for each request of a batch that has ended.

    Args:
        answers: records of its output file.
        failures: records of its error file.
        asked: ids of all its requests; those that no record names were canceled.
    """
    seen = set[str]()
    for record in answers:
        seen.add(record["custom_id"])
        yield _line(record["custom_id"], {"type": "succeeded", "message": record["response"]["body"]})
    for record in failures:
        seen.add(record["custom_id"])
        yield _line(record["custom_id"], _failure(record))
    yield from (_line(each, {"type": "canceled"}) for each in asked if each not in seen)


def _failure(record: dict[str, Any]) -> BatchResult:
    error = record["error"]
    if error is None:
        return {"type": "errored", "error": record["response"]["body"]}
    if error["code"] == EXPIRED:
        return {"type": "expired"}
    return {"type": "errored", "error": error_body(400, error["message"], record["id"])}


def is_expired(record: dict[str, Any]) -> bool:
    """Return whether a failed request was not answered in time."""
    return (record["error"] or {}).get("code") == EXPIRED


def _line(custom_id: str, result: BatchResult) -> str:
    return json_line({"custom_id": custom_id, "result": result}) + "\n"


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
