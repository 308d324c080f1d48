"""What a job's input may be, and what is said of what it may not."""

from __future__ import annotations

import codecs
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.batches.inputs import Defaults, Fault, fingerprint, read_input
from deployments.batches.lines import Line
from deployments.batches.reading import numbered_lines
from turnout.errors import TurnoutError

MARK = "\ufeff"
PLAIN = Defaults()
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def rows(path: Path, text: str | bytes, defaults: Defaults = PLAIN) -> list[Any]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_input(str(path), defaults))


def test_each_kind_of_line_is_a_request(tmp_path: Path) -> None:
    openai = {"custom_id": "mine", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 5}}
    lines = [openai, {"prompt": "hi"}, "hi", {"custom_id": "c", **CHAT, "temperature": 0.0}, {"prompt": [1, 2]}]
    found = rows(tmp_path / "in.jsonl", "\n\n".join(map(json.dumps, lines)))
    assert found == [
        Line(1, "mine", "/v1/completions", {"prompt": "p", "max_tokens": 5}),
        Line(3, "row-3", "/v1/chat/completions", CHAT),
        Line(5, "row-5", "/v1/chat/completions", CHAT),
        Line(7, "c", "/v1/chat/completions", {**CHAT, "temperature": 0.0}),
        Line(9, "row-9", "/v1/completions", {"prompt": [1, 2]}),
    ]


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "strings.jsonl"])
def test_byte_order_marks_are_no_part_of_a_line(tmp_path: Path, name: str) -> None:
    text = {"in.jsonl": '{"prompt": "hi"}\n', "in.txt": "hi\n", "strings.jsonl": '"hi"\n'}[name]
    plain = rows(tmp_path / name, 2 * text)
    assert [each.body for each in plain] == [CHAT, CHAT]
    for marked in (MARK + 2 * text, 2 * (MARK + text), f"{MARK}{text}{MARK}{text}{MARK}"):
        assert rows(tmp_path / name, marked) == plain
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + text.encode())
    assert list(read_input(str(tmp_path / name), PLAIN, len(text.encode()))) == plain[:1]
    [fault] = read_input(str(tmp_path / name), PLAIN, len(text.encode()) - 1)
    assert isinstance(fault, Fault)


def test_byte_order_marks_are_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    for column in ([MARK + json.dumps({"prompt": "p"})], [(MARK + json.dumps({"prompt": "p"})).encode()]):
        pq.write_table(pa.table({"body": column}), path)
        assert list(read_input(str(path), PLAIN)) == [Line(1, "row-1", "/v1/completions", {"prompt": "p"})]
    pq.write_table(pa.table({"prompt": [MARK.encode() + b"hi"]}), path)
    assert list(read_input(str(path), PLAIN)) == [Line(1, "row-1", "/v1/chat/completions", CHAT)]


def test_text_is_a_prompt_a_line_and_raw_is_continued(tmp_path: Path) -> None:
    assert rows(tmp_path / "in.txt", "a {b\n\nc\n", Defaults(chat=False)) == [
        Line(1, "row-1", "/v1/completions", {"prompt": "a {b"}),
        Line(3, "row-3", "/v1/completions", {"prompt": "c"}),
    ]


def test_what_a_line_says_goes_before_what_the_command_says(tmp_path: Path) -> None:
    defaults = Defaults(body={"max_tokens": 7, "decoding": {"method": "plain"}})
    [one, two] = rows(tmp_path / "in.jsonl", '{"prompt": "a", "max_tokens": 1}\n"b"', defaults)
    assert (one.body["max_tokens"], two.body["max_tokens"]) == (1, 7)
    assert one.body["decoding"] == {"method": "plain"}
    [three] = rows(tmp_path / "in.jsonl", json.dumps({**CHAT, "max_completion_tokens": 2}), defaults)
    assert (three.body.get("max_tokens"), three.body["max_completion_tokens"]) == (None, 2)


def test_parquet_rows_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["hi", None], "custom_id": [7, 8], "other": [1, 2]}), path)
    first, second = read_input(str(path), Defaults())
    assert first == Line(1, "7", "/v1/chat/completions", CHAT)
    assert isinstance(second, Fault)
    pq.write_table(pa.table({"body": [json.dumps({"prompt": "p"}), "{broken"]}), path)
    first, second = read_input(str(path), Defaults())
    assert first == Line(1, "row-1", "/v1/completions", {"prompt": "p"})
    assert isinstance(second, Fault)


