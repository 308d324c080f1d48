"""Client of a server's batch API for `turnout batch --server`: uploads the input, waits, fetches the results."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from deployments.batches.disk import named
from deployments.batches.inputs import Defaults, Fault, fingerprint, read_input
from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import request_id_of, seed_of, unread
from deployments.batches.outputs import check_places, write_outputs
from deployments.batches.spent import Spent
from deployments.surfaces import WRITING
from turnout.atomic_files import whole, write_whole
from turnout.errors import Code, TurnoutError, invalid

LOOK_S = 0.5
TIMEOUT_S = 120.0
AWAY_S = 300.0  # a server that is started anew is there again by then
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
OVER = (400, 404)  # what a server answers that is to cancel a batch which has ended, or which it has forgotten


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
    key: str = field(default="", repr=False)
    limit: int | None = None
    seed: int = 0


def run(
    job: ServedJob,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
    fresh: bool = False,
    cancel: bool = False,
) -> dict[str, Any]:
    """Do a job, or continue to wait for one that was sent before.

    Args:
        job: what is asked for.
        tell: called with the batch object while it is worked on.
        fresh: send it again, whatever was sent before; what this server was sent before is cancelled.
        cancel: end what was sent before, and fetch what was answered; nothing is sent.

    Returns:
        The batch object at its end, and in `turnout` what its answers used.

    Raises:
        TurnoutError: the input or the output is at fault, another run works in the folder, the server refuses or cannot
            be reached, the batch failed.
    """
    headers = {"Authorization": f"Bearer {job.key}"} if job.key else {}
    with (
        JobDirectory(job.work).held(),
        httpx.Client(base_url=job.server, headers=headers, timeout=TIMEOUT_S) as client,
    ):
        check_places(job.source, job.target, job.errors)
        batch_id = _cancelled(job, client) if cancel else _batch(job, client, fresh)
        batch = _seen(client, batch_id)
        while batch["status"] not in ENDED:
            tell(batch)
            time.sleep(LOOK_S)
            batch = _seen(client, batch_id)
        tell(batch)
        batch["turnout"] = _used(_fetch(job, client, batch))
    if batch["status"] == "failed":
        reasons = "; ".join(each["message"] for each in batch["errors"]["data"][:3])
        raise TurnoutError(Code.INVALID_ARGUMENT, f"the server refused the batch: {reasons}; --fresh sends it again")
    return batch


def left_behind(job: ServedJob, cancel: bool = False) -> str:
    """Describe what becomes of a job whose client stops waiting.

    Args:
        job: as `run` was asked for.
        cancel: likewise.
    """
    sent = _sent(job)
    if sent is None:
        return f"nothing was sent to {job.server}"
    batch = sent["batch"] or "what may have been sent"
    if cancel:
        return f"{batch} is being cancelled on {job.server}; run it again to fetch what was answered"
    return f"{batch} continues on {job.server}: run it again to wait for it, or with --cancel to end it"


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
    sent = _sent(job)
    if sent is not None and fresh:
        _cancel(job, client, sent)
        sent = None
    if sent is None:
        # Kept before anything is sent: by it a batch is found again whose answer never came.
        sent = {"job": _described(job), "token": secrets.token_hex(12), "batch": None}
        _keep(job, sent)
    elif sent["job"] != _described(job):
        raise invalid("work", f"{job.work} holds another job; finish it, or use --fresh")
    elif sent["batch"] is None:
        sent["batch"] = _found(client, sent["token"])
    if sent["batch"] is None:
        sent["batch"] = _send(job, client, sent["token"])
    _keep(job, sent)
    return str(sent["batch"])


def _keep(job: ServedJob, sent: dict[str, Any]) -> None:
    with named(str(job.work)):
        write_whole(job.work / "sent.json", json.dumps(sent).encode())


def _sent(job: ServedJob) -> dict[str, Any] | None:
    """What is known of the batch that was sent before."""
    path = job.work / "sent.json"
    return json.loads(path.read_text()) if path.exists() else None


def _cancelled(job: ServedJob, client: httpx.Client) -> str:
    sent = _sent(job)
    batch_id = _cancel(job, client, sent) if sent is not None else None
    if batch_id is None:
        raise invalid("cancel", f"{job.work} knows of no batch that was sent to {job.server}")
    return batch_id


def _cancel(job: ServedJob, client: httpx.Client, sent: dict[str, Any]) -> str | None:
    """End the batch that was sent before: if it is answered too, both are paid for. On another server it is left."""
    batch_id = (sent["batch"] or _found(client, sent["token"])) if sent["job"]["server"] == job.server else None
    if batch_id is None:
        return None
    answer = _answered(client, "POST", f"/v1/batches/{batch_id}/cancel")
    if not answer.is_success and answer.status_code not in OVER:
        raise _refusal(answer)
    return str(batch_id)


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
            body = row.body
            if row.endpoint in WRITING and body.get("seed") is None:
                body = {**body, "seed": seed_of(job.seed, row.number)}
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


def _renumbered(numbers: list[int], record: dict[str, Any]) -> dict[str, Any]:
    """A line of the server's error file, which knows the numbers of what was sent, with that of the input."""
    error = record["error"]
    if error is not None and error.get("line") is not None:
        sent, error["line"] = error["line"], numbers[error["line"] - 1]
        error["message"] = error["message"].replace(f"line {sent}:", f"line {error['line']}:", 1)
    return record


