"""What a store of files and batches forgets, and what it keeps."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from deployments.batches.records import BatchRecord
from deployments.batches.store import BatchStore
from turnout.batches_config import BatchesConfig
from turnout.errors import Code, TurnoutError


def test_a_folder_that_cannot_be_made_is_refused_by_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "batches")
    with pytest.raises(TurnoutError, match=f"^batches.folder: cannot write {folder}: Not a directory$"):
        BatchStore(BatchesConfig(folder=folder))


def test_what_an_upload_that_was_killed_left_is_forgotten(tmp_path: Path) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path)))
    kept = store.add_file("acme", "a", "batch", [b"x"])
    folder = store.content("acme", kept.id).parent
    for name in (".file-1.data.7.part", "file-2.data"):
        (folder / name).touch()
    store.sweep(time.time())
    assert len(list(folder.iterdir())) == 4
    store.sweep(time.time() + 90_000)
    assert {path.name for path in folder.iterdir()} == {f"{kept.id}.json", f"{kept.id}.data"}


def test_an_upload_that_ends_while_the_store_is_swept_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path)))
    folder = store.content("acme", store.add_file("acme", "a", "batch", [b"x"]).id).parent
    half = folder / ".file-1.data.7.part"
    half.touch()
    listed = Path.glob

    def then_renamed(self: Path, pattern: str) -> list[Path]:
        found = list(listed(self, pattern))
        if pattern == "*":
            half.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", then_renamed)
    store.sweep(time.time() + 90_000)
    assert not half.exists()


def test_one_folder_that_cannot_be_read_keeps_no_other_from_being_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path)))
    old = [store.add_file(owner, "a", "batch", [b"x"]) for owner in ("a", "b", "c")]
    (tmp_path / "lost+found").mkdir()
    glob, read = Path.glob, Path.read_bytes

    def not_ours(path: Path, pattern: str) -> list[Path]:
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied")
        return list(glob(path, pattern))

    def broken(path: Path) -> bytes:
        if path.stem == old[1].id:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", not_ours)
        patch.setattr(Path, "read_bytes", broken)
        store.sweep(time.time() + 10 * 365 * 86_400)
    assert [store.files(owner) for owner in ("a", "b", "c")] == [[], [old[1]], []]


def batch(store: BatchStore, file_id: str, created_at: int = 0) -> BatchRecord:
    record = BatchRecord(
        id=f"batch_{created_at:024x}", tenant="a", key_id="k", entry="", seed=0, endpoint="/v1/completions",
        input_file_id=file_id, completion_window="24h", created_at=created_at, expires_at=1 << 40,
    )  # fmt: skip
    store.add_batch(record)
    return record


def test_what_a_batch_of_another_version_reads_is_kept(tmp_path: Path) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path), retention_s=1.0))
    file = store.add_file("a", "in", "batch", [b"x"])
    record = batch(store, file.id)
    path = store.work_folder(record).with_suffix(".json")
    path.write_text(path.read_text().replace('"seed"', '"seed_of_next_version"'))
    assert store.unfinished() == []
    store.sweep(time.time() + 10.0)
    assert store.files("a") == [file]
    path.unlink()
    store.sweep(time.time() + 10.0)
    assert store.files("a") == []


def test_a_record_that_cannot_be_read_just_now_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(BatchesConfig(folder=str(tmp_path)))
    record = batch(store, store.add_file("a", "in", "batch", [b"x"]).id)
    other = batch(store, record.input_file_id, created_at=1)
    read = Path.read_bytes

    def busy(path: Path) -> bytes:
        if path.stem == record.id:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", busy)
    with pytest.raises(TurnoutError, match="Too many open files") as refused:
        store.batch("a", record.id)
    assert refused.value.code is Code.UNAVAILABLE
    assert [each.id for each in store.unfinished()] == [other.id]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", lambda *_: busy(store.work_folder(record)))
        with pytest.raises(TurnoutError, match="Too many open files"):
            store.unfinished()
    monkeypatch.setattr(Path, "read_bytes", read)
    assert [each.id for each in store.unfinished()] == [record.id, other.id]
    with pytest.raises(TurnoutError, match="there is no"):
        store.batch("a", "batch_" + "f" * 24)
