"""Writing what a job has found: answers to one file, failed lines to another, each there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

from deployments.batches.disk import located, named
from turnout.atomic_files import whole
from turnout.errors import invalid
from turnout.json_lines import json_line

ROW_GROUP = 4096

Records = Iterable[dict[str, Any]]


def check_places(source: str, target: str, errors: str) -> None:
    """Refuse what cannot be written to, or is another of the three files, before anything is answered for it.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the one at fault.
    """
    taken = {_identity("IN", source): f"IN, {source}"}
    for field, path in (("OUT", target), ("errors", errors)):
        other = taken.setdefault(_identity(field, path), field)
        if other != field:
            raise invalid(field, f"{path} is {other} as well; one would replace the other")
        filesystem, place = located(field, path)
        if _is_here(filesystem):
            if not Path(place).parent.is_dir():
                raise invalid(field, f"{path}: there is no folder {Path(place).parent}")
            if Path(place).is_dir():
                raise invalid(field, f"{path} is a folder; give a file")


def write_outputs(target: str, errors: str, answers: Records, failures: Records) -> tuple[int, int]:
    """Write both files; without failed lines, there is no second one.

    Args:
        target: where answers go: named .parquet, as its columns, else as lines.
        errors: where failed lines go.
        answers: records of lines that were answered, in the order of the input.
        failures: of lines that failed, likewise.

    Returns:
        Lines answered, and lines that failed.

    Raises:
        TurnoutError: UNAVAILABLE: there is no room, or the place cannot be written to; what was there before still is.
    """
    write = _write_parquet if PurePosixPath(target).suffix == ".parquet" else _write_lines
    with named(target), opened(target) as file:
        answered = write(file, answers)
    with named(errors):
        failures = iter(failures)
        first = next(failures, None)
        if first is None:
            filesystem, path = located("errors", errors)
            if filesystem.exists(path):
                filesystem.rm_file(path)  # of a run before: none of these lines failed
            return answered, 0
        with opened(errors) as file:
            return answered, _write_lines(file, chain([first], failures))


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file to write, there once all of it is written; of a path, or of a URL that fsspec knows.

    Raises:
        OSError: as writing does; what was there before still is.
    """
    filesystem, place = located("OUT", path)
    if _is_here(filesystem):
        with whole(Path(place)) as part, part.open("wb") as file:
            yield file
        return
    file = filesystem.open(place, "wb", autocommit=False)
    try:
        with file:
            yield file
    except BaseException:
        file.discard()
        raise
    file.commit()


def _identity(field: str, path: str) -> tuple[str, str]:
    """What two names of one file have in common."""
    filesystem, place = located(field, path)
    protocol = filesystem.protocol
    kind = protocol if isinstance(protocol, str) else protocol[0]
    return kind, str(Path(place).resolve()) if _is_here(filesystem) else place


def _is_here(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "file" in (protocol if isinstance(protocol, tuple) else (protocol,))


def _write_lines(file: IO[bytes], records: Records) -> int:
    count = 0
    for record in records:
        file.write(f"{json_line(record)}\n".encode())
        count += 1
    return count


def _write_parquet(file: IO[bytes], records: Records) -> int:
    """One row per answer: its id, the first choice's text and why it ended, tokens, and the whole response as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, count = pa.string(), 0
    schema = pa.schema(
        [
            ("custom_id", text),
            ("text", text),
            ("finish_reason", text),
            ("prompt_tokens", pa.int64()),
            ("completion_tokens", pa.int64()),
            ("response", text),
        ]
    )
    rows = map(_row, records)
    with pq.ParquetWriter(file, schema) as writer:
        while group := list(islice(rows, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))
            count += len(group)
    return count


def _row(record: dict[str, Any]) -> dict[str, Any]:
    body = record["response"]["body"]
    usage, (text, reason) = body["usage"], _text(body)
    # of /v1/messages, input_tokens are those that were not cached
    read = usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
    return {
        "custom_id": record["custom_id"],
        "text": text,
        "finish_reason": reason,
        "prompt_tokens": usage.get("prompt_tokens", read),
        "completion_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "response": json_line(body),
    }


def _text(body: dict[str, Any]) -> tuple[str | None, str | None]:
    """Text of an answer's first choice, and why it ended; of embeddings, scores and rankings, neither."""
    if "choices" in body:
        choice = body["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]
    if "output" in body:  # of /v1/responses
        parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts if part["type"] == "output_text"), body["status"]
    if "stop_reason" in body:  # of /v1/messages
        return "".join(block["text"] for block in body["content"] if block["type"] == "text"), body["stop_reason"]
    return None, None
