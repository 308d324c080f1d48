"""Outputs elsewhere: on a store that keeps what was sent once its file is closed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import Line
from deployments.batches.outputs import check_places, opened
from tests.batches.test_workplace import JOB, answer_all, answerer, write_both
from turnout.errors import Code, TurnoutError


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """As object stores' files: sent in parts, there after the last of them unless it is to be committed apart."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.kept[self.path] = b"".join(self.parts)

    def discard(self) -> None:
        self.parts.clear()


class Store(AbstractFileSystem):  # type: ignore[misc]
    protocol = "turnout-test"
    kept: ClassVar[dict[str, bytes]] = {}

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Upload:
        return Upload(self, path, mode, autocommit=autocommit)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    fsspec.register_implementation("turnout-test", Store, clobber=True)
    monkeypatch.setattr(Store, "kept", {"out": b"old"})
    return Store.kept


def test_an_output_elsewhere_that_breaks_off_leaves_the_old_one(store: dict[str, bytes]) -> None:
    def fails(file: IO[bytes]) -> None:
        file.write(b"half of it")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"), opened("turnout-test://out") as file:
        fails(file)
    assert store == {"out": b"old"}


def test_an_output_elsewhere_is_there_when_all_of_it_is_written(store: dict[str, bytes]) -> None:
    with opened("turnout-test://out") as file:
        file.write(b"new")
        assert store == {"out": b"old"}
    assert store == {"out": b"new"}


@pytest.mark.parametrize(
    ("source", "target", "errors", "field"),
    [
        ("{here}/a", "{here}/a", "{here}/e", "OUT"),
        ("{here}/a", "{here}/b", "{here}/b", "errors"),
        ("{here}/a", "{here}/b", "{here}/sub/../a", "errors"),
        ("{here}/a", "file://{here}/a", "{here}/e", "OUT"),
        ("{here}/link", "{here}/a", "{here}/e", "OUT"),
        ("memory://a", "memory://a", "memory://e", "OUT"),
    ],
)
def test_no_file_is_two_of_input_output_and_errors(
    tmp_path: Path, source: str, target: str, errors: str, field: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(TurnoutError, match="one would replace the other") as refused:
        check_places(*(path.format(here=tmp_path) for path in (source, target, errors)))
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, field)
    check_places(f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/c")


def test_a_record_is_one_line_to_every_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a\u2028b\u2029c\u0085d"
    monkeypatch.setattr("tests.deployments.fake_pool.TOOL_CALL", said)
    place = JobDirectory(tmp_path / "work")
    place.open(JOB, fresh=False)
    body = {"prompt": "tool", "max_tokens": len(said)}
    place.stage((Line(n, f"\u2028{n}", "/v1/completions", body) for n in range(1, 4)), 2, None)
    answer_all(answerer(tmp_path), place)
    write_both(place, str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl"))
    rows = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["custom_id"] for row in rows] == ["\u20281", "\u20282", "\u20283"]
    assert {row["response"]["body"]["choices"][0]["text"] for row in rows} == {said}
