"""A pool whose models come from a hub: the same answers as from folders, and commits that cannot be mixed unseen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from cli.serve import _pinned
from engine.loading import load_checkpoint
from pool.local_pool import LocalPool
from tests.engine.harness import ask, pair_config
from tests.gguf_models import write_gguf
from tests.hub_server import own_caches, point_at, running
from training.random_models import llama_config, random_model
from turnout.config import ModelConfig, TurnoutConfig, check_resources, model_path, models_here, pinned


@pytest.fixture
def forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return own_caches(tmp_path, monkeypatch)


def of_hub(config: TurnoutConfig) -> TurnoutConfig:
    models = {role: each.model_copy(update={"path": f"hf:tiny/{role}@main"}) for role, each in config.models.items()}
    return config.model_copy(update={"models": models})


async def test_a_pool_of_a_hub_answers_as_one_of_folders(
    pair_folder: Path, tmp_path: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = pair_config(pair_folder)
    config = of_hub(local)
    pools = [LocalPool.load("pair", local)]
    with running() as hub:
        point_at(hub, monkeypatch)
        commits = {role: hub.push_folder(f"tiny/{role}", pair_folder / role) for role in ("small", "large")}
        pools.append(LocalPool.load("pair", config))
        # Another process learns of a branch that moved meanwhile; one that was given a commit does not.
        fixed = pinned(config)
        other = random_model(llama_config(num_hidden_layers=3), seed=9)
        other.save_pretrained(tmp_path / "other")
        tokenizer = {path.name: path.read_bytes() for path in (pair_folder / "large").glob("*token*")}
        files = {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
        moved = hub.push("tiny/large", files | tokenizer)
        forget()
        pools.append(LocalPool.load("pair", config))
        forget()
    pools.append(LocalPool.load("pair", fixed))  # without the hub: all of the commit is here
    answers = [(await ask(pool, "ab", "speculative", max_tokens=12, temperature=0.0)).text for pool in pools]
    assert answers[0] == answers[1] == answers[3]
    digests = [pool.members["large"].digest for pool in pools]
    assert digests[0] == digests[1] == digests[3] != digests[2]
    revisions = [[each.revision for each in pool.models()] for pool in pools]
    assert revisions == [
        ["", "", ""],
        ["", commits["small"], commits["large"]],
        ["", commits["small"], moved],
        ["", commits["small"], commits["large"]],
    ]
    for pool in pools:
        await pool.close()


def test_a_gguf_file_of_a_hub_is_the_model_of_that_file(
    tmp_path: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model(llama_config(), seed=4))
    config = TurnoutConfig.model_validate(
        {"models": {"m": {"path": "hf:tiny/packed/m.gguf@main"}}, "pools": {"p": {"small": "m", "large": "m"}}}
    )
    check_resources(config)
    assert models_here(config) == {}
    with running() as hub:
        point_at(hub, monkeypatch)
        hub.push("tiny/packed", {"m.gguf": file.read_bytes(), "other.gguf": b"GGUF"})
        folder = model_path(config.models["m"])
    assert models_here(config) == {"m": folder}
    folders = (folder, model_path(ModelConfig(path=str(file))))
    first, second = (load_checkpoint(each, torch.float32, torch.device("cpu")).digest for each in folders)
    assert first == second


def test_a_node_is_prepared_by_one_command(pair_folder: Path, tmp_path: Path) -> None:
    with running() as hub:
        commit = hub.push_folder("tiny/large", pair_folder / "large")
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        config = {"models": {"m": {"path": "hf:tiny/large@main"}}, "pools": {"p": {"small": "m", "large": "m"}}}
        (tmp_path / "turnout.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

        def turnout(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
            own = [f"{name}={value}" for name, value in (places | environment).items()]
            command = ["env", *own, sys.executable, "-m", "cli.main", *arguments]
            return subprocess.run(command, text=True, capture_output=True)

        pulled = turnout("models", "pull", "--config", str(tmp_path / "turnout.yaml"))
    folder = tmp_path / "home" / "hub" / "models--tiny--large" / "snapshots" / commit
    assert (pulled.returncode, pulled.stdout) == (0, f"hf:tiny/large@{commit}: {folder}\n")
    assert pulled.stderr == ""  # no bar where there is no terminal
    again = turnout("models", "pull", "hf:tiny/large", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, pulled.stdout)


def test_the_start_says_which_commit_it_serves(
    pair_folder: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cli.output import console

    config = of_hub(pair_config(pair_folder))
    with running() as hub:
        point_at(hub, monkeypatch)
        commits = {role: hub.push_folder(f"tiny/{role}", pair_folder / role) for role in ("small", "large")}
        resolved = _pinned(console(), config)
    assert {role: model.path for role, model in resolved.models.items()} == {
        role: f"hf:tiny/{role}@{commit}" for role, commit in commits.items()
    }
    assert capsys.readouterr().out.splitlines()[0] == (
        f"models.small.path: hf:tiny/small@main is hf:tiny/small@{commits['small']}"
    )
    assert pinned(resolved) == resolved
