"""Samples shared out among the lines of a whole job: by its own prompts, never more than the budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.batches.best_of import best_of_params, chances_of, looking, looks, shared_out, with_samples
from deployments.batches.inputs import Fault
from deployments.batches.lines import Line
from router.allocation import best_of
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError, invalid

FAULT = Fault(9, invalid("body", "is bad"))


def line(number: int, **body: Any) -> Line:
    return Line(number, f"id-{number}", "/v1/completions", {"prompt": "p", "max_tokens": 50, **body})


def test_lines_that_leave_the_method_open_are_looked_at_and_no_others() -> None:
    rows = [
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
    rows = [line(1, temperature=0, decoding={"session": "s"}), line(2, temperature=0, decoding=None), line(3), FAULT]
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
