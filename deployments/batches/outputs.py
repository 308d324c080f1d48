"""Writing what a job has found: answers to one file, failed lines to another, each there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec

from deployments.batches.workplace import Workplace
from turnout.whole_files import whole

ROW_GROUP = 4096


def write_outputs(place: Workplace, target: str, errors: str) -> tuple[int, int]:
    """Write both files, in the order of the input; without failed lines, there is no second one.

    Returns:
        Lines answered, and lines that failed.

    Raises:
        OSError: there is no room, or the place cannot be written to; what was there before still is.
    """
    write = _write_parquet if PurePosixPath(target).suffix == ".parquet" else _write_lines
    with opened(target) as file:
        answered = write(file, place.records(answered=True))
    failures = place.records(answered=False)
    first = next(failures, None)
    if first is None:
        filesystem, path = fsspec.core.url_to_fs(errors)
        if filesystem.exists(path):
            filesystem.rm_file(path)  # of a run before: none of these lines failed
        return answered, 0
    with opened(errors) as file:
        failed = _write_lines(file, (each for part in ([first], failures) for each in part))
    return answered, failed


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file to write, there once all of it is written; of a path, or of a URL that fsspec knows.

    Raises:
        OSError: as writing does; what was there before still is.
    """
    filesystem, place = fsspec.core.url_to_fs(path)
    if "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)):
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


def _write_lines(file: IO[bytes], records: Iterable[dict[str, Any]]) -> int:
    count = 0
    for record in records:
        file.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
        count += 1
    return count


def _write_parquet(file: IO[bytes], records: Iterable[dict[str, Any]]) -> int:
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
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "custom_id": record["custom_id"],
        "text": text,
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": body["usage"]["prompt_tokens"],
        "completion_tokens": body["usage"]["completion_tokens"],
        "response": json.dumps(body, ensure_ascii=False),
    }
