"""Samples shared out among the lines of a whole job: by its own prompts, never more than the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batch_chaos import write_prompts
from deployments.batches.best_of import best_of_params, chances_of, looking, looks, shared_out, with_samples
from deployments.batches.inputs import Defaults, Fault
from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import Line
from deployments.batches.offline import Job, run
from router.allocation import best_of
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError, invalid

FAULT = Fault(9, invalid("body", "is bad"))


def line(number: int, **body: Any) -> Line:
    return Line(number, f"id-{number}", "/v1/completions", {"prompt": "p", "max_tokens": 50, **body})


def test_lines_that_leave_the_method_open_are_looked_at_and_no_others() -> None:
    rows: list[Line | Fault] = [
        line(1, temperature=0, stop=["x"], n=2, seed=5),
        line(2, decoding={"method": "plain"}),
        line(3, prompt=["one", "two"]),
        FAULT,
        line(4, prompt=[1, 2], decoding={"method": "auto", "session": "s"}),
        Line(5, "id-5", "/v1/chat/completions", {"messages": [], "tools": [1]}),
    ]
    asked = {"max_tokens": 1, "temperature": 0, "decoding": {"method": "auto", "explain": True}}
    assert list(looks(rows)) == [
        Line(1, "1", "/v1/completions", {"prompt": "p", **asked}),
        Line(4, "4", "/v1/completions", {"prompt": [1, 2], **asked}),
        Line(5, "5", "/v1/chat/completions", {"messages": [], "tools": [1], **asked}),
    ]


def test_the_answers_to_looks_tell_the_chances() -> None:
    route = {"scores": {"p_small": 0.25, "p_large": 0.5}}
    record = {"custom_id": "7", "response": {"body": {"usage": {"turnout": {"route": route}}}}}
    assert chances_of([record], "small") == {7: 0.25}
    assert chances_of([record], "large") == {7: 0.5}


@given(st.lists(st.floats(0, 1), max_size=40), st.floats(1, 6), st.integers(6, 12))
def test_no_other_sharing_within_the_budget_is_expected_to_bring_more(
    chances: list[float], average: float, most: int
) -> None:
    counts = shared_out(dict(enumerate(chances)), best_of_params(average, {"most": most}))
    assert list(counts) == list(range(len(chances)))
    assert sum(counts.values()) <= max(average * len(chances), len(chances))
    assert all(1 <= count <= most for count in counts.values())
    even = sum(best_of(chance, int(average)) for chance in chances)
    assert sum(best_of(chance, counts[number]) for number, chance in enumerate(chances)) >= even - 1e-9


def test_hopeless_and_sure_lines_get_one_sample() -> None:
    counts = shared_out({1: 0.0, 2: 1.0, 3: 0.4, 4: 0.3}, best_of_params(2.5, {"most": 8}))
    assert (counts[1], counts[2]) == (1, 1)
    assert counts[3] + counts[4] == 8


def test_lines_ask_for_what_they_were_given() -> None:
    params = best_of_params(2.0, {"model": "large", "rerank": "logprob", "temperature": 0.6})
    rows: list[Line | Fault] = [
        line(1, temperature=0, decoding={"session": "s"}),
        line(2, temperature=0, decoding=None),
        line(3),
        FAULT,
    ]
    first, second, third, fault = with_samples(rows, {1: 3, 2: 1}, params)
    assert isinstance(first, Line)
    assert isinstance(second, Line)
    asked = {"model": "large", "k": 3, "rerank": "logprob"}
    assert first.body["decoding"] == {"session": "s", "method": "best_of", "params": asked}
    assert (first.body["temperature"], second.body["temperature"]) == (0.6, 0)
    assert second.body["decoding"]["params"]["k"] == 1
    assert third is rows[2]
    assert fault is FAULT


def test_looking_routes_one_sample_by_the_same_artifact() -> None:
    config = looking(TurnoutConfig.demo(), "demo", best_of_params(3.0, {"artifact": "mine", "model": "large"}))
    routing = config.pools["demo"].routing
    assert routing is not None
    assert routing.policy.params == {"artifact": "mine", "model": "large", "average": 1.0, "most": 1}


@pytest.mark.parametrize(
    ("average", "given", "field"),
    [(3.0, {"by": "window"}, "param.by"), (9.0, {"most": 4}, "best-of"), (3.0, {"model": "huge"}, "best-of.model")],
)
def test_parameters_that_cannot_be_are_refused(average: float, given: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        best_of_params(average, given)
    assert refused.value.field is not None
    assert refused.value.field.startswith(field)


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data sets its own old settings
def test_a_job_looks_at_its_lines_once_and_shares_its_samples_out_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, average = 24, 2.0
    write_prompts(tmp_path / "in.jsonl", rows)
    places = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl"), tmp_path / "work"
    defaults = Defaults(True, {"max_tokens": 24})
    job = Job(*places, TurnoutConfig.demo(), "demo", defaults, block_rows=8, best_of=best_of_params(average, {}))
    looked = JobDirectory(job.work / "looked")

    def asked() -> list[int]:
        files = (looked.folder / "asked").iterdir()
        return sorted(int(number) for file in files for number in file.read_text().split())

    with monkeypatch.context() as patch:
        patch.setattr("deployments.batches.best_of.shared_out", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(job)
    assert asked() == list(range(1, rows + 1))
    assert not Path(job.target).exists()
    summary = run(job)
    assert (summary.answered, summary.failed) == (rows, 0)
    assert asked() == list(range(1, rows + 1))
    # What each line was asked for is what its chances say, within the budget; an answer is one, whatever was sampled.
    place = JobDirectory(job.work)
    lines = [each for block in place.blocks() for each in place.lines(block)]
    counts = {each.number: each.body["decoding"]["params"]["k"] for each in lines}
    assert job.best_of is not None
    assert counts == shared_out(chances_of(looked.records(answered=True), job.best_of.model), job.best_of)
    assert rows < sum(counts.values()) <= average * rows
    answers = [json.loads(each) for each in Path(job.target).read_text().splitlines()]
    assert [len(each["response"]["body"]["choices"]) for each in answers] == [1] * rows
    # Samples that were not chosen were made, and are counted.
    texts = {each["custom_id"]: each["response"]["body"] for each in answers}
    used = [texts[each.custom_id]["usage"]["completion_tokens"] for each in sorted(lines, key=lambda x: x.number)]
    most = max(counts, key=lambda number: counts[number])
    assert counts[most] > 1
    assert used[most - 1] >= counts[most]
