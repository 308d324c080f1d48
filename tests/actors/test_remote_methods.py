"""Every method, with every drafter, over models behind the wire: what it is over models in one piece, to the count."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.verifiers.base import PACKAGE as VERIFIERS
from pool.local_pool import LocalPool
from pool.pool import Pool
from tests.actors.hosts import RemotePool
from tests.engine.harness import Reply, answer, ask, ask_all, call_of, random_prompts
from turnout.registry import load, names

# One loop for all: the models' locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
STEPS = {"separators": ["a", "e", "i"], "max_step_tokens": 6}
GRADED = {**STEPS, "rest": "large", "scorer": {"name": "self_grade", "threshold": 4.5, "reading": "expected"}}
TRIM = {"name": "trim", "asks": "small", "send_every": 4, "cues": ["a", "e"], "give_up_thoughts": 3}
KEEN = {"swift": {"threshold": 0.0, "context": 6}, "clasp": {"threshold": 0.0, "interval": 8}}
LOSSLESS = ("match", "rejection")

ARMS = [{"drafter": "model_chain"}, {"drafter": "copyspec"}, {"drafter": "medusa"}, {"drafter": "none"}]

FIXED: dict[str, Any] = {"length": "fixed"}
FIXED_HEADS: dict[str, Any] = {"drafter": "medusa", **FIXED}

Case = tuple[str, dict[str, Any]]


def drafted() -> list[Case]:
    """Speculation with every drafter, every lossless verifier and every length policy."""
    cases: list[Case] = []
    for name in names(DRAFTERS):
        part = load(DRAFTERS, name, "").PART
        drafter = {"name": name, **KEEN.get(name, {})}
        judges = [each for each in LOSSLESS if part.kinds & set(load(VERIFIERS, each, "").PART.accepts)]
        judges = judges or [next(v for v in names(VERIFIERS) if part.kinds & set(load(VERIFIERS, v, "").PART.accepts))]
        judges = judges if name == "model_chain" else judges[-1:]
        cases += [("speculative", {"drafter": drafter, "length": "fixed", "verifier": judge}) for judge in judges]
    for name in names(LENGTHS):
        part = load(LENGTHS, name, "").PART
        if "artifact" not in part.Params.model_fields:
            cases.append(("speculative", {"length": name, "verifier": "match"}))
    cases.append(("speculative", {"drafter": ARMS, "length": "fixed", "select": "first"}))
    return cases


OTHERS: list[Case] = [
    ("plain", {"model": "small"}),
    ("plain", {"model": "large"}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
    ("entropy_adaptive", {"window": 2, "min_stay": 1, "threshold": 2.0, "effect": "current"}),
    ("random_switch", {}),
    ("sentence_lead", {}),
    ("sentence_lead", {"lead_tokens": 2}),
    ("step_speculation", {**GRADED, "speculate": None}),
    ("step_speculation", {**GRADED, "speculate": {"length": "fixed"}}),
    ("best_of", {}),
    ("best_of", {"k": 3, "rerank": "self_certainty"}),
    ("cascade", {"threshold": -2.0}),
    ("cascade", {"threshold": 1.0}),
    ("cascade", {"threshold": 2.0, "uncertainty": {"name": "snne", "samples": 3}}),
    ("abstain", {"uncertainty": {"name": "snne", "samples": 3, "similarity": "embedding"}}),
    ("monitored", {"inner": "plain", "monitor": TRIM}),
    ("monitored", {"inner": {"name": "speculative", "length": "fixed"}, "monitor": {**TRIM, "asks": "number"}}),
    ("pearl", {"draft_length": 3}),
    ("pearl", {"draft_length": 3, "verifier": "rejection"}),
]


# What they do besides the text depends on measured times, or on what runs beside what.
RACY: list[Case] = [
    ("speculative", {}),
    ("speculative", {"drafter": ARMS, "select": "ucb"}),
    ("speculative", {"drafter": ARMS, "select": "exp3"}),
    ("entropy_adaptive", {"window": 3, "min_stay": 2, "threshold": 2.0, "catch_up": "eager"}),
    ("entropy_adaptive", {"window": 3, "min_stay": 2, "threshold": 2.0, "catch_up": "shadow"}),
    ("pearl", {}),
]


def said(reply: Reply) -> Any:
    """The text, token by token."""
    return [[(token.id, token.source) for token in each] for each in reply.answers], reply.texts, reply.reasons


def figures(replies: list[Reply]) -> list[float]:
    """What is reported with the tokens; it moves a little with what else is in a forward."""
    tokens = [token for reply in replies for each in reply.answers for token in each]
    return [value for token in tokens for value in (token.logprob, token.entropy_bits) if value is not None]


def assert_said(got: list[Reply], expected: list[Reply]) -> None:
    """The same text, and figures as near as rounding lets them be."""
    assert [said(each) for each in got] == [said(each) for each in expected]
    assert figures(got) == pytest.approx(figures(expected), abs=1e-3)


def told(reply: Reply) -> Any:
    """Everything of a reply but its times."""
    usage, kinds = reply.usage, [[token.kind for token in each] for each in reply.answers]
    speculation = {**vars_of(usage.speculation), "draft_s": 0, "verify_s": 0}
    return said(reply), kinds, {n: vars_of(m) for n, m in usage.models.items()}, speculation, usage.notes


def vars_of(meter: Any) -> dict[str, Any]:
    return {name: getattr(meter, name) for name in type(meter).__dataclass_fields__}


def identify(case: Any) -> str | None:
    if isinstance(case, dict):
        return ",".join(str(v.get("name", "") if isinstance(v, dict) else v)[:24] for v in case.values())
    return None


async def replies(pool: Pool, case: Case, count: int = 2, **options: Any) -> list[Reply]:
    """One after the other, so that forwards hold the same rows in both pools."""
    method, params = case
    prompts = [prompt * 3 for prompt in random_prompts(count, 12, seed=4)]
    got = []
    for seed, prompt in enumerate(prompts):
        sampling = {**SAMPLED, "logprobs": 2} if seed % 2 else {}
        got.append(await ask(pool, prompt, method, params, max_tokens=10, seed=seed, **sampling, **options))  # type: ignore[arg-type]
    return got


@pytest.mark.parametrize(("method", "params"), drafted() + OTHERS, ids=identify)
async def test_a_method_does_the_same_behind_the_wire(
    pools: tuple[LocalPool, RemotePool], remote: RemotePool, method: str, params: dict[str, Any]
) -> None:
    expected, got = [await replies(pool, (method, params)) for pool in pools]
    assert_said(got, expected)
    assert [told(each) for each in got] == [told(each) for each in expected]


@pytest.mark.parametrize(("method", "params"), RACY, ids=identify)
async def test_a_method_says_the_same_behind_the_wire(
    pools: tuple[LocalPool, RemotePool], method: str, params: dict[str, Any]
) -> None:
    expected, got = [await replies(pool, (method, params)) for pool in pools]
    ids = [[[token.id for token in each] for each in reply.answers] for reply in (*expected, *got)]
    assert ids[:2] == ids[2:]
    assert [each.texts for each in got] == [each.texts for each in expected]


async def test_many_at_once_do_not_disturb_each_other(pools: tuple[LocalPool, RemotePool]) -> None:
    cases = [("plain", {}), ("speculative", FIXED), OTHERS[2], ("best_of", {}), ("speculative", FIXED_HEADS)]
    calls = [
        call_of(prompt, method, params, max_tokens=24, seed=seed, **(SAMPLED if seed % 2 else {}))
        for seed, prompt in enumerate(random_prompts(4, 30, seed=9))
        for method, params in cases
    ]
    expected = [await answer(pools[0], call) for call in calls]
    got = await ask_all(pools[1], calls)  # type: ignore[arg-type]
    assert_said(got, expected)


async def test_what_cancelled_answers_wrote_is_counted(remote: RemotePool) -> None:
    """Planted: where a cancelled call is not waited for, its tokens are in no usage."""
    shown = discarded = 0
    for seed, prompt in enumerate(random_prompts(4, 12, seed=6)):
        params = {"k": 4, "rerank": "first_finish"}
        reply = await ask(remote, prompt, "best_of", params, max_tokens=40, seed=seed, temperature=1.0, stop=("a", "e"))  # type: ignore[arg-type]
        shown += len(reply.ids)
        discarded += reply.usage.models["large"].discarded_tokens
        assert reply.usage.models["large"].generated_tokens == len(reply.ids)
    assert shown < 4 * 40
    assert discarded >= 2 * shown


async def test_several_answers_share_their_prompt(pools: tuple[LocalPool, RemotePool]) -> None:
    expected, got = [await replies(pool, ("plain", {}), n=3) for pool in pools]
    assert_said(got, expected)
    assert [each.usage.models["large"].prompt_tokens for each in got] == [
        each.usage.models["large"].prompt_tokens for each in expected
    ]


@pytest.mark.parametrize("method", ["plain", "speculative", "entropy_adaptive"])
async def test_the_actor_stops_at_stop_strings_itself(pools: tuple[LocalPool, RemotePool], method: str) -> None:
    params = FIXED if method == "speculative" else {}
    whole, _ = [
        await ask(pool, [1, 2, 3], method, params, max_tokens=40, **SAMPLED)  # type: ignore[arg-type]
        for pool in pools
    ]
    text = whole.text
    middle = next(text[at : at + 2] for at in range(len(text) // 2, len(text)) if text[at : at + 2].isascii())
    expected, got = [
        await ask(pool, [1, 2, 3], method, params, max_tokens=40, stop=(middle,), **SAMPLED)  # type: ignore[arg-type]
        for pool in pools
    ]
    assert len(expected.ids) < len(whole.ids)
    assert told(got) == told(expected)


async def test_scores_are_the_same(pools: tuple[LocalPool, RemotePool]) -> None:
    from turnout.calls import ScoreCall

    call = ScoreCall("r", "pair", (1, 2, 3), ((4, 5), (6,)), 2)
    expected, got = [await pool.score(call) for pool in pools]
    assert got == expected


async def test_a_stretch_is_one_message(pools: tuple[LocalPool, RemotePool]) -> None:
    """So a token does not cost a hop: 8 tokens a stretch once an answer runs."""
    _, remote = pools
    line = remote.lines["large"]
    before = len(line.posts)
    reply = await ask(remote, [1, 2, 3], max_tokens=64, ignore_eos=True)  # type: ignore[arg-type]
    assert len(reply.ids) == 64
    assert len(line.posts) - before <= 4 + 64 // 8 + 2
    await asyncio.sleep(0)
