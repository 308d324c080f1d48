from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine.fingerprint import content_digests, numerics_class, speech_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "model-00001.safetensors", "model-00002.safetensors", "tokenizer.json", "README.md"):
        (made / name).write_bytes(name.encode() * 1000)
    return made


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "renamed")
    assert content_digests(copy, copy) == content_digests(folder, folder)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("config.json", "weights"),
        ("model-00001.safetensors", "weights"),
        ("model-00002.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
        ("README.md", None),
    ],
)
def test_one_changed_byte_under_the_same_name_is_another_model(folder: Path, name: str, changed: str | None) -> None:
    before = content_digests(folder, folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    after = content_digests(folder, folder)
    assert {each for each in before if before[each] != after[each]} == ({changed} if changed else set())


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_what_answers_depend_on_and_keys_and_values_do_not_has_a_digest_of_its_own(folder: Path, name: str) -> None:
    before, cached = speech_digest(folder), content_digests(folder, folder)
    (folder / name).write_text("{}")
    first = speech_digest(folder)
    (folder / name).write_text("{ }")
    assert len({before, first, speech_digest(folder)}) == 3
    assert content_digests(folder, folder) == cached


def test_files_that_changed_places_are_another_model(folder: Path) -> None:
    before = content_digests(folder, folder)
    first, second = folder / "model-00001.safetensors", folder / "model-00002.safetensors"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert content_digests(folder, folder)["weights"] != before["weights"]


def test_numbers_computed_otherwise_are_of_another_class() -> None:
    cpu = torch.device("cpu")
    assert numerics_class("native", cpu) == numerics_class("native", cpu) != numerics_class("torch", cpu)
