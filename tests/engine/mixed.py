"""A mixed load, every method with all kinds of sampling, and how two of its answers are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.harness import Reply, call_of, random_prompts, reference
from tests.engine.margin import assert_same_tokens
from turnout.calls import GenerateCall

SWITCH = {"window": 2, "min_stay": 3, "threshold": 2.0}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"model": "large"}),
    ("plain", {"model": "small"}),
    ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 3}),
    ("speculative", {"verifier": "rejection", "length": "fixed", "draft_length": 4}),
    ("entropy_adaptive", SWITCH),
    ("entropy_adaptive", {**SWITCH, "catch_up": "shadow", "effect": "current"}),
    ("sentence_lead", {"lead_tokens": 3, "catch_up": "eager"}),
    ("random_switch", {"share": 0.5, "mean_run": 6.0, "min_stay": 2}),
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.3, "stop": ("e",)},
    {"temperature": 0.5, "repetition_penalty": 1.2, "logit_bias": {97: 3.0}, "stop_token_ids": (3, 4, 5)},
]


def mixed_calls(count: int = 16) -> list[GenerateCall]:
    """Different methods, lengths, temperatures, penalties and stops."""
    calls = []
    for i, prompt in enumerate(random_prompts(count, 60, seed=5)):
        method, params = METHODS[i % len(METHODS)]
        options = {"max_tokens": 6 + 2 * i, "seed": 100 + i, **SAMPLING[i % len(SAMPLING)]}
        calls.append(call_of(prompt, method, params, **options))
    return calls


def assert_same_reply(folder: Path, call: GenerateCall, expected: Reply, got: Reply) -> None:
    """Equal tokens, texts and ends; ties are judged by the model that claims the token."""
    if call.method == "speculative" and call.params["verifier"] == "rejection":
        # Its noise is spent on accepting and on residuals: there is no score to judge a tie by, so none is excused.
        assert got.ids == expected.ids
        return
    assert isinstance(call.prompt, tuple)

    def scores_at(place: int) -> Any:
        plain = reference(folder / ("large" if call.method == "speculative" else expected.tokens[place].source))
        return plain.scores(call.prompt, expected.ids, call.sampling, call.sampling.seed)[place]

    assert_same_tokens(expected.ids, got.ids, scores_at, str(call.method))
    if expected.ids == got.ids:
        assert (got.text, got.reasons) == (expected.text, expected.reasons)
        assert [t.source for t in got.tokens] == [t.source for t in expected.tokens]
