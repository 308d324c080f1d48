"""Beam search by the names of vLLM's clients: what it asks for, what contradicts it, the same answers."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.schemas import chat_job, completion_job
from turnout.errors import TurnoutError

TEXT: dict[str, Any] = {"prompt": "xyz", "max_tokens": 4, "temperature": 0}


def params(**body: Any) -> dict[str, Any]:
    [call] = completion_job({**TEXT, **body}).calls
    assert call.method == "search"
    return call.params


def test_the_fields_are_other_names_of_the_method() -> None:
    beam = {"name": "beam", "length_penalty": 1.0, "early_stopping": False}
    assert params(use_beam_search=True, n=3) == {"width": 3, "search": beam}
    asked = {"length_penalty": 0.5, "early_stopping": "never"}
    assert params(use_beam_search=True, n=2, best_of=5, **asked) == {"width": 5, "search": {**beam, **asked}}
    given = {"method": "search", "params": {"model": "small"}}
    assert params(use_beam_search=True, decoding=given) == {"model": "small", "width": 1, "search": beam}
    [call] = chat_job({"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2}).calls
    assert (call.method, call.params["width"]) == ("search", 2)
    [call] = completion_job({**TEXT, "best_of": 1, "length_penalty": 1, "early_stopping": False}).calls
    assert (call.method, call.params) == (None, {})


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        ({"best_of": 2}, "best_of", "needs use_beam_search: true"),
        ({"length_penalty": 0.5}, "length_penalty", "needs use_beam_search: true; allowed without: 1"),
        ({"early_stopping": True}, "early_stopping", "needs use_beam_search: true; allowed without: false"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of", "must be at least n, 3"),
        ({"use_beam_search": True, "best_of": 129}, "best_of", "128"),
        ({"use_beam_search": True, "best_of": 0}, "best_of", "greater than or equal to 1"),
        ({"use_beam_search": True, "length_penalty": float("nan")}, "length_penalty", "finite"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", "never"),
        ({"use_beam_search": True, "decoding": {"method": "plain"}}, "use_beam_search", "decoding.method 'plain'"),
        ({"use_beam_search": True, "decoding": {"params": {"width": 2}}}, "use_beam_search", "decoding.params.width"),
    ],
)
def test_what_contradicts_is_refused_by_its_name(body: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(TurnoutError, match=why) as caught:
        completion_job({**TEXT, **body})
    assert caught.value.field is not None
    assert caught.value.field.split(".")[0] == field
