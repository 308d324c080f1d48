"""`turnout calibrate`, on models small enough for a test: an artifact that requests use, or a reason and nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoding.artifacts import Artifact
from training.random_models import byte_tokenizer, llama_config, random_model

COMMON = ("--param", "window=1", "--param", "min_stay=1", "--points", "3", "--max-tokens", "16", "--json")
SHARE = ("--target-large-share", "0.2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    for name, seed in (("one", 0), ("two", 1)):
        random_model(llama_config(), seed, spread=0.2).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    rows = "".join(json.dumps({"prompt": f"question {index}"}) + "\n" for index in range(10))
    (folder / "data.jsonl").write_text(rows, encoding="utf-8")
    return folder


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    return write_config(folder, tmp_path)


def write_config(folder: Path, out: Path, small: str = "one", large: str = "two", **pool: Any) -> Path:
    models = {
        name: {"path": str(folder / name), "dtype": "float32", "kv_memory_bytes": 8 << 20} for name in ("one", "two")
    }
    made = {"small": small, "large": large, "artifacts": str(out / "kept"), **pool}
    values = {"models": models, "pools": {"p": made}, "engine": {"threads": 1}}
    path = out / f"{small}-{large}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_a_calibration_is_measured_written_and_used(run: Any, folder: Path, config: Path, tmp_path: Path) -> None:
    arguments = ("calibrate", "entropy_adaptive", "--config", str(config), "--data", str(folder / "data.jsonl"))
    result = run(*arguments, "--pool", "p", *SHARE, "--out", "mine", *COMMON)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    kept = tmp_path / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["mine.report.json", "mine.safetensors"]
    assert report == json.loads((kept / "mine.report.json").read_text(encoding="utf-8"))
    artifact = Artifact.load(kept / "mine.safetensors")
    assert (artifact.kind, artifact.version) == ("calibration", report["version"])
    assert artifact.settings["target"] == {"large_share": 0.2}
    assert artifact.settings["basis"]["measure"] == "agreement"
    assert len(report["wall"]) == len(report["points"]) >= 4

    ask = ("generate", "hello", "--local", "--config", str(config), "--method", "entropy_adaptive", "--json")
    short = ("--max-tokens", "8", "--seed", "1")
    answer = json.loads(run(*ask, *short, "--param", "calibration=mine").out)
    assert answer["usage"]["params"]["threshold"] == pytest.approx(report["setting"])
    assert answer["usage"]["params"]["window"] == 1
    assert f"calibration mine, version {report['version']}: threshold" in answer["usage"]["notes"][0]
    refused = run(*ask, *short, "--param", "calibration=mine", "--param", "window=5")
    assert refused.code == 1
    assert "method.params.window: is 5, but calibration 'mine' was made with 1" in refused.err
    refused = run(*ask, *short, "--param", "calibration=mine", "--param", "large_share=1")
    assert "no threshold reaches 1; reachable: 0.000 to " in refused.err
    swapped = write_config(folder, tmp_path, "two", "one")
    other = run(*ask[:4], str(swapped), *ask[5:], *short, "--param", "calibration=mine")
    assert other.code == 1
    assert "method.params.calibration: was made for the " in other.err

    default = {"name": "entropy_adaptive", "params": {"calibration": "mine", "large_share": 1.0}}
    wished = write_config(folder, tmp_path, default=default)
    started = run("generate", "hello", "--local", "--config", str(wished), *short)
    assert started.code == 1
    assert "pools.p.default.params.large_share: no threshold reaches 1; reachable: 0.000 to " in started.err
    # What cannot start for want of a calibration can still be calibrated.
    remade = run("calibrate", "entropy_adaptive", "--config", str(wished), *arguments[4:], *SHARE, *COMMON)
    assert remade.code == 0, remade.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--target-large-share", "1.0"), "target_large_share: no threshold reaches 1; reachable: 0.000 to 0."),
        (("--target-quality", "1.9"), "target_quality: no threshold reaches 1.9; reachable: "),
        (("--budget", "0.001"), "budget: 0.001 cannot be kept: the least cost measured is 1.000"),
        ((*SHARE, "--meter", "flops"), "meter: says which cost --budget is about; give that, or leave it out"),
        ((), "target: give exactly one of --target-large-share, --target-quality and --budget"),
        ((*SHARE, "--budget", "0.5"), "target: give exactly one of"),
        ((*SHARE, "--data", "empty.jsonl"), "data: empty.jsonl has 0 rows; at least 8 are needed"),
        ((*SHARE, "--data", "promptless.jsonl"), "data: line 2.prompt: field required"),
        ((*SHARE, "--data", "long.jsonl"), "data: row 1: prompt: "),
        ((*SHARE, "--demo", "lists"), "data: give either --data FILE or --demo KIND"),
        ((*SHARE, "--out", "../mine"), "out: must be a name of letters"),
        ((*SHARE, "--pool", "one"), "pool: 'one' is not known; available: p"),
        ((*SHARE, "--param", "threshold=1"), "param.threshold: is what is calibrated; fixed here can be window,"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(
    run: Any, folder: Path, config: Path, tmp_path: Path, monkeypatch: Any, changes: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("\n", encoding="utf-8")
    Path("promptless.jsonl").write_text('{"prompt": "a"}\n{"answer": "b"}\n', encoding="utf-8")
    rows = (f'{{"prompt": "{text}"}}\n' for text in ("x" * 600, *"abcdefghi"))
    Path("long.jsonl").write_text("".join(rows), encoding="utf-8")
    data = () if "--data" in changes else ("--data", str(folder / "data.jsonl"))
    common = COMMON[:-1] if "threshold=1" not in changes else ()
    result = run("calibrate", "entropy_adaptive", "--config", str(config), *data, *changes, *common)
    assert (result.code, result.out) == (1, "")
    assert said in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "kept").exists()


def test_methods_and_pools_without_what_it_takes_are_refused(run: Any, folder: Path, tmp_path: Path) -> None:
    bare = write_config(folder, tmp_path, artifacts=None)
    data = ("--config", str(bare), "--data", str(folder / "data.jsonl"), *SHARE)
    assert run("calibrate", "plain", *data).err == (
        "turnout: method: 'plain' has nothing to calibrate;"
        " these have: adadec, cascade, entropy_adaptive, random_switch, sentence_lead, step_speculation\n"
    )
    assert "pools.p.artifacts: is not set" in run("calibrate", "entropy_adaptive", *data).err
