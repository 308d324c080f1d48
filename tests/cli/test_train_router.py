"""`turnout train outcomes` and `turnout train router`, on models small enough to be asked in a test."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.utils.logging import disable_progress_bar

from decoding.artifacts import Artifact
from pool.local_pool import LocalPool
from router.base import make_policy
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.config import load_config
from turnout.part_choice import PartChoice


@pytest.fixture
def config(tmp_path: Path) -> Path:
    disable_progress_bar()  # what refusals print is counted in lines
    for name, seed in (("s", 0), ("l", 1)):
        random_model(llama_config(), seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    values = {
        "models": {
            name: {"path": str(tmp_path / name), "dtype": "float32", "kv_memory_bytes": 8 << 20} for name in ("s", "l")
        },
        "pools": {"p": {"small": "s", "large": "l", "artifacts": str(tmp_path / "artifacts")}},
        "engine": {"threads": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "config.yaml"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(num: int = 40) -> list[dict[str, Any]]:
    """Questions with an even number are beyond the small model."""
    return [
        {"prompt": f"{n} {'x' * (n % 2 * 9)}", "correct_small": n % 2 == 1, "correct_large": True} for n in range(num)
    ]


def test_a_router_is_trained_by_name_and_its_pool_routes_by_it(run: Any, config: Path) -> None:
    outcomes = write(config.parent / "o.jsonl", rows())
    arguments = ("train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", "mine")
    result = run(*arguments, "--pool", "p", "--epochs", "60", "--learning-rate", "0.01", "--json")
    assert result.code == 0, result.err
    place = config.parent / "artifacts" / "mine.safetensors"
    report = json.loads(result.out)
    assert report == json.loads(place.with_suffix(".report.json").read_text(encoding="utf-8"))
    assert report["rows"] == {"train": 24, "calibration": 8, "heldout": 8}
    assert report["predictions"]["p_small"]["auc"]["value"] == 1.0  # the prompt's length tells
    assert report["routing"]["recovered"]["all"]["value"] == pytest.approx(1.0)
    assert report["routing"]["hard"] + report["routing"]["easy"] == 1.0
    [parted, *_] = [p for p in report["routing"]["curve"] if round(p["share"] * 8) == report["routing"]["hard"] * 8]
    assert (parted["hard_sent_small"], parted["easy_sent_large"]) == (0.0, 0.0)
    assert {"low", "high", "predicted", "observed"} <= set(report["predictions"]["p_small"]["reliability"][0])
    artifact = Artifact.load(place)
    assert (artifact.kind, sorted(artifact.models)) == ("router_probe", ["large", "small"])
    assert artifact.settings["routing"] == report["routing"]


def test_an_artifact_of_the_trainer_fits_the_pool_it_was_trained_for(run: Any, config: Path) -> None:
    outcomes = write(config.parent / "o.jsonl", rows())
    place = config.parent / "elsewhere.safetensors"
    result = run(
        "train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", str(place), "--epochs", "2"
    )
    assert result.code == 0, result.err
    assert "recovered share of the oracle's gain over random" in result.out
    assert "calibration error" in result.out
    assert "hard sent small" in result.out
    assert "% of the prompts; easy, the small one is right: " in result.out
    (config.parent / "artifacts").mkdir()
    place.rename(config.parent / "artifacts" / "router.safetensors")
    pool = LocalPool.load("p", load_config(config))
    policy = make_policy(PartChoice.of("learned"), "pools.p.routing.policy")
    policy.check(pool.model_pool)
    make_policy(PartChoice.of("learned", miss_weight=5), "pools.p.routing.policy").check(pool.model_pool)
    assert pool.model_pool.artifacts.names == ["router"]


def test_outcomes_are_made_by_running_the_pool(run: Any, config: Path) -> None:
    out = config.parent / "made.jsonl"
    arguments = ("--config", str(config), "--count", "25", "--max-tokens", "4", "--samples", "2", "--temperature", "1")
    result = run("train", "outcomes", "--out", str(out), *arguments, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["prompts"] == 25
    about, *made = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted(about["models"]) == ["large", "small"]
    assert len({row["kind"].split()[0] for row in made}) == 5
    for row in made:
        for role in ("small", "large"):
            assert len(row[f"samples_{role}"]) == 2
            for sample in row[f"samples_{role}"]:
                assert 1 <= sample["tokens"] <= 4
                assert sample["entropy_bits"] > 0 > sample["logprob"]
    again = run("train", "outcomes", "--out", str(config.parent / "again.jsonl"), *arguments)
    assert "25 prompts; right: small 0.0%, large 0.0%" in again.out
    lines = (config.parent / "again.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    for row, line in zip(made, lines, strict=True):
        for role in ("small", "large"):
            for one, two in zip(row[f"samples_{role}"], json.loads(line)[f"samples_{role}"], strict=True):
                assert one == pytest.approx(two, abs=2e-4)


def test_outcomes_are_made_of_own_questions(run: Any, config: Path) -> None:
    """One that no answer meets, and one that every answer meets; the first file has more of them than are asked for."""
    asked = [{"prompt": f"{n}?", "answer": ["never this", ""][n % 2], "match": "regex"} for n in range(30)]
    data = write(config.parent / "mine.jsonl", asked)
    out = config.parent / "made.jsonl"
    arguments = ("train", "outcomes", "--out", str(out), "--config", str(config), "--max-tokens", "2")
    result = run(*arguments, "--data", str(data), "--count", "26", "--json")
    assert result.code == 0, result.err
    _, *made = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["prompt"], row["kind"]) for row in made] == [(row["prompt"], "mine") for row in asked[:26]]
    for number, row in enumerate(made):
        rewards = {sample["reward"] for role in ("small", "large") for sample in row[f"samples_{role}"]}
        assert rewards == {number % 2}
    unjudged = write(config.parent / "bare.jsonl", [{"prompt": f"{n}?"} for n in range(30)])
    refused = run(*arguments, "--data", str(unjudged))
    assert refused.code != 0
    assert "data: bare.jsonl has rows without answer" in refused.err


def routed(config: Path) -> Path:
    """The configuration with a pool whose route log holds texts; returns the log."""
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    log = config.parent / "routes.jsonl"
    policy = {"name": "static", "params": {"default": {"method": {"name": "plain", "model": "small"}}}}
    values["pools"]["p"]["routing"] = {"policy": policy, "log": {"path": str(log), "texts": True}}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    return log


def test_outcomes_are_made_of_what_a_pool_was_asked(run: Any, config: Path) -> None:
    """Text and chat, each once; the large model is its own measure, the small one agrees in a share of its tokens."""
    log = routed(config)
    ask = ("generate", "--local", "--config", str(config), "--max-tokens", "3")
    for prompt, *more in (("one", "--raw"), ("two",), ("one", "--raw")):
        assert run(*ask, prompt, *more).code == 0
    out = config.parent / "made.jsonl"
    arguments = ("train", "outcomes", "--out", str(out), "--config", str(config), "--max-tokens", "6")
    result = run(*arguments, "--log", str(log))
    assert result.code == 0, result.err
    _, *made = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row.get("text"), row.get("messages")) for row in made] == [
        ("one", None),
        (None, [{"role": "user", "content": "two"}]),
    ]
    for row in made:
        assert [sample["reward"] for sample in row["samples_large"]] == [1.0]
        [small] = row["samples_small"]
        assert 0.0 <= small["reward"] <= 1.0
        assert small["reward"] * small["tokens"] == pytest.approx(round(small["reward"] * small["tokens"]))
    assert "2 prompts; right: small " in result.out
    again = run("train", "router", "--config", str(config), "--outcomes", str(out), "--out", "x")
    assert "outcomes: has 2 prompts; at least 20 are needed" in again.err  # it can be read


def test_a_router_is_trained_on_conversations_and_texts(run: Any, config: Path) -> None:
    """The same rows as questions, as conversations and as texts: what is asked is what the probe reads."""
    ways = (
        lambda text: {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]},
        lambda text: {"text": text},
    )
    for way in ways:
        asked = [{**way(row["prompt"]), **{k: v for k, v in row.items() if k != "prompt"}} for row in rows()]
        outcomes = write(config.parent / "o.jsonl", asked)
        arguments = ("train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", "mine")
        result = run(*arguments, "--epochs", "60", "--learning-rate", "0.01", "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["predictions"]["p_small"]["auc"]["value"] > 0.9


def logged(texts: list[str]) -> list[dict[str, Any]]:
    """Entries of a route log, a request a text."""
    entry = {"kind": "request", "pool": "p", "request_id": "r", "decision": None, "outcome": {}}
    return [{**entry, "request": {"prompt": text}} for text in texts]


def test_a_router_is_trained_from_a_log_as_from_the_outcomes_that_are_made_of_it(run: Any, config: Path) -> None:
    log = write(config.parent / "routes.jsonl", logged([f"{n} {'x' * (n % 2 * 9)}" for n in range(30)] * 2))
    config_of, answering = ("--config", str(config)), ("--max-tokens", "6", "--temperature", "1")
    made = config.parent / "made.jsonl"
    assert (
        run("train", "outcomes", "--log", str(log), "--out", str(made), *config_of, *answering, "--count", "25").code
        == 0
    )
    reports = []
    for source in (("--outcomes", str(made)), ("--log", str(log), "--count", "25", *answering)):
        result = run("train", "router", *source, "--out", "mine", *config_of, "--epochs", "5", "--json")
        assert result.code == 0, result.err
        reports.append(json.loads(result.out))
    assert reports[0]["rows"] == {"train": 15, "calibration": 5, "heldout": 5}
    assert reports[1]["rows"] == reports[0]["rows"]
    assert reports[1]["kinds"]["log"] == pytest.approx(reports[0]["kinds"]["log"], abs=1e-3)
    whole = run(
        "train", "router", "--log", str(log), "--out", "mine", *config_of, *answering, "--epochs", "1", "--json"
    )
    assert sum(json.loads(whole.out)["rows"].values()) == 30


def test_logs_that_nothing_can_be_learnt_from_are_refused(run: Any, config: Path) -> None:
    entry = {"kind": "request", "pool": "p", "request_id": "r", "decision": None, "outcome": {}}
    tools = {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}
    called = {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}
    logs = {
        "silent": ([entry], "holds no texts: set routing.log.texts"),
        "others": ([{**entry, "pool": "q", "request": {"prompt": "x"}}], "no request to pool 'p'"),
        "shadows": ([{**entry, "kind": "shadow", "request": {"prompt": "x"}}], "no request to pool 'p'"),
        "odd": (
            [{**entry, "request": body} for body in ({"prompt": [1, 2]}, tools, called, {"prompt": ""})],
            "no request to pool 'p' but 4 with tools or token ids",
        ),
    }
    out = config.parent / "made.jsonl"
    for name, (entries, said) in logs.items():
        log = write(config.parent / f"{name}.jsonl", entries)
        refused = run("train", "outcomes", "--out", str(out), "--config", str(config), "--log", str(log))
        assert refused.code == 1
        assert said in refused.err
        assert not out.exists()
    both = run("train", "outcomes", "--out", str(out), "--config", str(config), "--log", str(log), "--data", str(log))
    assert "log: excludes --data" in both.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "x"), "outcomes: is missing; give --outcomes, --log or --demo"),
        (("--out", "x", "--outcomes", "FILE", "--demo"), "demo: excludes --outcomes; give one of them"),
        (("--out", "x", "--outcomes", "FILE", "--log", "FILE"), "log: excludes --outcomes; give one of them"),
        (("--out", "x", "--log", "FILE", "--demo"), "demo: excludes --log; give one of them"),
        (("--out", "x", "--log", "none"), "log: cannot read none"),
        (("--out", "x", "--log", "LOG"), "log: has 19 prompts; at least 20 are needed"),
        (("--out", "a/x", "--outcomes", "FILE"), "or a file that ends in .safetensors; got 'a/x'"),
        (("--out", "x", "--outcomes", "FILE", "--pool", "q"), "pool: 'q' is not known; available: p"),
        (("--out", "x", "--outcomes", "none"), "outcomes: cannot read none"),
        (("--out", "x", "--outcomes", "FILE", "--role", "small"), "role: is for --predict strategy and marginals"),
        (
            ("--out", "x", "--outcomes", "FILE", "--predict", "strategy"),
            "lack entropy_bits, which strategies are chosen by",
        ),
        (("--out", "x", "--outcomes", "FILE", "--predict", "marginals"), "has 1 samples_large; 4 are needed"),
        (("--out", "x", "--outcomes", "EMPTY"), "is empty; at least one line is needed"),
        (("--out", "x", "--outcomes", "ALIKE"), "outcomes: labels are all alike"),
        (("--out", "x", "--outcomes", "MISSING"), "outcomes: line 41: correct_large: is missing"),
        (("--out", "x", "--outcomes", "AGAINST"), "outcomes: line 41 contradicts line 1: the same prompt"),
        (("--out", "x", "--outcomes", "TWICE"), "outcomes: line 41: text: excludes prompt; give one of them"),
        (("--out", "x", "--outcomes", "NOTHING"), "outcomes: line 41: prompt: is missing; give prompt, messages or"),
        (("--out", "x", "--outcomes", "FEW"), "outcomes: has 4 prompts; at least 20 are needed"),
        (("--out", "my router", "--outcomes", "FILE"), "out: must be a name of letters, digits and . _ -, or a file"),
        (("--out", "x", "--outcomes", "FILE", "--count", "30"), "count: does nothing here: the answers are in --out"),
        (("--out", "x", "--outcomes", "FILE", "--samples", "4"), "samples: does nothing here: the answers are in"),
        (("--out", "x", "--outcomes", "FILE", "--most", "3"), "most: does nothing here: it is for --predict marginals"),
        (("--out", "x", "--demo", "--samples", "4"), "temperature: must be above 0 for 4 samples"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(run: Any, config: Path, arguments: tuple, said: str) -> None:
    folder = config.parent
    files = {
        "FILE": rows(),
        "EMPTY": [],
        "ALIKE": [{**row, "correct_small": True} for row in rows()],
        "MISSING": [*rows(), {"prompt": "p", "correct_small": True}],
        "AGAINST": [*rows(), {**rows()[0], "correct_large": False}],
        "TWICE": [*rows(), {**rows()[0], "text": "t"}],
        "NOTHING": [*rows(), {"correct_small": True, "correct_large": True}],
        "FEW": rows(4),
        "LOG": logged([f"text {n % 19}" for n in range(40)]),
    }
    filled = [str(write(folder / each, files[each])) if each in files else each for each in arguments]
    before = sorted(folder.rglob("*"))
    result = run("train", "router", "--config", str(config), *filled)
    assert (result.code, result.out) == (1, "")
    assert said in result.err
    assert result.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_a_pool_without_a_folder_needs_a_file_name(run: Any, config: Path) -> None:
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    del values["pools"]["p"]["artifacts"]
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    outcomes = write(config.parent / "o.jsonl", rows())
    result = run("train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", "x")
    assert "out: pool 'p' has no folder of artifacts; give a file that ends in .safetensors" in result.err


@pytest.mark.parametrize("what", ["router", "outcomes", "judge"])
@pytest.mark.parametrize("fault", ["a folder", "below a file"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_trained(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, fault: str
) -> None:
    def load(*_: Any) -> LocalPool:
        raise AssertionError("models are loaded")

    monkeypatch.setattr(LocalPool, "load", load)
    (tmp_path / "file").write_text("x")
    out = tmp_path / "folder.safetensors" if fault == "a folder" else tmp_path / "file" / "deep" / "new.safetensors"
    if fault == "a folder":
        out.mkdir()
    more = ("--demo",) if what == "router" else ()
    result = run("train", what, "--out", str(out), *more)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "out: " in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["file"], ["file", "folder.safetensors"])


def test_a_full_disk_is_said_in_a_line_and_leaves_nothing(
    run: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    outcomes = write(config.parent / "o.jsonl", rows())
    monkeypatch.setattr(Path, "write_bytes", full)
    arguments = ("train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", "mine")
    result = run(*arguments, "--epochs", "2")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[-1].endswith("mine.safetensors: No space left on device")
    assert list((config.parent / "artifacts").iterdir()) == []


def test_answers_of_another_pair_are_not_trained_on(run: Any, config: Path) -> None:
    """The file says whose they are; one that a person wrote need not."""
    outcomes = config.parent / "o.jsonl"
    write(outcomes, [{"models": {"small": "0" * 32, "large": "1" * 32}}, *rows()])
    arguments = ("train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", "mine")
    result = run(*arguments, "--epochs", "2")
    assert (result.code, result.out) == (1, "")
    assert f"outcomes: are answers of the small model with digest {'0' * 32}; the pool's has " in result.err
    assert not (config.parent / "artifacts").exists()
    models = LocalPool.load("p", load_config(config)).model_pool
    write(outcomes, [{"models": {role: models.by_role(role).digest for role in ("small", "large")}}, *rows()])
    assert run(*arguments, "--epochs", "2").code == 0
    write(outcomes, [{"models": {"small": "0" * 32}}, *rows(), {"models": {"small": "1" * 32}}])
    assert "line 42 names other models than a line before it" in run(*arguments).err


def test_a_router_for_endpoints_is_trained_on_texts_alone(run: Any, tmp_path: Path) -> None:
    price = {"price": {"output_usd_per_mtok": 1.0}}
    models = {name: {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": name}, **price} for name in ("s", "l")}
    pool = {"small": "s", "large": "l", "artifacts": str(tmp_path / "artifacts")}
    routed = {**pool, "routing": {"policy": {"name": "learned", "params": {"artifact": "mine"}}}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"models": models, "pools": {"p": routed}}), encoding="utf-8")
    outcomes = write(tmp_path / "o.jsonl", rows())
    arguments = ("train", "router", "--config", str(config), "--outcomes", str(outcomes), "--out", "mine")
    refused = run(*arguments, "--reads", "state")
    assert refused.code != 0
    assert "reads: state needs a small model that is computed here, and 's' is an endpoint; use text" in refused.err
    result = run(*arguments, "--epochs", "60", "--learning-rate", "0.01", "--json")
    assert result.code == 0, result.err
    artifact = Artifact.load(tmp_path / "artifacts" / "mine.safetensors")
    assert (artifact.settings["reads"], artifact.models["small"]) == ("text", "endpoint:s")
    assert json.loads(result.out)["predictions"]["p_small"]["auc"]["value"] == 1.0  # the prompt's length tells
