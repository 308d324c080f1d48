"""What a store of files and batches forgets, and what it keeps."""

from __future__ import annotations

import time
from pathlib import Path

from deployments.batches.store import BatchStore
from turnout.batches_config import BatchesConfig


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
