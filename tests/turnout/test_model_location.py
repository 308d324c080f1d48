"""What a model's path may say, and which files of a place are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import turnout
from turnout.errors import TurnoutError
from turnout.model_files import description, lacking, shown_bytes, weights_entry
from turnout.model_location import HubRepository, LocalFiles, Location, StoredFiles, parse_location


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("/models/a", LocalFiles(Path("/models/a"))),
        ("models/a.gguf", LocalFiles(Path("models/a.gguf"))),
        ("~/a", LocalFiles(Path.home() / "a")),
        ("file:///models/a", LocalFiles(Path("/models/a"))),
        ("demo:small", LocalFiles(Path(turnout.__file__).parent / "demo" / "small")),
        ("hf:org/name", HubRepository("org/name")),
        ("hf://org/name", HubRepository("org/name")),
        ("hf:org/na.me-1@refs/pr/3", HubRepository("org/na.me-1", "refs/pr/3")),
        ("hf:org/name/sub/q4.gguf@v1", HubRepository("org/name", "v1", "sub/q4.gguf")),
        ("s3://bucket/a/", StoredFiles("s3://bucket/a")),
        ("zip://a::file:///b.zip", StoredFiles("zip://a::file:///b.zip")),
    ],
)
def test_each_form_of_a_path(text: str, meant: Location) -> None:
    assert parse_location(text) == meant
    if isinstance(meant, HubRepository):
        assert parse_location(str(meant)) == meant


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:name",
        "hf:org/name@",
        "hf:org/name/x.bin",
        "hf:../name",
        "hf:a--b/c",
        "hf:a/b.git",
        "hf:a/b/../c.gguf",
        "hf:a/b//c.gguf",
    ],
)
def test_no_repository(text: str) -> None:
    with pytest.raises(
        TurnoutError, match=r"^models\.m\.path: .* names no repository of a hub; allowed: a folder, "
    ) as caught:
        parse_location(text, "models.m.path")
    assert caught.value.field == "models.m.path"


def test_a_commit_is_pinned_and_a_branch_is_not() -> None:
    assert HubRepository("org/name", "a" * 40).is_pinned
    assert not HubRepository("org/name", "main").is_pinned
    assert not HubRepository("org/name").is_pinned


def test_what_describes_a_checkpoint() -> None:
    needed = ["additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json", "merges.txt", "vocab.json"]
    others = [
        "a.py",
        "config.json.bak",
        "original/config.json",
        "additional_chat_templates/../../x.jinja",
        "tf_model.h5",
    ]
    assert description([*others, *needed]) == sorted(needed)


@pytest.mark.parametrize(
    ("names", "entry"),
    [
        (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin", "model.safetensors.index.json"], "model.safetensors.index.json"),
        (["pytorch_model.bin.index.json", "consolidated.safetensors"], "pytorch_model.bin.index.json"),
        (["model.fp16.safetensors"], None),
    ],
)
def test_safetensors_come_first(names: list[str], entry: str | None) -> None:
    assert weights_entry(names) == entry


def test_shards_that_an_index_lists_are_lacking(tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    (tmp_path / index).write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (tmp_path / "one.safetensors").write_bytes(b"one")
    sizes = {index: (tmp_path / index).stat().st_size, "one.safetensors": 3, "two.safetensors": 3}
    assert lacking(tmp_path, sizes) == ["two.safetensors"]
    assert lacking(tmp_path, sizes | {"one.safetensors": 4}) == ["one.safetensors", "two.safetensors"]
    assert lacking(tmp_path, sizes, weights=False) == []


@pytest.mark.parametrize(
    ("count", "shown"), [(999, "999 B"), (1_500, "1.5 kB"), (4.2e9, "4.2 GB"), (1e21, "1000.0 EB")]
)
def test_sizes_for_people(count: float, shown: str) -> None:
    assert shown_bytes(count) == shown