def _answered(client: httpx.Client, method: str, path: str, **content: Any) -> httpx.Response:
    try:
        return client.request(method, path, **content)
    except httpx.TransportError as error:
        raise _silent(client, error) from None


def _ask(client: httpx.Client, method: str, path: str, **content: Any) -> dict[str, Any]:
    answer = _answered(client, method, path, **content)
    if not answer.is_success:
        raise _refusal(answer)
    found: dict[str, Any] = answer.json()
    return found


def _seen(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """The batch object; a server that is started again meanwhile continues its batches, and is waited for."""
    until = time.monotonic() + AWAY_S
    while True:
        try:
            answer = client.get(f"/v1/batches/{batch_id}")
        except httpx.TransportError as error:
            failure = _silent(client, error)
        else:
            if answer.is_success:
                found: dict[str, Any] = answer.json()
                return found
            failure = _refusal(answer)
            if answer.status_code < 500:
                raise failure
        if time.monotonic() > until:
            raise failure
        time.sleep(LOOK_S)


def _silent(client: httpx.Client, error: httpx.TransportError) -> TurnoutError:
    return TurnoutError(Code.UNAVAILABLE, f"server: {client.base_url} does not answer: {error}", "server")


def _refusal(answer: httpx.Response) -> TurnoutError:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status_code}"
    return TurnoutError(Code.UNAVAILABLE, f"server: {message}", "server")


def _fetch(job: ServedJob, client: httpx.Client, batch: dict[str, Any]) -> Spent:
    """Write both files; lines that were not sent, as they are no requests, come first among those that failed."""
    spent = Spent()

    def answers() -> Iterator[dict[str, Any]]:
        for record in _records(client, batch["output_file_id"]):
            with suppress(KeyError):  # a server of another make does not say
                spent.add(Spent.of_record(record))
            yield record

    numbers = json.loads((job.work / "numbers.json").read_text())
    with (job.work / "faults.jsonl").open("rb") as faults:
        failures = chain(
            map(json.loads, faults),
            (_renumbered(numbers, record) for record in _records(client, batch["error_file_id"])),
        )
        write_outputs(job.target, job.errors, answers(), failures)
    return spent


def _used(spent: Spent) -> dict[str, Any]:
    return {
        "completion_tokens": spent.completion_tokens,
        "cached_share": spent.cached_share,
        "cost_of_large": spent.cost_of_large,
    }


def _records(client: httpx.Client, file_id: str | None) -> Iterator[dict[str, Any]]:
    """What a file of the server's holds; nothing where there is none."""
    if file_id is not None:
        yield from map(json.loads, _lines(client, f"/v1/files/{file_id}/content"))


def _lines(client: httpx.Client, path: str) -> Iterator[bytes]:
    rest = b""
    try:
        with client.stream("GET", path) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            for piece in answer.iter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines
    except httpx.TransportError as error:
        raise _silent(client, error) from None
    if rest:
        yield rest
