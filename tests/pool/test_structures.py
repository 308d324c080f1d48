"""Structures through the whole engine: answers validate, end by themselves, and what cannot be followed is refused."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import threading
import time
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.structures import Compiler
from pool import structures as engine_structures
from pool.local_pool import LocalPool
from pool.structures import KEPT, Structures
from tests.constrained import END, char_vocabulary, random_schema
from tests.engine.harness import answer, ask, ask_all, call_of
from tests.pool.resuming import Client, run
from turnout.calls import Delivered
from turnout.errors import Code, TurnoutError
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

SCHEMAS = 24
MANY = 200
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("speculative", {"drafter": "model_chain"}),
    ("speculative", {"drafter": "model_tree", "verifier": "rejection"}),
    ("entropy_adaptive", {"threshold": 2.0, "window": 2, "min_stay": 1}),
    ("random_switch", {}),
    ("cascade", {"threshold": -1.0}),
    ("best_of", {"k": 2}),
    ("pearl", {}),
]


def schema(value: Any) -> Structure:
    return Structure.model_validate({"json_schema": value})


def compiled_by(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None, begun: threading.Event | None = None
) -> list[str]:
    """What is compiled from now on, in order; the first one waits for the gate."""
    compile_one, compiled = Structures._compile, list[str]()

    def counted(self: Structures, structure: Structure) -> Any:
        compiled.append(structure.value)
        if begun is not None and gate is not None:
            begun.set()
            gate.wait(30)
        return compile_one(self, structure)

    monkeypatch.setattr(Structures, "_compile", counted)
    return compiled


def made_schemas() -> list[dict[str, Any]]:
    draw = random.Random(8)
    return [random_schema(draw) for _ in range(MANY)]


@pytest.mark.parametrize("count", [SCHEMAS, pytest.param(MANY, marks=pytest.mark.exactness)])
async def test_every_finished_answer_validates(pool: LocalPool, count: int) -> None:
    calls = [
        call_of(
            f"Item {place}:", *METHODS[place % len(METHODS)], max_tokens=160, temperature=0.9, structure=schema(made)
        )
        for place, made in enumerate(made_schemas()[:count])
    ]
    finished = 0
    for call, reply in zip(calls, await ask_all(pool, calls), strict=True):
        assert call.sampling.structure is not None
        if reply.reasons[0] is FinishReason.STOP:
            jsonschema.validate(json.loads(reply.text), json.loads(call.sampling.structure.value))
            finished += 1
        else:
            assert len(reply.ids) == 160
    assert finished >= 0.9 * count


async def test_a_structure_that_leaves_one_token_switches_nobody(pool: LocalPool) -> None:
    """The small model is unsure of every byte of this text, but it has no choice of any: none is the large model's."""
    text, threshold = "abcdefghij", 0.2
    prompt = [*b"Spell:"]
    params = {"threshold": threshold, "window": 1, "min_stay": 1, "effect": "current", "min_stay_small": 0}
    seq = Sequence(prompt, SamplingParams(temperature=0.0), 0)
    wide = ReadSpec(draw=None, entropy=True)
    rows = await pool.model_pool.small.extend(seq, tuple(text[:-1].encode()), wide, every=True)
    pool.model_pool.small.release(seq)
    assert min(row.entropy_bits or 0.0 for row in rows) > threshold
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "token_details": True}
    forced = await ask(pool, prompt, "entropy_adaptive", params, structure=_regex(text), **options)
    assert forced.text == text
    assert forced.usage.switches == 0
    assert {token.source for token in forced.tokens} == {"small"}
    assert {token.entropy_bits for token in forced.tokens[:-1]} == {0.0}  # the last one is one of two that end it
    assert forced.usage.cost.large_share == 0.0
    chosen = await ask(pool, prompt, "entropy_adaptive", params, structure=_regex("[a-z]{10}"), **options)
    assert chosen.usage.switches > 0  # where the structure leaves a choice, doubt counts
    assert all((token.entropy_bits or 0.0) <= math.log2(26) + 1e-4 for token in chosen.tokens)


