"""Reading what a job is given: OpenAI batch lines, plain prompts or Parquet, from any place fsspec knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec

from deployments.batches.disk import located, named
from deployments.batches.lines import Line, checked_id, read_line
from deployments.batches.reading import numbered_lines
from deployments.schemas import read_json
from deployments.surfaces import CHAT, COMPLETIONS, READING, RESPONSES
from turnout.errors import TurnoutError, invalid

# Options of the command line by the names that other bodies have for them.
NAMES: dict[str, dict[str, str]] = {RESPONSES: {"max_tokens": "max_output_tokens"}}
SAME = {"max_tokens": "max_completion_tokens"}  # names of which a line may have either
PARQUET_ROWS = 1024  # read at once
COLUMNS = "custom_id", "url", "body", "messages", "prompt"
LONGEST = 64 << 20  # bytes of a line, where nothing tells what may be asked


@dataclass(frozen=True, slots=True)
class Defaults:
    """What is asked for where a line does not say.

    Attributes:
        chat: whether a plain prompt is a message, or a text to be continued.
        body: fields of the request, `decoding` among them.
    """

    chat: bool = True
    body: dict[str, Any] = field(default_factory=dict)

    def line(self, number: int, custom_id: str | None, request: dict[str, Any]) -> Line:
        """The line of a request, with what it leaves open."""
        endpoint = CHAT if "messages" in request else COMPLETIONS
        return self.filled(Line(number, custom_id or f"row-{number}", endpoint, request))

    def filled(self, line: Line) -> Line:
        """The same line with what it leaves open."""
        names = NAMES.get(line.endpoint, {})
        asked = {n: v for n, v in self.body.items() if n == "model" or line.endpoint not in READING}
        given = {names.get(n, n): v for n, v in asked.items() if line.body.get(SAME.get(n, n)) is None}
        return Line(line.number, line.custom_id, line.endpoint, {**given, **line.body})

    def prompt(self, text: Any) -> dict[str, Any]:
        """The request for a plain prompt: text, or token ids."""
        if self.chat and isinstance(text, str):
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is no request, and what is wrong with it."""

    number: int
    error: TurnoutError


def fingerprint(path: str) -> dict[str, Any]:
    """What tells whether an input is still the same: its place, size and time or version.

    Raises:
        TurnoutError: it cannot be read.
    """
    with named(path):
        filesystem, place = located("IN", path)
        info = filesystem.info(place)
        if info.get("type") == "directory":
            raise invalid("IN", f"{path} is a folder; give a file")
        seen = {key: str(info[key]) for key in ("ETag", "etag", "mtime", "created", "LastModified") if key in info}
        return {"path": path, "size": info["size"], **seen}


def read_input(path: str, defaults: Defaults, most: int = LONGEST) -> Iterator[Line | Fault]:
    """Every line or row, in order; empty lines are left out, and numbered.

    What a line is, it says itself: an object with `body` is OpenAI's, one with `prompt` or `messages` a request, a
    string a prompt. In a file whose name ends in .txt each line is a prompt; in .parquet a row has one of the columns
    body (JSON), messages or prompt, and may have custom_id, and url with body. One of more than `most` bytes is no
    request.

    Raises:
        TurnoutError: the file cannot be read.
    """
    suffix = PurePosixPath(path).suffix
    with named(path), fsspec.open(path, "rb") as file:
        if suffix == ".parquet":
            yield from _rows(path, file, defaults, most)
            return
        for number, data in numbered_lines(file, most):
            yield _attempt(number, data, defaults, most, plain=suffix == ".txt")


def _attempt(number: int, data: bytes, defaults: Defaults, most: int, plain: bool) -> Line | Fault:
    try:
        if len(data) > most:
            raise invalid("line", f"has more than {most} bytes, the largest request (server.max_body_bytes)")
        return _line(number, data, defaults, plain)
    except TurnoutError as error:
        return Fault(number, error)


def _line(number: int, data: bytes, defaults: Defaults, plain: bool) -> Line:
    if plain:
        try:
            text = data.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise invalid("line", f"is no valid UTF-8 (byte {error.start})") from None
        return defaults.line(number, None, defaults.prompt(text))
    string = data.lstrip()[:1] == b'"'
    values = read_json(b'{"prompt":' + data.strip() + b"}" if string else data)
    if "body" in values:
        return defaults.filled(read_line(number, data))
    return _request(number, values, defaults)


def _request(number: int, values: dict[str, Any], defaults: Defaults) -> Line:
    """A line whose object is the request itself."""
    custom_id = values.pop("custom_id", None)
    if custom_id is not None:
        checked_id(custom_id)
    if "messages" in values:
        return defaults.line(number, custom_id, values)
    if "prompt" in values:
        request = defaults.prompt(values.pop("prompt"))
        return defaults.line(number, custom_id, {**values, **request})
    raise invalid("line", "must be an object with body, messages or prompt, or a string")


def _rows(path: str, file: IO[bytes], defaults: Defaults, most: int) -> Iterator[Line | Fault]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        columns = [name for name in COLUMNS if name in table.schema_arrow.names]
        if not set(columns) - {"custom_id", "url"}:
            raise invalid("IN", f"{path} must have a column prompt, messages or body")
        number = 0
        for batch in table.iter_batches(PARQUET_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _row(number, row, defaults, most)
    except pa.ArrowException as error:
        raise invalid("IN", f"{path} is no readable Parquet file: {str(error).splitlines()[0]}") from None


def _row(number: int, row: dict[str, Any], defaults: Defaults, most: int) -> Line | Fault:
    values = {name: value for name, value in row.items() if value is not None}
    try:
        custom_id = _plain(values.pop("custom_id", f"row-{number}"), "custom_id")
        url = _plain(values.pop("url", None), "url")
        body = _plain(values.pop("body", None), "body")
        if body is None:
            rest = {name: _without_nulls(_plain(value, name)) for name, value in values.items()}
            data = json.dumps({"custom_id": str(custom_id), **rest})
        else:
            text = body.removeprefix("\ufeff") if isinstance(body, str) else json.dumps(_without_nulls(body))
            head = json.dumps({"custom_id": str(custom_id), "url": url or _endpoint(text)})
            data = f'{head[:-1]}, "body": {text}}}'
    except TurnoutError as error:
        return Fault(number, error)
    return _attempt(number, data.encode(), defaults, most, plain=False)


def _plain(value: Any, field: str) -> Any:
    """A column's value as JSON has it: bytes are text, and of other kinds there are none.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the column.
    """
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise invalid(field, f"is no valid UTF-8 (byte {error.start})") from None
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise invalid(field, f"must be text, numbers or structures of them (got {type(value).__name__})") from None
    return value


def _without_nulls(value: Any) -> Any:
    """A structure without what a row leaves out: Parquet gives all rows the fields of any."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _endpoint(body: str) -> str:
    return CHAT if '"messages"' in body else COMPLETIONS
