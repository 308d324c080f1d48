from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from turnout.types import MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("seed", -MAX_SEED - 2),
        ("seed", MAX_SEED + 1),
        ("max_tokens", 0),
        ("n", 0),
        ("n", 65),
        ("logprobs", 21),
        ("best_of", 2),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate({field: value})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(("given", "used"), [(-1, MAX_SEED), (-2, MAX_SEED - 1), (-MAX_SEED - 1, 0), (7, 7)])
def test_negative_seeds_are_taken_as_the_bits_they_have(given: int, used: int) -> None:
    assert SamplingParams(seed=given).seed == used


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("temperature", 2.0), ("top_p", 1.0), ("seed", MAX_SEED), ("seed", 0), ("logprobs", 0)],
)
def test_the_bounds_themselves_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams.model_validate({field: value}), field) == value


@pytest.mark.parametrize(("temperature", "greedy"), [(None, False), (0.0, True), (0.01, False)])
def test_only_temperature_zero_is_greedy(temperature: float | None, greedy: bool) -> None:
    given = {} if temperature is None else {"temperature": temperature}
    assert SamplingParams.model_validate(given).greedy is greedy