def _regex(value: str) -> Structure:
    return Structure(kind="regex", value=value)


async def test_open_objects_have_every_name_once(pool: LocalPool) -> None:
    """Additional properties are none of those declared, and these are what they were declared to be."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    wanted = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    calls = [
        call_of(f"{place}", *METHODS[place % 3], max_tokens=60, temperature=0.9, seed=place, structure=schema(wanted))
        for place in range(12)
    ]
    whole = [reply.text for reply in await ask_all(pool, calls) if reply.reasons == [FinishReason.STOP]]
    assert len(whole) >= 2
    for text in whole:
        jsonschema.validate(json.loads(text, object_pairs_hook=once), wanted)


async def test_a_call_moves_on_with_its_structure(pool: LocalPool) -> None:
    """Handed over again and again: what goes on elsewhere makes its constraint anew and is held to it."""
    for method, params in METHODS[:2]:
        call = call_of([*b"Person:"], method, params, max_tokens=80, temperature=0.8, structure=schema(PERSON))
        whole, client, moved, moves = await answer(pool, call), Client.of(call), None, 0
        while client.usage is None:
            moved = await run(pool, replace(call, moved=moved), client, 3, again=True)
            moves += moved is not None
        assert moves > 1
        assert client.ids[0] == whole.ids
        assert client.texts[0] == whole.text
        if whole.reasons == [FinishReason.STOP]:
            jsonschema.validate(json.loads(client.texts[0]), PERSON)


@pytest.mark.parametrize(("method", "params"), METHODS, ids=str)
async def test_every_method_ends_with_a_whole_text(pool: LocalPool, method: str, params: dict[str, Any]) -> None:
    for temperature in (0.0, 1.0):
        reply = await ask(
            pool,
            "Who?",
            method,
            params,
            max_tokens=60,
            temperature=temperature,
            structure=Structure(kind="regex", value="[a-z]{3,6} (is|was) [0-9]{2}"),
        )
        assert reply.reasons == [FinishReason.STOP]
        assert re.fullmatch("[a-z]{3,6} (is|was) [0-9]{2}", reply.text)


async def test_lossless_methods_give_the_plain_answer(pool: LocalPool) -> None:
    lossless = [("plain", {}), ("speculative", {"drafter": "model_chain"}), ("speculative", {"drafter": "copyspec"})]
    calls = [
        call_of("Person:", method, params, max_tokens=80, temperature=0.8, structure=schema(PERSON))
        for method, params in lossless
    ]
    plain, *others = await ask_all(pool, calls)
    assert [reply.ids for reply in others] == [plain.ids] * len(others)


async def test_several_answers_each_fit(pool: LocalPool) -> None:
    reply = await ask(pool, "x", n=4, temperature=1.0, max_tokens=100, structure=Structure(kind="json_object"))
    for text, reason in zip(reply.texts, reply.reasons, strict=True):
        if reason is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)
        else:
            assert text.startswith("{")
    reply = await ask(pool, "x", n=4, temperature=1.0, structure=Structure.model_validate({"choice": ["yes", "no"]}))
    assert set(reply.texts) <= {"yes", "no"}
    assert reply.reasons == [FinishReason.STOP] * 4


async def test_the_best_part_of_a_passage_is_of_whole_characters(pool: LocalPool) -> None:
    """One token is one byte here, so that most of these could begin or end within a character."""
    for passage in ("\u00e4\u00f6\u00fc", "\u20ac\u4e2d\u6587 \u00df", "a\u00e4"):
        options: dict[str, Any] = {"max_tokens": 9, "structure": Structure(kind="span", value=passage)}
        for normalised in (False, True):
            reply = await ask(pool, f"Of {passage}:", "exact_span", {"normalised": normalised}, **options)
            assert reply.reasons == [FinishReason.STOP]
            assert reply.text in passage
            assert not any("plain" in note for note in reply.usage.notes)


async def test_a_cut_answer_says_so(pool: LocalPool) -> None:
    reply = await ask(pool, "x", max_tokens=3, structure=Structure(kind="regex", value="[a-z]{9}"))
    assert reply.reasons == [FinishReason.LENGTH]
    assert re.fullmatch("[a-z]{3}", reply.text)


async def test_stop_strings_still_hold(pool: LocalPool) -> None:
    reply = await ask(pool, "x", max_tokens=40, stop=("7",), structure=Structure(kind="regex", value="abc7def"))
    assert reply.text == "abc"
    assert reply.reasons == [FinishReason.STOP]


@pytest.mark.parametrize("kept", [0, 1, 4, 9])
async def test_an_answer_goes_on_elsewhere(pool: LocalPool, kept: int) -> None:
    for method, params in METHODS[:3]:
        call = call_of("Person:", method, params, max_tokens=80, temperature=0.8, structure=schema(PERSON))
        whole = await answer(pool, call)
        tokens = tuple(whole.ids[:kept])
        call = call_of("Person:", method, params, max_tokens=80, temperature=0.8, structure=schema(PERSON))
        rest = await answer(pool, replace(call, delivered=(Delivered(tokens, kept),)))
        assert rest.ids == whole.ids[kept:]
        json.loads(whole.text[:kept] + rest.text)


async def test_entropies_are_of_the_free_distribution(pool: LocalPool) -> None:
    """The switch looks at what the model is unsure of, not at what the structure leaves it."""
    bound = await ask(pool, "x", logprobs=1, structure=Structure.model_validate({"choice": ["abc"]}))
    assert bound.text == "abc"
    assert bound.tokens[0].logprob is not None
    assert bound.tokens[0].logprob < -0.01
    free = await ask(pool, "x", logprobs=1)
    assert bound.tokens[0].top == free.tokens[0].top


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"structure": schema(False)}, "structure", "no text fits"),
        ({"structure": Structure(kind="regex", value="(")}, "structure", "regex"),
        ({"structure": schema({"type": "array", "uniqueItems": True})}, "structure.uniqueItems", "not supported"),
        ({"structure": schema(PERSON), "ignore_eos": True}, "ignore_eos", "ends where"),
    ],
)
async def test_refused_before_anything_is_computed(
    pool: LocalPool, options: dict[str, Any], field: str, said: str
) -> None:
    for _ in range(2):
        with pytest.raises(TurnoutError) as refused:
            await ask(pool, "x", **options)
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert refused.value.field == field
        assert said in refused.value.message
    assert pool.stats().used_blocks == 0


async def test_a_method_that_puts_in_words_is_refused(pool: LocalPool) -> None:
    with pytest.raises(TurnoutError, match="monitored") as refused:
        await ask(pool, "x", "monitored", structure=schema(PERSON))
    assert refused.value.code is Code.INVALID_ARGUMENT


async def test_a_slow_structure_is_given_up_and_nobody_waits(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool.tokenizer.structures
    gate, begun = threading.Event(), threading.Event()
    compile_one = Structures._compile

    def slow(self: Structures, structure: Structure) -> Any:
        if structure.value == "slow":
            begun.set()
            gate.wait(30)
        return compile_one(self, structure)

    monkeypatch.setattr(Structures, "_compile", slow)
    monkeypatch.setattr(engine_structures, "COMPILE_S", 0.2)
    waiting = asyncio.create_task(ask(pool, "x", structure=Structure(kind="regex", value="slow")))
    assert await asyncio.to_thread(begun.wait, 10)
    assert (await ask(pool, "x")).ids  # plain calls go on
    queued = asyncio.create_task(ask(pool, "x", structure=Structure(kind="regex", value="queued")))
    with pytest.raises(TurnoutError, match="too complex") as refused:
        await waiting
    assert refused.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(TurnoutError, match="others wait") as busy:
        await queued
    assert (busy.value.code, busy.value.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 1.0)
    monkeypatch.setattr(engine_structures, "COMPILE_S", 30.0)
    gate.set()
    assert (await ask(pool, "x", structure=Structure(kind="regex", value="slow"))).text == "slow"
    assert len(made) >= 1


async def test_the_latest_structures_are_kept_and_a_tenant_pushes_out_its_own(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compiled = pool.tokenizer.structures, compiled_by(monkeypatch)

    async def answered(tenant: str, value: str) -> str:
        call = call_of("x", structure=Structure(kind="regex", value=value))
        return (await answer(pool, replace(call, tenant=tenant))).text

    assert [await answered("quiet", f"q{number}") for number in range(3)] == ["q0", "q1", "q2"]
    for number in range(KEPT + 5):
        assert await answered("loud", f"{number}x") == f"{number}x"
    assert len(made) == KEPT
    compiled.clear()
    assert await answered("quiet", "q0") == "q0"
    assert await answered("loud", f"{KEPT + 4}x") == f"{KEPT + 4}x"
    assert compiled == []
    assert await answered("loud", "q0") == "q0"
    assert compiled == ["q0"], "what others asked for is not found: how fast it is there would tell of it"


async def test_tenants_take_turns(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for many new structures is no wall for the next; who gives up leaves the queue."""
    gate, begun = threading.Event(), threading.Event()
    compiled = compiled_by(monkeypatch, gate, begun)
    structures = pool.tokenizer.structures

    def wanted(tenant: str, value: str) -> asyncio.Task[Any]:
        return asyncio.create_task(structures.made(Structure(kind="regex", value=value), tenant))

    many = [wanted("loud", f"loud{number}") for number in range(6)]
    assert await asyncio.to_thread(begun.wait, 10)
    others = [wanted("b", "b0"), wanted("b", "b1"), wanted("c", "c0"), wanted("gone", "gone")]
    await asyncio.sleep(0)
    many[2].cancel()
    others[-1].cancel()
    await asyncio.wait((many[2], others[-1]))
    gate.set()
    await asyncio.gather(*many[:2], *many[3:], *others[:-1])
    assert compiled == ["loud0", "b0", "c0", "loud1", "b1", "loud3", "loud4", "loud5"]


