"""A job on a running server: its input goes up as a batch, the server's idle time answers it, its files come back."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from deployments.batches.disk import named
from deployments.batches.inputs import Defaults, Fault, fingerprint, read_input
from deployments.batches.lines import request_id_of, seed_of, unread
from deployments.batches.outputs import opened
from turnout.errors import Code, TurnoutError, invalid
from turnout.whole_files import whole, write_whole

LOOK_S = 0.5
TIMEOUT_S = 120.0
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class ServedJob:
    """What `turnout batch --server` is asked for.

    Attributes:
        source: the input, and `target`, the output: paths, or URLs that fsspec knows.
        errors: where failed lines go.
        work: a folder in which the batch's id is kept.
        server: URL of the server, without /v1.
        defaults: for what lines leave open.
        window: the longest the server may take, as 24h.
        key: sent as a bearer token; "" without.
        limit: lines looked at; None: all.
        seed: from which lines that name none get theirs, as without a server.
    """

    source: str
    target: str
    errors: str
    work: Path
    server: str
    defaults: Defaults
    window: str = "24h"
    key: str = ""
    limit: int | None = None
    seed: int = 0


def run(job: ServedJob, tell: Callable[[dict[str, Any]], None] = lambda _: None, fresh: bool = False) -> dict[str, Any]:
    """Do a job, or go on waiting for one that was sent before.

    Args:
        job: what is asked for.
        tell: told of the batch object while it is worked on.
        fresh: send it again, whatever was sent before.

    Returns:
        The batch object at its end.

    Raises:
        TurnoutError: the input or the output is at fault, the server refuses or cannot be reached, the batch failed.
    """
    headers = {"Authorization": f"Bearer {job.key}"} if job.key else {}
    job.work.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=job.server, headers=headers, timeout=TIMEOUT_S) as client:
        batch_id = _batch(job, client, fresh)
        batch = _ask(client, "GET", f"/v1/batches/{batch_id}")
        while batch["status"] not in ENDED:
            tell(batch)
            time.sleep(LOOK_S)
            batch = _ask(client, "GET", f"/v1/batches/{batch_id}")
        tell(batch)
        if batch["status"] == "failed":
            reasons = "; ".join(each["message"] for each in batch["errors"]["data"][:3])
            raise TurnoutError(Code.INVALID_ARGUMENT, f"the server refused the batch: {reasons}")
        _fetch(client, batch["output_file_id"], job.target, b"")
        faults, numbers = job.work / "faults.jsonl", json.loads((job.work / "numbers.json").read_text())
        _fetch(client, batch["error_file_id"], job.errors, faults.read_bytes(), partial(_renumbered, numbers))
    return batch


def _described(job: ServedJob) -> dict[str, Any]:
    return {
        "server": job.server,
        "input": fingerprint(job.source),
        "defaults": asdict(job.defaults),
        "limit": job.limit,
        "seed": job.seed,
    }


def _batch(job: ServedJob, client: httpx.Client, fresh: bool) -> str:
    """The batch that this very job was sent as before; else it is sent now."""
    path = job.work / "sent.json"
    sent = json.loads(path.read_text()) if path.exists() and not fresh else None
    if sent is None:
        # Kept before anything is sent: by it a batch is found again whose answer never came.
        sent = {"job": _described(job), "token": secrets.token_hex(12), "batch": None}
        write_whole(path, json.dumps(sent).encode())
    elif sent["job"] != _described(job):
        raise invalid("work", f"{job.work} holds another job; finish it, or use --fresh")
    elif sent["batch"] is None:
        sent["batch"] = _found(client, sent["token"])
    if sent["batch"] is None:
        sent["batch"] = _send(job, client, sent["token"])
    write_whole(path, json.dumps(sent).encode())
    return str(sent["batch"])


def _found(client: httpx.Client, token: str) -> str | None:
    """The batch that was sent with a token."""
    after: dict[str, str] = {}
    while True:
        page = _ask(client, "GET", "/v1/batches", params={"limit": 1000, **after})
        for batch in page["data"]:
            if (batch["metadata"] or {}).get("job") == token:
                return str(batch["id"])
        if not page["has_more"]:
            return None
        after = {"after": page["last_id"]}


def _send(job: ServedJob, client: httpx.Client, token: str) -> str:
    endpoints, numbers = set[str](), list[int]()
    upload, faults = job.work / "upload.jsonl", job.work / "faults.jsonl"
    with (
        named(str(job.work)),
        whole(upload) as up,
        whole(faults) as down,
        up.open("wb") as good,
        down.open("wb") as bad,
    ):
        for count, row in enumerate(read_input(job.source, job.defaults)):
            if count == job.limit:
                break
            if isinstance(row, Fault):
                record = unread(row.number, request_id_of(job.source, row.number), None, row.error).record
                bad.write(f"{json.dumps(record)}\n".encode())
                continue
            endpoints.add(row.endpoint)
            numbers.append(row.number)
            body = row.body if row.body.get("seed") is not None else {**row.body, "seed": seed_of(job.seed, row.number)}
            line = {"custom_id": row.custom_id, "method": "POST", "url": row.endpoint, "body": body}
            good.write(f"{json.dumps(line)}\n".encode())
    with named(str(job.work)):
        write_whole(job.work / "numbers.json", json.dumps(numbers).encode())
    if len(endpoints) != 1:
        raise invalid("IN", f"lines must be of one kind for a server: found {', '.join(sorted(endpoints)) or 'none'}")
    with upload.open("rb") as file:
        sent = _ask(client, "POST", "/v1/files", files={"file": ("input.jsonl", file)}, data={"purpose": "batch"})
    wanted = {
        "input_file_id": sent["id"],
        "endpoint": endpoints.pop(),
        "completion_window": job.window,
        "metadata": {"job": token},
    }
    return str(_ask(client, "POST", "/v1/batches", json=wanted)["id"])


def _renumbered(numbers: list[int], data: bytes) -> bytes:
    """A line of the server's error file, which knows the numbers of what was sent, with that of the input."""
    record = json.loads(data)
    error = record["error"]
    if error is None or error.get("line") is None:
        return data
    told, error["line"] = error["line"], numbers[error["line"] - 1]
    error["message"] = error["message"].replace(f"line {told}:", f"line {error['line']}:", 1)
    return f"{json.dumps(record, ensure_ascii=False)}\n".encode()


