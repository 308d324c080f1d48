"""Quantized and GGUF models split over two processes: each makes its share of the weights, and all are the whole's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.loading import load_checkpoint
from tests.engine.harness import CPU
from tests.engine.split import RankProcess, split
from tests.engine.test_quantized import CASES, write_quantized
from tests.gguf_models import write_gguf
from training.random_models import llama_config, random_model
from turnout import gguf_files

pytestmark = pytest.mark.exactness


@pytest.fixture(scope="module")
def other() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


def check(folder: Path, other: RankProcess) -> None:
    """Loading compares a forward of both with the whole's, and the digest is of all weights."""
    whole = load_checkpoint(folder, torch.float32, CPU)
    with split(other, folder) as model:
        assert model.digest == whole.digest
    assert other.outcome() == {"error": None}


@pytest.mark.parametrize("name", ["int4, groups, zeros", "gptq, 4 bits, by activation, second format", "awq"])
def test_a_quantized_model_is_split(name: str, tmp_path: Path, other: RankProcess) -> None:
    write_quantized(tmp_path, CASES[name])
    check(tmp_path, other)


def test_a_gguf_model_is_split(tmp_path: Path, other: RankProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "_cache", lambda: tmp_path)
    path = write_gguf(tmp_path / "model.gguf", random_model(llama_config(), seed=1))
    check(gguf_files.described(path), other)
