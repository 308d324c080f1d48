"""Checkpoints that transformers cannot load, or would load wrongly, are refused in one line at start."""

from __future__ import annotations

import json
from contextvars import copy_context
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from engine.checkpoints import _without_report, read_config
from engine.loaded_model import check_supported
from engine.loading import load_checkpoint
from pool.local_pool import LocalPool
from tests.checkpoint_folders import write_checkpoint
from tests.engine.harness import CPU, pair_config
from turnout.errors import Code, TurnoutError

FIELD = "models.large.path"
NORM = "model.norm.weight"


@pytest.fixture
def folder(pair_folder: Path, tmp_path: Path) -> Path:
    """The pair's checkpoints, to be changed."""
    return copytree(pair_folder, tmp_path / "pair")


def refusal(folder: Path) -> str:
    """The line that refuses the pair, for its large model."""
    with pytest.raises(TurnoutError) as caught:
        LocalPool.load("pair", pair_config(folder))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, FIELD)
    assert "\n" not in caught.value.message
    return caught.value.message.removeprefix(f"{FIELD}: {folder / 'large'}")


def rewrite(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_quantized_weights_are_refused_by_name_at_start(folder: Path) -> None:
    rewrite(folder / "large", quantization_config={"quant_method": "hqq", "bits": 4})
    read = "gptq, awq, compressed-tensors, fp8, or unquantized weights in float32, bfloat16 or float16"
    says = f"quantization_config: hqq is not supported; supported: {read}"
    assert refusal(folder) == f": {says}"
    with pytest.raises(TurnoutError, match="quantization_config: hqq is not supported"):
        load_checkpoint(folder / "large", torch.float32, CPU)
    with pytest.raises(TurnoutError, match="quantization_config: hqq is not supported"):
        check_supported(AutoConfig.from_pretrained(folder / "large"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({NORM: None}, f": its weight files lack {NORM}"),
        ({NORM: torch.zeros(7)}, f": weights of shapes that config.json does not give: {NORM} [7] (not [64])"),
    ],
)
def test_weights_that_would_be_random_are_refused(folder: Path, change: dict[str, Any], says: str) -> None:
    file = folder / "large" / "model.safetensors"
    weights = load_file(file) | change
    save_file({name: each for name, each in weights.items() if each is not None}, file, {"format": "pt"})
    assert refusal(folder) == says


async def test_weights_that_are_not_used_are_noted(folder: Path) -> None:
    file = folder / "large" / "model.safetensors"
    extra = {f"model.layers.{index}.lora_A.weight": torch.zeros(2) for index in range(4)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    pool = LocalPool.load("pair", pair_config(folder))
    await pool.close()
    names = ", ".join(sorted(extra)[:3])
    assert f"{folder / 'large'}: unknown to this architecture and not used: {names} and 1 more" in pool.notes


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": None}, "architecture None is not supported: transformers has no causal "),
        ({"model_type": "nobodys"}, "architecture 'nobodys' is not supported: transformers has no causal "),
        ({"model_type": ["llama"]}, "architecture ['llama'] is not supported: transformers has no causal "),
        (
            {"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "modeling_theirs.Theirs"}},
            "auto_map: code of a checkpoint (modeling_theirs.Theirs) is never run; supported: cohere2, ",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_theirs.TheirLlama"}},
            "auto_map: code of a checkpoint (modeling_theirs.TheirLlama) is never run; supported: "
            "LlamaForCausalLM for 'llama'",
        ),
        ({"hidden_size": "wide"}, "cannot be read: StrictDataclassFieldValidationError: "),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    write_checkpoint(tmp_path, **fields)
    with pytest.raises(TurnoutError) as caught:
        read_config(tmp_path, FIELD)
    assert caught.value.field == FIELD
    assert caught.value.message.startswith(f"{FIELD}: ")
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_code_of_a_checkpoint_that_transformers_has_itself_is_not_needed(tmp_path: Path) -> None:
    """As in Phi-3's: the classes are transformers' own."""
    write_checkpoint(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    assert read_config(tmp_path, FIELD).model_type == "llama"


def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "large" / "tokenizer.json").write_text("{}")
    assert refusal(folder).startswith(" cannot be read: ")


def test_a_pickled_weight_file_that_is_cut_off_is_refused(folder: Path) -> None:
    large = folder / "large"
    weights = load_file(large / "model.safetensors")
    (large / "model.safetensors").unlink()
    torch.save(weights, large / "pytorch_model.bin")
    (large / "pytorch_model.bin").write_bytes((large / "pytorch_model.bin").read_bytes()[:-2000])
    with pytest.raises(TurnoutError) as caught:
        load_checkpoint(large, torch.float32, CPU, field=FIELD)
    assert caught.value.message.startswith(f"{FIELD}: {large} cannot be read: ")
    assert "\n" not in caught.value.message
    assert "pytorch_model.bin is not a whole weight file of torch 1.6 or later" in refusal(folder)


def test_loads_that_overlap_keep_back_their_own_report_and_leave_the_verbosity(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = transformers_logging.get_logger("transformers.modeling_utils")
    written: list[str] = []
    monkeypatch.setattr(logger, "callHandlers", lambda record: written.append(record.getMessage()))
    before = transformers_logging.get_verbosity()
    first, second = (copy_context() for _ in range(2))
    loads = [_without_report() for _ in range(2)]
    first.run(loads[0].__enter__)
    second.run(loads[1].__enter__)
    logger.warning("of another thread")
    first.run(logger.warning, "report of the first")
    first.run(loads[0].__exit__, None, None, None)
    first.run(logger.warning, "after the first")
    second.run(logger.warning, "report of the second")
    second.run(logger.error, "a fault")
    second.run(loads[1].__exit__, None, None, None)
    second.run(logger.warning, "after the second")
    assert transformers_logging.get_verbosity() == before
    assert written == ["of another thread", "after the first", "a fault", "after the second"]


async def test_the_table_of_what_did_not_fit_is_not_logged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "large" / "model.safetensors"
    save_file(load_file(file) | {"extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    logger, written = transformers_logging.get_logger("transformers.modeling_utils"), list[str]()
    monkeypatch.setattr(logger, "callHandlers", lambda record: written.append(record.getMessage()))
    pool = LocalPool.load("pair", pair_config(folder))
    await pool.close()
    assert written == []
    logger.warning("of something else")
    assert written == ["of something else"]