def test_parquet_columns_of_bytes_dates_and_structures(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"

    def found(**columns: Any) -> list[Any]:
        pq.write_table(pa.table(columns), path)
        return list(read_input(str(path), Defaults()))

    raw, broken = found(prompt=[b"hi", b"\xff"])
    assert raw == Line(1, "row-1", "/v1/chat/completions", CHAT)
    assert "is no valid UTF-8" in broken.error.message
    [dated] = found(prompt=[date(2024, 1, 1)])
    assert (dated.number, dated.error.field) == (1, "prompt")
    assert found(body=[{"prompt": "p", "stop": None}, {"prompt": None, "stop": "x", "messages": CHAT["messages"]}]) == [
        Line(1, "row-1", "/v1/completions", {"prompt": "p"}),
        Line(2, "row-2", "/v1/chat/completions", {"stop": "x", **CHAT}),
    ]
    assert found(body=[b'{"prompt": "p"}'], custom_id=[b"mine"]) == [
        Line(1, "mine", "/v1/completions", {"prompt": "p"})
    ]
    [listed] = found(messages=[[{"role": "user", "content": "hi"}]])
    assert listed == Line(1, "row-1", "/v1/chat/completions", CHAT)
    # Parquet gives each turn the fields of any.
    tool = {"role": "tool", "content": "yes", "tool_call_id": "c1"}
    called, plain = found(messages=[[*CHAT["messages"], tool], CHAT["messages"]])
    assert called.body["messages"] == [*CHAT["messages"], tool]
    assert plain == Line(2, "row-2", "/v1/chat/completions", CHAT)


def test_other_places_are_read_through_fsspec() -> None:
    import fsspec

    with fsspec.open("memory://in.jsonl", "w") as file:
        file.write('"hi"\n')
    assert list(read_input("memory://in.jsonl", Defaults())) == [Line(1, "row-1", "/v1/chat/completions", CHAT)]
    assert fingerprint("memory://in.jsonl")["size"] == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "must be an object with body, messages or prompt"),
        ('{"custom_id": 5, "prompt": "a"}', "custom_id"),
        ('{"custom_id": "a", "body": 5, "url": "/v1/completions"}', "body"),
        ('{"custom_id": "a", "body": {}, "url": "/v1/images"}', "url"),
        (b"\xff", "UTF-8"),
        ('"\\ud800"', "surrogate"),
    ],
)
def test_a_line_that_is_no_request_is_named_and_the_next_is_read(
    tmp_path: Path, line: str | bytes, message: str
) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    bad, good = rows(tmp_path / "in.jsonl", data + b'\n"hi"\n')
    assert isinstance(bad, Fault)
    assert bad.number == 1
    assert message in bad.error.message
    assert good.number == 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.parquet", b"PAR1 no parquet", "no readable Parquet"),
        ("in.jsonl", None, "there is no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TurnoutError, match=message) as refused:
        list(read_input(str(path), Defaults()))
    assert str(path) in refused.value.message


def test_a_folder_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(TurnoutError, match="is a folder"):
        fingerprint(str(tmp_path))


def test_parquet_without_a_prompt_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "in.parquet")
    with pytest.raises(TurnoutError, match="must have a column prompt, messages or body"):
        list(read_input(str(tmp_path / "in.parquet"), Defaults()))


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_line_larger_than_any_request_is_none_and_is_not_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sizes = []

    def noted(file: Any, most: int) -> Any:
        for number, data in numbered_lines(file, most):
            sizes.append(len(data))
            yield number, data

    monkeypatch.setattr("deployments.batches.inputs.numbered_lines", noted)
    (tmp_path / name).write_bytes(b'"a"\n"' + b"x" * 5000 + b'"\n\n"b"\n')
    first, long, last = read_input(str(tmp_path / name), PLAIN, 1000)
    assert isinstance(first, Line)
    assert isinstance(last, Line)
    assert isinstance(long, Fault)
    assert (long.number, last.number) == (2, 4)
    assert "more than 1000 bytes" in long.error.message
    assert sizes == [4, 1001, 4]


def test_a_row_larger_than_any_request_is_none(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "x" * 5000]}), path)
    first, long = read_input(str(path), Defaults(), 1000)
    assert isinstance(first, Line)
    assert isinstance(long, Fault)
    assert "more than 1000 bytes" in long.error.message
