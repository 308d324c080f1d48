"""The widened target: the same text at a higher price, and the artifacts that go with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding.artifacts import Artifact
from engine.loading import load_checkpoint
from experiments.speculation.target import restamped, widen, widened
from tests.experiments.speculation_models import checkpoint
from turnout.config import ModelConfig, model_path


def demo_large() -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(
        model_path(ModelConfig(path="demo:large")), dtype=torch.float32, local_files_only=True
    ).eval()


def engine_digest(folder: Path) -> str:
    return load_checkpoint(folder, torch.float32, torch.device("cpu")).digest


@torch.inference_mode()
def test_the_text_is_the_demo_models_and_the_cost_is_not() -> None:
    model, wide = demo_large(), demo_large()
    config = model.config
    widen(wide, 4 * config.intermediate_size)
    more = config.num_hidden_layers * 3 * config.hidden_size * 3 * config.intermediate_size
    assert wide.num_parameters() == model.num_parameters() + more
    ids = torch.arange(2, 162).reshape(4, 40)
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert wide.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    torch.testing.assert_close(wide(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-4)


def test_idle_units_are_computed_and_change_nothing() -> None:
    model = demo_large()
    before = model.config.intermediate_size
    widen(model, before + 100)
    for layer in model.model.layers:
        assert bool((layer.mlp.gate_proj.weight[before:] != 0).all())
        assert bool((layer.mlp.up_proj.weight[before:] != 0).all())
        assert int(layer.mlp.down_proj.weight[:, before:].count_nonzero()) == 0


@torch.inference_mode()
def test_a_layer_left_out_spoils_the_text_as_before() -> None:
    ids = torch.arange(2, 42)[None]
    logits = []
    for intermediate in (None, 4096):
        model = demo_large()
        if intermediate is not None:
            widen(model, intermediate)
        whole = model(ids, use_cache=False).logits
        del model.model.layers[3]
        logits.append(model(ids, use_cache=False).logits - whole)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-2, rtol=1e-3)
    assert float(logits[0].abs().max()) > 0.5


def test_it_is_written_once_and_a_retrained_model_gets_its_own(tmp_path: Path) -> None:
    source, other = checkpoint(tmp_path / "source"), checkpoint(tmp_path / "other", seed=1)
    made = widened(source, tmp_path / "cache", 64)
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert widened(source, tmp_path / "cache", 64) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert len({made, widened(other, tmp_path / "cache", 64), widened(source, tmp_path / "cache", 80)}) == 3
    assert engine_digest(made) != engine_digest(source)


def test_a_model_that_is_as_wide_already_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    with pytest.raises(ValueError, match="intermediate must be above 48, got 48"):
        widened(source, tmp_path / "cache", 48)


def test_artifacts_of_the_model_become_the_stand_ins_and_others_stay(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    target = widened(source, tmp_path / "cache", 64)
    before, after = (engine_digest(each) for each in (source, target))
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    roles = {"mine": {"large": before, "small": "another"}, "foreign": {"large": "another"}}
    for name, models in roles.items():
        Artifact("medusa", "tests", {"n": 1}, models, weights).save(tmp_path / "artifacts" / f"{name}.safetensors")
    folder = restamped(tmp_path / "artifacts", source, target, tmp_path / "restamped")
    found = {path.stem: Artifact.load(path) for path in folder.iterdir()}
    assert found["mine"].models == {"large": after, "small": "another"}
    assert found["foreign"].models == {"large": "another"}
    assert (found["mine"].kind, found["mine"].settings) == ("medusa", {"n": 1})
    assert torch.equal(found["mine"].tensors["w"], weights["w"])
