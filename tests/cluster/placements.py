"""The same seeded requests wherever the models run, and how two of their answers are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.pool import ActorPool
from tests.engine.harness import Reply, call_of, random_prompts, reference
from tests.engine.margin import assert_same_tokens, excused
from tests.engine.mixed import METHODS as SWITCHED_AND_DRAFTED
from tests.engine.mixed import SAMPLING
from turnout.calls import GenerateCall
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig

STEPS = {"separators": ["a", "e", "i"], "max_step_tokens": 6}
METHODS: list[tuple[str, dict[str, Any]]] = [
    *SWITCHED_AND_DRAFTED,
    ("pearl", {"verifier": "match"}),
    ("pearl", {"verifier": "match", "draft_length": 3}),
    ("pearl", {"verifier": "rejection", "draft_length": 3}),
    ("speculative", {"verifier": "match", "drafter": "copyspec", "length": "fixed"}),
    ("best_of", {}),
    ("step_speculation", {**STEPS, "rest": "large", "speculate": {}}),
    ("cascade", {"threshold": -2.0}),
    ("monitored", {"inner": "plain", "monitor": {"name": "trim", "asks": "small", "send_every": 4, "cues": ["a"]}}),
]
ONE_MODEL_A_TOKEN = {"plain", "entropy_adaptive", "sentence_lead", "random_switch"}

# Name: placement, ranks of the large model, raylets that the actors lie on at least.
PLACEMENTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "actors": ({"strategy": "STRICT_PACK"}, 1, 1),
    "raylets": ({"strategy": "STRICT_SPREAD"}, 1, 2),
    "tensor_parallel": ({"strategy": "SPREAD"}, 2, 2),
}


def placed(config: TurnoutConfig, name: str) -> TurnoutConfig:
    """The pool with its models in actors."""
    settings, ranks, _ = PLACEMENTS[name]
    placement = PlacementConfig(
        models="actors", cpus=0.5, threads=1, start_timeout_s=240.0, join_timeout_s=120.0, silence_s=60.0, **settings
    )
    pool = config.pools["pair"].model_copy(update={"placement": placement})
    large = config.models["large"].model_copy(update={"tensor_parallel": ranks})
    return config.model_copy(update={"pools": {"pair": pool}, "models": {**config.models, "large": large}})


def nodes_of(pool: ActorPool) -> set[str]:
    """Raylets that a pool's processes run on, ranks included."""
    return {place.node for supervisor in pool.supervisors for place in supervisor._life.places}


def seeded_calls(count: int) -> list[GenerateCall]:
    """Every method, different lengths, temperatures, penalties and stops; the first ones are the same for any count."""
    calls = []
    for i, prompt in enumerate(random_prompts(count, 60, seed=5)):
        method, params = METHODS[i % len(METHODS)]
        options = {"max_tokens": 12 + i % 24, "seed": 100 + i, **SAMPLING[i % len(SAMPLING)]}
        calls.append(call_of(prompt, method, params, **options))
    return calls


def by_large_alone(call: GenerateCall) -> bool:
    """Whether the answer is by definition the one that the large model gives alone."""
    if call.method == "plain":
        return call.params["model"] == "large"
    return call.method in ("speculative", "pearl") and call.params["verifier"] == "match"


def as_method(call: GenerateCall, method: str, **params: Any) -> GenerateCall:
    """The same request, to another method."""
    return replace(call, method=method, params=params)


def assert_same(folder: Path, call: GenerateCall, expected: Reply, got: Reply) -> None:
    """Equal tokens, texts, ends and writers. A tie is excused where a model's own scores choose the token."""
    if not by_large_alone(call) and call.method not in ONE_MODEL_A_TOKEN:
        assert got.ids == expected.ids, call.method
    assert isinstance(call.prompt, tuple)

    def scores_at(place: int) -> Any:
        assert isinstance(call.prompt, tuple)
        assert call.sampling.seed is not None
        writer = "large" if by_large_alone(call) else expected.tokens[place].source
        return reference(folder / writer).scores(call.prompt, expected.ids, call.sampling, call.sampling.seed)[place]

    assert_same_tokens(expected.ids, got.ids, scores_at, str(call.method))
    if expected.ids == got.ids:
        assert (got.texts, got.reasons) == (expected.texts, expected.reasons)
        if not by_large_alone(call):
            assert [t.source for t in got.tokens] == [t.source for t in expected.tokens], call.method


def assert_all_same(folder: Path, calls: list[GenerateCall], expected: list[Reply], got: list[Reply]) -> None:
    """All answers equal; of a hundred one may be excused as a tie."""
    before = len(excused)
    for call, mine, theirs in zip(calls, expected, got, strict=True):
        assert_same(folder, call, mine, theirs)
    assert len(excused) - before <= len(calls) // 100, excused[before:]
