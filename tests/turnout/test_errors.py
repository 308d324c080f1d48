from __future__ import annotations

import pickle

import pytest

from turnout.errors import Code, TurnoutError, invalid, not_found, out_of_range


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (invalid("top_p", "must be positive"), Code.INVALID_ARGUMENT, "top_p: must be positive"),
        (out_of_range("prompt", "too long"), Code.OUT_OF_RANGE, "prompt: too long"),
        (not_found("model", "x", ["b", "a"]), Code.NOT_FOUND, "model: 'x' is not known; available: a, b"),
        (not_found("model", "x", []), Code.NOT_FOUND, "model: 'x' is not known; available: none"),
    ],
)
def test_a_refusal_names_its_field_and_code(error: TurnoutError, code: Code, message: str) -> None:
    assert error.code is code
    assert str(error) == error.message == message
    assert error.field == message.split(":")[0]


def test_a_refusal_survives_pickling_whole() -> None:
    error = invalid("top_p", "must be positive")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.message, copy.field) == (error.code, error.message, error.field)
