"""Step speculation and monitors over loaded models: the same text as in their limits, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool.local_pool import LocalPool
from tests.engine.harness import Reply, answer, ask, ask_all, assert_claimed, call_of, random_prompts, reference
from tests.engine.margin import assert_same_tokens
from turnout.types import FinishReason

STEPS = {"separators": ["a", "e", "i"], "max_step_tokens": 6, "rest": "large"}
NEVER = {
    "name": "trim",
    "asks": "number",
    "give_up_share": 1.0,
    "loop_tokens": 4096,
    "give_up_thoughts": 10_000,
    "thinking_start": "",
}


def scores(folder: Path, role: str, reply: Reply, prompt: list[int], call: Any) -> Any:
    return lambda place: reference(folder / role).scores(prompt, reply.ids, call.sampling, call.sampling.seed)[place]


@pytest.mark.parametrize(("threshold", "role"), [(0, "small"), (10, "large")])
@pytest.mark.parametrize("speculate", [None, {}])
async def test_the_limits_of_the_grade_are_the_models_alone(
    pool: LocalPool, pair_folder: Path, threshold: int, role: str, speculate: Any
) -> None:
    params = {**STEPS, "scorer": {"name": "self_grade", "threshold": threshold}, "speculate": speculate}
    if role == "small":
        params["rest"] = "small"
    prompts = random_prompts(8, 30)
    steps = await ask_all(pool, [call_of(prompt, "step_speculation", params, max_tokens=40) for prompt in prompts])
    plain = await ask_all(pool, [call_of(prompt, "plain", {"model": role}, max_tokens=40) for prompt in prompts])
    for prompt, ours, theirs in zip(prompts, steps, plain, strict=True):
        call = call_of(prompt, "plain", max_tokens=40)
        assert_same_tokens(theirs.ids, ours.ids, scores(pair_folder, role, theirs, prompt, call))
        drafted = ours.usage.models["small"].discarded_tokens
        assert (drafted > 0) == (role == "large")


async def test_every_token_is_its_models_own_choice(pool: LocalPool, pair_folder: Path) -> None:
    """Greedy, with grades on either side of the threshold: whoever claims a token would have said it there."""
    params = {**STEPS, "scorer": {"name": "self_grade", "threshold": 4.5, "reading": "expected"}, "speculate": {}}
    calls = [call_of(prompt, "step_speculation", params, max_tokens=40) for prompt in random_prompts(8, 30, seed=1)]
    replies = await ask_all(pool, calls)
    for call, reply in zip(calls, replies, strict=True):
        assert_claimed(pair_folder, call, reply)
    kept = sum(reply.usage.models["small"].generated_tokens for reply in replies)
    assert 0 < kept < sum(len(reply.ids) for reply in replies)


@pytest.mark.parametrize("inner", ["plain", "entropy_adaptive", "speculative", "step_speculation"])
async def test_a_silent_monitor_changes_no_token(pool: LocalPool, pair_folder: Path, inner: str) -> None:
    # By measured times, who drafted a token differs from run to run.
    params = {"length": "fixed"} if inner == "speculative" else {}
    for prompt in random_prompts(3, 20, seed=2):
        alone = await ask(pool, prompt, inner, params, max_tokens=30)
        given = {"inner": {"name": inner, **params}, "monitor": NEVER}
        watched = await ask(pool, prompt, "monitored", given, max_tokens=30)
        assert [(token.id, token.source) for token in watched.tokens] == [
            (token.id, token.source) for token in alone.tokens
        ]
        assert watched.text == alone.text


async def test_the_small_model_is_asked_beside_the_writing_and_let_go(pool: LocalPool) -> None:
    monitor = {**NEVER, "asks": "small", "cues": ["a", "e", "i", "o", "t", " ", "n"], "send_every": 1, "agree": 1}
    prompts = random_prompts(6, 20, seed=3)
    calls = [call_of(prompt, "monitored", {"monitor": monitor}, max_tokens=60) for prompt in prompts]
    replies = await ask_all(pool, calls)
    assert any("small" in reply.usage.models for reply in replies)
    assert all(len(reply.ids) == 60 or reply.reasons == [FinishReason.STOP] for reply in replies)
    # What the pool fixture checks after each test: no sequence and no block is held.


async def test_injected_text_is_read_as_if_it_had_been_written(pool: LocalPool, pair_folder: Path) -> None:
    """After the injection every token is the large model's choice after all that stands before it."""
    monitor = {**NEVER, "give_up_share": 0.3, "force": "so then"}
    for prompt in random_prompts(4, 20, seed=4):
        call = call_of(prompt, "monitored", {"monitor": monitor}, max_tokens=40, ignore_eos=True)
        reply = await answer(pool, call)
        injected = [place for place, token in enumerate(reply.tokens) if token.source == "injected"]
        assert "".join(reply.tokens[place].text for place in injected) == "so then"
        assert "so then" in reply.text
        plain = reference(pair_folder / "large").scores(prompt, reply.ids, call.sampling, 11)
        for place, token in enumerate(reply.tokens):
            if token.source == "large":
                assert plain[place].max() - plain[place][token.id] < 1e-4
        assert reply.usage.models["injected"].flops == 0.0


async def test_rounds_go_on_after_the_end_token(pool: LocalPool) -> None:
    [prompt] = random_prompts(1, 20, seed=5)
    alone = await ask(pool, prompt, max_tokens=60, temperature=1.0)
    end = alone.ids[8]  # a token that the answer is made to end with
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "stop_token_ids": (end,)}
    params = {"monitor": {"name": "enough", "threshold": -1.0, "rounds": 3, "cue": "!"}}
    reply = await ask(pool, prompt, "monitored", params, **common)
    first = alone.ids.index(end) + 1
    assert reply.ids[:first] == alone.ids[:first]
    assert [token.source for token in reply.tokens][first] == "injected"
    assert all(token.top == () and token.logprob is None for token in reply.tokens)
    assert reply.usage.notes[0].startswith("mean entropy by round")
