"""The draft of a target is found by the target's identity, and by nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pool.components import open_parts
from tests.training.draft_target import save_tiny
from turnout.config import ModelConfig, TurnoutConfig, load_config, parse_config, with_drafts
from turnout.drafts import ABOUT, draft_place, layer_share, register, target_identity
from turnout.errors import TurnoutError
from turnout.model_files import Found


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("turnout.drafts.drafts_folder", lambda: tmp_path / "drafts")
    return save_tiny(tmp_path / "target")


def make_draft(target: Path, folder: Path, identity: str | None = None) -> Path:
    """A copy of the target that says that it is its draft."""
    shutil.copytree(target, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 1}), encoding="utf-8")
    about = {"target": {"identity": identity or target_identity(target)}}
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return folder


def config_of(target: Path, **pool: Any) -> TurnoutConfig:
    values = {
        "models": {"big": {"path": str(target), "dtype": "float32", "max_length": 128}},
        "pools": {"p": {"large": "big", "draft": "auto", "default": {"name": "speculative"}, **pool}},
    }
    file = target.parent / "config.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_config(file)


def test_an_identity_is_that_of_settings_and_weights(target: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copytree(target, same)
    identity = target_identity(target)
    settings = json.loads((same / "config.json").read_text(encoding="utf-8"))
    (same / "config.json").write_text(json.dumps({**settings, "transformers_version": "1"}), encoding="utf-8")
    assert target_identity(same) == identity
    assert target_identity(target / "model.safetensors") != identity
    (same / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.1}), encoding="utf-8")
    assert target_identity(same) != identity
    other = save_tiny(tmp_path / "other", weak=0.5)
    assert target_identity(other) != identity
    (other / "model.safetensors").unlink()
    with pytest.raises(TurnoutError, match=r"models\.x: .* has no weights"):
        target_identity(other, "models.x")


def test_a_draft_is_found_and_becomes_the_small_model(target: Path) -> None:
    place = make_draft(target, draft_place(target_identity(target)))
    config = config_of(target)
    pool = config.pools["p"]
    assert (pool.small, pool.large, pool.draft) == ("big-draft", "big", None)
    expected = ModelConfig(path=str(place), dtype="float32", max_length=128, kv_memory_bytes=64 << 20)
    assert config.models["big-draft"] == expected
    assert open_parts("p", config).notes == []
    assert config == parse_config(config.model_dump(exclude_unset=True))  # as it is sent to other processes


def test_a_draft_that_the_file_configures_stays_as_it_is(target: Path) -> None:
    place = make_draft(target, draft_place(target_identity(target)))
    mine = {"path": str(place), "dtype": "float32", "kv_memory_bytes": 8 << 20}
    pools = {"p": {"large": "big", "draft": "auto", "default": {"name": "speculative"}}}
    config = with_drafts(parse_config({"models": {"big": {"path": str(target)}, "big-draft": mine}, "pools": pools}))
    assert config.pools["p"].small == "big-draft"
    assert config.models["big-draft"] == ModelConfig.model_validate(mine)


def test_nothing_is_asked_of_a_hub_to_find_a_draft(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_draft(target, draft_place(target_identity(target)))
    monkeypatch.setattr("turnout.config.find_model", lambda *_: Found(target))
    monkeypatch.setattr("turnout.config.fetch_model", lambda *_: pytest.fail("fetched"))
    pools = {"p": {"large": "big", "draft": "auto", "default": {"name": "speculative"}}}
    config = with_drafts(parse_config({"models": {"big": {"path": "hf:tiny/target"}}, "pools": pools}))
    assert config.models["big-draft"].kv_memory_bytes == 64 << 20


def test_layers_are_those_of_the_text_side_of_a_wrapper(target: Path, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.mkdir()
    (wrapper / "config.json").write_text('{"text_config": {"num_hidden_layers": 16}}', encoding="utf-8")
    assert layer_share(target, wrapper) == 4 / 16


def test_a_draft_elsewhere_is_found_through_its_link(target: Path, tmp_path: Path) -> None:
    identity = target_identity(target)
    for name in ("one", "two"):  # the latest holds
        folder = make_draft(target, tmp_path / name)
        assert register(folder, identity) == ""
        assert config_of(target).models["big-draft"].path == str(folder)
    draft_place(identity).unlink()
    place = make_draft(target, draft_place(identity))
    assert register(place, identity) == ""
    assert "remove that folder" in register(tmp_path / "one", identity)
    assert config_of(target).models["big-draft"].path == str(place)


def test_without_a_draft_the_large_model_runs_alone_and_says_so(target: Path) -> None:
    config = config_of(target)
    assert config.pools["p"].members == ["big"]
    [note] = open_parts("p", config).notes
    assert "none was trained for models.big" in note
    assert f"turnout train draft --model {target}" in note


def test_a_draft_of_another_target_is_not_used(target: Path) -> None:
    place = make_draft(target, draft_place(target_identity(target)), "0" * 32)
    config = config_of(target)
    assert config.pools["p"].members == ["big"]
    assert f"was trained for another model, {'0' * 32}" in open_parts("p", config).notes[0]
    (place / ABOUT).write_text("{", encoding="utf-8")
    assert "does not say for which model" in open_parts("p", config_of(target)).notes[0]
    (place / "model.safetensors").unlink()
    assert "none was trained" in open_parts("p", config_of(target)).notes[0]


def test_a_pool_has_a_draft_or_a_small_model(target: Path) -> None:
    with pytest.raises(TurnoutError, match=r"pools\.p\.draft: is the small model, and small is 'big'"):
        config_of(target, small="big")
    with pytest.raises(TurnoutError, match=r"pools\.p\.draft"):
        config_of(target, draft="always")