async def test_a_fault_of_a_compiler_is_its_callers_alone(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one = Structures._compile

    def faulty(self: Structures, structure: Structure) -> Any:
        if structure.value == "faulty":
            raise MemoryError("made by the test")
        return compile_one(self, structure)

    monkeypatch.setattr(Structures, "_compile", faulty)
    asked = [ask(pool, "x", structure=Structure(kind="regex", value=value)) for value in ("faulty", "after")]
    first, second = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, MemoryError)
    assert not isinstance(second, BaseException)
    assert second.text == "after"


async def test_what_is_too_deep_for_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(*_: object) -> None:
        raise RecursionError("made by the test")

    structures = Structures(frozenset({END}), lambda: char_vocabulary().definition)
    monkeypatch.setattr(Compiler, "compile", too_deep)
    with pytest.raises(TurnoutError, match="structure: the regex is nested too deeply") as refused:
        await structures.made(Structure(kind="regex", value="a"), "one")
    structures.close()
    assert refused.value.code is Code.INVALID_ARGUMENT


async def test_a_turn_that_comes_late_still_has_its_whole_time(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one = Structures._compile

    def slow(self: Structures, structure: Structure) -> Any:
        if structure.value.startswith("late"):
            done = time.monotonic() + 3.0  # the work itself, on the thread that compiles
            while time.monotonic() < done:
                time.sleep(0.01)
        return compile_one(self, structure)

    monkeypatch.setattr(Structures, "_compile", slow)
    monkeypatch.setattr(engine_structures, "COMPILE_S", 5.9)
    replies = [ask(pool, "x", structure=Structure(kind="regex", value=f"late{number}")) for number in range(2)]
    assert [reply.text for reply in await asyncio.gather(*replies)] == ["late0", "late1"]


async def test_the_thread_ends_with_its_pool_and_comes_back_where_it_is_asked(pool: LocalPool) -> None:
    made = pool.tokenizer.structures
    assert (await ask(pool, "x", structure=Structure(kind="regex", value="before"))).text == "before"
    before = made._thread
    assert before is not None
    made.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        before.submit(print)
    assert (await ask(pool, "x", structure=Structure(kind="regex", value="after"))).text == "after"