def _ask(client: httpx.Client, method: str, path: str, **content: Any) -> dict[str, Any]:
    try:
        answer = client.request(method, path, **content)
    except httpx.TransportError as error:
        raise _silent(client, error) from None
    if not answer.is_success:
        raise _refusal(answer)
    found: dict[str, Any] = answer.json()
    return found


def _silent(client: httpx.Client, error: httpx.TransportError) -> TurnoutError:
    return TurnoutError(Code.UNAVAILABLE, f"server: {client.base_url} does not answer: {error}", "server")


def _refusal(answer: httpx.Response) -> TurnoutError:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status_code}"
    return TurnoutError(Code.UNAVAILABLE, f"server: {message}", "server")


def _fetch(
    client: httpx.Client,
    file_id: str | None,
    path: str,
    before: bytes,
    change: Callable[[bytes], bytes] = lambda line: line,
) -> None:
    """Write the changed lines of a file of the server's after what is there already; nothing where there is neither."""
    if file_id is None and not before:
        return
    with named(path), opened(path) as out:
        out.write(before)
        if file_id is not None:
            for line in _lines(client, f"/v1/files/{file_id}/content"):
                out.write(change(line))


def _lines(client: httpx.Client, path: str) -> Iterator[bytes]:
    rest = b""
    try:
        with client.stream("GET", path) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            for piece in answer.iter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                yield from (line + b"\n" for line in lines)
    except httpx.TransportError as error:
        raise _silent(client, error) from None
    if rest:
        yield rest
