"""Artifacts: what is stored comes back, and nothing is used for another kind or another model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from decoding.artifacts import Artifact, ArtifactFiles, Artifacts, weights_digest
from decoding.fakes import TableModel, pair
from turnout.errors import Code, TurnoutError


def model(name: str, digest: str | None = None) -> TableModel:
    made = TableModel(name, lambda _: torch.zeros(4), 4)
    made.digest = digest or made.digest
    return made


MODELS = pair(model("small", "aaa"), model("large", "bbb"))


def artifact(**changes) -> Artifact:
    fields = {
        "kind": "disco",
        "trainer": "training.length_predictors",
        "settings": {"head": {"top": 2}, "threshold": 0.25},
        "models": {"small": "aaa", "large": "bbb"},
        "tensors": {"w": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(3)},
    }
    return Artifact(**{**fields, **changes})


def refusal(call) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        call()
    return caught.value


def test_what_is_saved_is_what_is_opened(tmp_path: Path):
    artifact().save(tmp_path / "mine.safetensors")
    found = Artifacts(tmp_path).open("mine", "disco", MODELS, "here")
    assert (found.kind, found.trainer, found.settings, found.models) == (
        "disco",
        "training.length_predictors",
        {"head": {"top": 2}, "threshold": 0.25},
        {"small": "aaa", "large": "bbb"},
    )
    assert torch.equal(found.tensors["w"], artifact().tensors["w"])
    assert found.tensors["n"].item() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def test_the_same_artifact_is_the_same_file(tmp_path: Path):
    for name in ("one", "two"):
        artifact().save(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_another_model_or_kind_is_refused_with_both_sides_named(tmp_path: Path):
    artifact().save(tmp_path / "mine.safetensors")
    there = Artifacts(tmp_path)
    error = refusal(lambda: there.open("mine", "specdecpp", MODELS, "here"))
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "here")
    assert "'disco'" in error.message
    assert "'specdecpp'" in error.message
    for small, large, role, digest in (("ccc", "bbb", "small", "ccc"), ("aaa", "ddd", "large", "ddd")):
        others = pair(model("small", small), model("large", large))
        error = refusal(lambda others=others: there.open("mine", "disco", others, "here"))
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "here")
        assert f"{role} model" in error.message
        assert digest in error.message
        assert {"small": "aaa", "large": "bbb"}[role] in error.message


def test_what_is_missing_or_no_artifact_is_refused_without_a_path(tmp_path: Path):
    artifact().save(tmp_path / "mine.safetensors")
    save_file({"w": torch.zeros(1)}, tmp_path / "plain.safetensors")
    about = {"turnout_artifact": json.dumps({"format": 2, "kind": "disco"})}
    save_file({"w": torch.zeros(1)}, tmp_path / "newer.safetensors", about)
    (tmp_path / "broken.safetensors").write_bytes(b"not at all")
    there = Artifacts(tmp_path)
    error = refusal(lambda: there.open("other", "disco", MODELS, "here"))
    assert error.code is Code.NOT_FOUND
    assert "mine" in error.message
    for name, said in (("plain", "format None"), ("newer", "format 2"), ("broken", "safetensors")):
        error = refusal(lambda name=name: there.open(name, "disco", MODELS, "here"))
        assert error.code is Code.INVALID_ARGUMENT
        assert said in error.message
        assert str(tmp_path) not in error.message
    assert refusal(lambda: Artifacts().open("mine", "disco", MODELS, "here")).code is Code.NOT_FOUND


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path):
    path, there = tmp_path / "mine.safetensors", Artifacts(tmp_path)
    artifact().save(path)
    first = there.open("mine", "disco", MODELS, "here")
    assert there.open("mine", "disco", MODELS, "here") is first
    artifact(settings={"threshold": 0.123456}).save(path)
    assert there.open("mine", "disco", MODELS, "here").settings == {"threshold": 0.123456}


def test_a_digest_names_the_weights_and_not_how_they_were_loaded():
    weights = {"a": torch.randn(300, 40, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(3)}
    config = {"hidden_size": 40, "dtype": "float32", "_name_or_path": "here", "transformers_version": "5"}
    digest = weights_digest(config, weights)
    elsewhere = {"hidden_size": 40, "dtype": "bfloat16", "_name_or_path": "there", "architectures": ["X"]}
    halved = {name: each.bfloat16() for name, each in reversed(weights.items())}
    assert weights_digest(elsewhere, halved) == digest
    assert len(digest) == 32


@pytest.mark.parametrize("change", ["config", "name", "shape", "values", "last"])
def test_a_digest_tells_models_apart(change):
    weights = {"a": torch.ones(100, 100), "b": torch.zeros(3)}
    config = {"layers": 2}
    digest = weights_digest(config, weights)
    changed = {name: each.clone() for name, each in weights.items()}
    if change == "config":
        config = {"layers": 3}
    elif change == "name":
        changed["c"] = changed.pop("b")
    elif change == "shape":
        changed["a"] = changed["a"].reshape(50, 200)
    elif change == "values":
        changed["a"] *= 1.01
    else:
        changed["b"][-1] = 1.0
    assert weights_digest(config, changed) != digest


def test_a_tenant_finds_its_own_before_those_of_all_and_nobody_elses(tmp_path: Path):
    artifact().save(tmp_path / "shared.safetensors")
    artifact(settings={"whose": "all"}).save(tmp_path / "both.safetensors")
    for tenant in ("acme", "other"):
        artifact(settings={"whose": tenant}).save(tmp_path / "tenants" / tenant / "both.safetensors")
    artifact().save(tmp_path / "tenants" / "other" / "secret.safetensors")
    artifacts = Artifacts(tmp_path)
    acme = artifacts.of_tenant("acme")
    assert (artifacts.names, acme.names) == (["both", "shared"], ["both", "shared"])
    assert artifacts.of_tenant("other").names == ["both", "secret", "shared"]
    for asked, whose in ((acme, "acme"), (artifacts.of_tenant("other"), "other"), (artifacts, "all"), (acme, "acme")):
        assert asked.open("both", "disco", MODELS, "f").settings == {"whose": whose}
    assert acme.open("shared", "disco", MODELS, "f") is artifacts.open("shared", "disco", MODELS, "f")
    for tenant in ("acme", "", "..", "other/", "(audit)", "other\n"):
        caught = refusal(lambda tenant=tenant: artifacts.of_tenant(tenant).open("secret", "disco", MODELS, "f"))
        assert (caught.code, caught.message) == (Code.NOT_FOUND, "f: 'secret' is not known; available: both, shared")
    (tmp_path / "tenants" / "acme" / "both.safetensors").unlink()
    assert acme.open("both", "disco", MODELS, "f").settings == {"whose": "all"}


def test_tenants_files_stay_in_memory_up_to_a_limit(tmp_path: Path):
    """The one used least recently is read again; those of all, and what a request holds, stay."""
    artifact().save(tmp_path / "mine.safetensors")
    for tenant in ("a", "b", "c"):
        artifact(settings={"whose": tenant}).save(tmp_path / "tenants" / tenant / "mine.safetensors")
    size = max(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    artifacts = Artifacts(tmp_path, files=ArtifactFiles(2 * size))

    def opened(tenant: str) -> Artifact:
        return artifacts.of_tenant(tenant).open("mine", "disco", MODELS, "f")

    of_all, a, b = opened(""), opened("a"), opened("b")
    assert opened("a") is a
    c = opened("c")
    assert (opened("a") is a, opened("c") is c, opened("") is of_all) == (True, True, True)
    assert opened("b") is not b
    assert b.settings == opened("b").settings == {"whose": "b"}
    assert opened("c") is c
    assert opened("a") is not a


def test_a_tenants_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path):
    artifact().save(tmp_path / "mine.safetensors")
    artifact().save(tmp_path / "tenants" / "acme" / "mine.safetensors")
    artifacts = Artifacts(tmp_path, files=ArtifactFiles(100))
    error = refusal(lambda: artifacts.of_tenant("acme").open("mine", "disco", MODELS, "here"))
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "here")
    assert "a tenant's own may have at most 100" in error.message
    assert artifacts.open("mine", "disco", MODELS, "here").kind == "disco"


def test_what_was_read_of_a_removed_tenant_is_dropped(tmp_path: Path):
    artifacts = Artifacts(tmp_path)
    for tenant in ("acme", "other"):
        artifact().save(tmp_path / "tenants" / tenant / "mine.safetensors")
    acme, other = (artifacts.of_tenant(each) for each in ("acme", "other"))
    first, kept = (each.open("mine", "disco", MODELS, "f") for each in (acme, other))
    artifacts.forget("acme")
    for tenant in ("", "..", "acme/mine.safetensors/.."):
        artifacts.forget(tenant)
    assert acme.open("mine", "disco", MODELS, "f") is not first
    assert other.open("mine", "disco", MODELS, "f") is kept
    Artifacts().forget("acme")


@pytest.mark.parametrize(
    "about",
    [
        {"settings": []},
        {"kind": 1},
        {"models": []},
        {"models": {"large": None}},
        {"models": "abc"},
        {"trainer": None},
        {"tensors": {}},
        {"more": 1},
    ],
)
def test_metadata_of_another_form_is_refused(tmp_path: Path, about: dict):
    fields = {"format": 1, "kind": "disco", "trainer": "t", "settings": {}, "models": {}, **about}
    save_file({"w": torch.zeros(1)}, tmp_path / "odd.safetensors", {"turnout_artifact": json.dumps(fields)})
    error = refusal(lambda: Artifacts(tmp_path).open("odd", "disco", MODELS, "here"))
    assert (error.code, error.message) == (
        Code.INVALID_ARGUMENT,
        "here: 'odd' does not say what it is as artifacts do",
    )
