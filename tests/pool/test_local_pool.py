"""The pool from call to events: answers, scores, sharing, and what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.model import ModelPool, Request, StopCondition
from decoding.noise import derive_seed
from pool.local_pool import LocalPool
from pool.prompt_ids import scored_ids
from pool.text import LONG, TextTokenizer
from tests.engine.harness import answer, ask, ask_all, call_of, pair_config, random_prompts, reference
from training.random_models import byte_tokenizer, llama_config, random_model
from turnout.calls import ChatMessage, ScoreCall, Usage
from turnout.config import PoolConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.message_size import MOST_UNITS, units
from turnout.registry import MethodInfo, MethodParams
from turnout.types import FinishReason

VOCAB = 261
PROMPT = [65, 66, 67]


def bad(field: str, code: Code, says: str, prompt: Any = "hi", *args: Any, **options: Any) -> Any:
    return pytest.param(field, code, says, call_of(prompt, *args, **options), id=f"{field}: {says}")


BAD_CALLS = [
    bad("model", Code.NOT_FOUND, "'nobody' is not known; available: large, pair, small", model="nobody"),
    bad("method", Code.NOT_FOUND, "'magic' is not known; available: ", "hi", "magic"),
    bad("method", Code.INVALID_ARGUMENT, "is one model", "hi", "speculative", model="large"),
    bad("method.params.depth", Code.INVALID_ARGUMENT, "unknown; allowed here: model", "hi", "plain", {"depth": 3}),
    bad("method.params.model", Code.INVALID_ARGUMENT, "'large' or 'small'", "hi", "plain", {"model": "huge"}),
    bad("method.params.draft_length", Code.INVALID_ARGUMENT, "1", "hi", "speculative", {"draft_length": 0}),
    bad("method.params.window", Code.INVALID_ARGUMENT, "1024", "hi", None, {"window": 10_000}),
    bad("method.params.threshold", Code.INVALID_ARGUMENT, "finite", "hi", None, {"threshold": float("nan")}),
    bad("prompt", Code.INVALID_ARGUMENT, "is empty", ""),
    bad("prompt", Code.INVALID_ARGUMENT, "is empty", []),
    bad("prompt", Code.INVALID_ARGUMENT, "either a prompt or messages", None),
    bad("prompt", Code.INVALID_ARGUMENT, "either a prompt or messages", messages=(ChatMessage("user", "a"),)),
    bad("messages", Code.INVALID_ARGUMENT, "is empty", None, messages=()),
    bad("prompt", Code.OUT_OF_RANGE, "512 tokens; at most 511 fit the context of 512", [65] * 512),
    bad("messages", Code.OUT_OF_RANGE, "at most 511", None, messages=(ChatMessage("user", "a" * 600),)),
    bad("prompt", Code.OUT_OF_RANGE, "token id 261; allowed: 0 to 260", [65, 261]),
    bad("prompt", Code.OUT_OF_RANGE, "token id -1; allowed: 0 to 260", [-1, 65]),
    bad("stop_token_ids", Code.OUT_OF_RANGE, "token id 261; allowed: 0 to 260", stop_token_ids=(3, 261)),
    bad("logit_bias", Code.OUT_OF_RANGE, "token id 300; allowed: 0 to 260", logit_bias={300: 1.0}),
    bad("logit_bias", Code.OUT_OF_RANGE, "token id -4; allowed: 0 to 260", logit_bias={-4: 1.0}),
]


@pytest.mark.parametrize(("field", "code", "says", "call"), BAD_CALLS)
async def test_bad_calls_are_refused_by_field(pool: LocalPool, field: str, code: Code, says: str, call: Any) -> None:
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert caught.value.message.startswith(f"{field}: ")
    assert says in caught.value.message
    assert pool.stats().requests == 0


async def test_chat_without_a_template_is_refused(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.tokenizer._tokenizer, "chat_template", None)
    with pytest.raises(TurnoutError, match="messages: this model has no chat template"):
        await answer(pool, call_of(None, messages=(ChatMessage("user", "a"),)))


async def test_a_template_that_renders_nothing_is_refused(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.tokenizer._tokenizer, "chat_template", "{# nothing #}")
    with pytest.raises(TurnoutError, match="messages: is empty"):
        await answer(pool, call_of(None, messages=(ChatMessage("user", "a"),)))


async def test_an_answer_fills_the_context_and_no_more(pool: LocalPool) -> None:
    reply = await ask(pool, [65] * 500, max_tokens=100, ignore_eos=True)
    assert len(reply.ids) == 12
    assert reply.reasons == [FinishReason.LENGTH]
    drafted = await ask(
        pool, [65] * 500, "speculative", {"length": "fixed", "draft_length": 8}, max_tokens=100, ignore_eos=True
    )
    assert drafted.ids == reply.ids


async def test_text_prompts_chats_and_ids_agree(pool: LocalPool) -> None:
    ids = await pool.tokens(call_of("héllo"))
    assert (await ask(pool, ids)).ids == (await ask(pool, "héllo")).ids
    chat = (ChatMessage("user", "héllo"),)
    by_chat = await answer(pool, call_of(None, "plain", messages=chat))
    assert by_chat.ids == (await ask(pool, pool.tokenizer.encode_chat(chat))).ids
    assert by_chat.text == pool.decode(by_chat.ids)


LONG_TEXT = "a" * (LONG + 1)


async def test_a_long_prompt_is_encoded_while_others_are_answered(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a tokenizer of its own: one is not for two threads."""
    begun, go, used = threading.Event(), threading.Event(), list[TextTokenizer]()
    encode = TextTokenizer.encode

    def held(tokenizer: TextTokenizer, text: str, *args: bool) -> list[int]:
        if len(text) > LONG:
            used.append(tokenizer)
            begun.set()
            assert go.wait(30), "nobody else was answered meanwhile"
        return encode(tokenizer, text, *args)

    monkeypatch.setattr(TextTokenizer, "encode", held)
    intake = replace(pool.intake(), max_length=10 * LONG)
    score = ScoreCall("r", "pair", LONG_TEXT, ("b",))
    plain = asyncio.create_task(pool.tokens(call_of(LONG_TEXT)))
    admitted = asyncio.create_task(intake.admit(call_of(LONG_TEXT)))
    scored = asyncio.create_task(scored_ids(score, pool.tokenizer, VOCAB, 10 * LONG))
    await asyncio.to_thread(begun.wait, 30)
    assert len((await ask(pool, "hi", max_tokens=4, ignore_eos=True)).ids) == 4
    go.set()
    ids, [(prompt, completions)] = await plain, await scored
    assert ids == (await admitted).prompt == prompt == encode(pool.tokenizer, LONG_TEXT)
    assert completions == [tuple(encode(pool.tokenizer, "b"))]
    assert len(used) == 3
    assert pool.tokenizer not in used


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("prompt", call_of(LONG_TEXT)),
        ("messages", call_of(None, messages=(ChatMessage("user", LONG_TEXT),))),
    ],
)
async def test_what_can_never_fit_is_refused_before_it_is_encoded(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch, field: str, call: Any
) -> None:
    def unwanted(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was encoded")

    assert pool.tokenizer._twin is not pool.tokenizer  # made before: it encodes to find out what begins a text
    monkeypatch.setattr(TextTokenizer, "encode", unwanted)
    monkeypatch.setattr(type(pool.tokenizer._tokenizer), "encode", unwanted)
    with pytest.raises(TurnoutError, match=r"at least \d+ tokens; at most 511 fit$") as refused:
        await answer(pool, call)
    assert (refused.value.field, refused.value.code) == (field, Code.OUT_OF_RANGE)
    with pytest.raises(TurnoutError, match=r"^completions.1: at least"):
        await pool.score(ScoreCall("r", "pair", (1,), ((2,), LONG_TEXT)))


async def test_a_member_answers_alone(pool: LocalPool) -> None:
    for role in ("small", "large"):
        alone = await answer(pool, call_of(PROMPT, model=role))
        assert alone.ids == (await ask(pool, PROMPT, "plain", {"model": role})).ids
        assert set(alone.usage.models) == {role}


async def test_what_a_pool_sets_for_its_method_holds_unless_a_request_says_otherwise(pool: LocalPool) -> None:
    pool.default_method, pool.default_params = "entropy_adaptive", {"threshold": 3.0, "window": 3}
    for method in (None, "entropy_adaptive"):
        assert (await ask(pool, PROMPT, method)).usage.params["threshold"] == 3.0
        changed = (await ask(pool, PROMPT, method, {"window": 2})).usage.params
        assert (changed["threshold"], changed["window"]) == (3.0, 2)
    params = (await ask(pool, PROMPT, "speculative")).usage.params
    assert [each["drafter"] for each in params["drafter"]] == ["copyspec", "model_chain"]
    assert (params["length"], params["select"], params["verifier"]) == ("smartspec", "goodput", "match")
    params = (await ask(pool, PROMPT, "speculative", {"drafter": "model_chain"})).usage.params
    assert (params["drafter"], params["length"], params["select"]) == ("model_chain", "smartspec", "first")


async def test_stop_strings_cut_the_text_and_end_the_answer(pool: LocalPool) -> None:
    whole = await ask(pool, "abc", max_tokens=40, ignore_eos=True)
    stop = whole.text[5:7]
    cut = await ask(pool, "abc", max_tokens=40, ignore_eos=True, stop=(stop,))
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert (cut.reasons, cut.stops, whole.stops) == ([FinishReason.STOP], [stop], [None])
    assert len(cut.ids) < 40
    by_id = await ask(pool, "abc", max_tokens=40, ignore_eos=True, stop_token_ids=(whole.ids[4],))
    assert by_id.ids == whole.ids[: whole.ids.index(whole.ids[4]) + 1]
    assert by_id.stops == [whole.ids[4]]


async def test_several_answers_have_derived_seeds_and_share_one_prompt(pool: LocalPool) -> None:
    prompt = random_prompts(1, 1, seed=1)[0] * 43
    reply = await ask(pool, prompt, n=4, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True)
    for index, tokens in enumerate(reply.answers):
        single = await ask(pool, prompt, temperature=1.0, seed=derive_seed(9, index), max_tokens=10, ignore_eos=True)
        assert [token.id for token in tokens] == single.ids
    assert len({tuple(token.id for token in tokens) for tokens in reply.answers}) > 1
    meter = reply.usage.models["large"]
    # 43 = 5 blocks of 8 and 3 tokens that each answer reads for itself.
    assert (meter.prompt_tokens, meter.cached_tokens) == (43 + 3 * 3, 3 * 40)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (43, 40, 0)
    assert (await ask(pool, prompt)).usage.cached_tokens == 40


async def test_an_absent_seed_is_random_and_reported(pool: LocalPool) -> None:
    first, second = [await ask(pool, PROMPT, temperature=1.0, seed=None) for _ in range(2)]
    assert first.usage.seed != second.usage.seed
    again = await ask(pool, PROMPT, temperature=1.0, seed=first.usage.seed)
    assert again.ids == first.ids


async def test_prefixes_are_shared_within_a_tenant_only(pool: LocalPool) -> None:
    prompt = [70] * 33
    cached = [(await ask(pool, prompt, tenant=tenant)).usage.cached_tokens for tenant in ("a", "b", "a", "b", "c")]
    assert cached == [0, 0, 32, 32, 0]


async def test_scores_are_log_softmax_of_the_plain_model(pool: LocalPool, pair_folder: Path) -> None:
    completions = (tuple(random_prompts(1, 60, seed=2)[0]), (5,), (80, 81, 82))
    for model, name in (("pair", "large"), ("small", "small"), ("large", "large")):
        scored = await pool.score(ScoreCall("s", model, tuple(PROMPT), completions))
        for completion, result in zip(completions, scored, strict=True):
            logits = reference(pair_folder / name).logits([*PROMPT, *completion])[len(PROMPT) - 1 : -1]
            logp = logits.log_softmax(-1)
            expected = [float(row[token]) for row, token in zip(logp, completion, strict=True)]
            assert [token.logprob for token in result.tokens] == pytest.approx(expected, abs=1e-4)
            assert [token.id for token in result.tokens] == list(completion)
            best = logp.argmax(-1).tolist()
            assert list(result.greedy) == [b == t for b, t in zip(best, completion, strict=True)]


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("model", ScoreCall("s", "nobody", "a", ("b",))),
        ("prompt", ScoreCall("s", "pair", "", ("b",))),
        ("prompt", ScoreCall("s", "pair", (999,), ("b",))),
        ("prompt", ScoreCall("s", "pair", "a", ("b" * 512,))),
        ("completions.1", ScoreCall("s", "pair", "a", ("b", ""))),
        ("completions.0", ScoreCall("s", "pair", "a", ((-1,),))),
    ],
)
async def test_bad_score_calls_are_refused_by_field(pool: LocalPool, field: str, call: ScoreCall) -> None:
    with pytest.raises(TurnoutError) as caught:
        await pool.score(call)
    assert caught.value.field == field


async def test_more_scores_than_one_answer_can_carry_are_refused_before_they_are_computed(pool: LocalPool) -> None:
    def call(number: int) -> ScoreCall:
        return ScoreCall("s", "pair", "a", (tuple([70] * 256),) * number, top=20)

    most = MOST_UNITS // units(256, 20)
    with pytest.raises(TurnoutError, match=f"completions: {256 * (most + 1)} tokens; at most 47662 at once") as refused:
        await pool.score(call(most + 1))
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "completions")
    [(prompt, completions)] = await scored_ids(call(most), pool.tokenizer, 256, 512)
    assert (len(prompt), len(completions)) == (1, most)


def stub(run: Any) -> MethodInfo:
    return MethodInfo("stub", run, MethodParams, (), False, frozenset())


async def test_an_error_inside_a_method_surfaces_once_and_frees_everything(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(request: Request, models: ModelPool, params: MethodParams) -> Any:
        for model in (models.small, models.large):
            yield await model.decode(request.sequence, engine_until(2))
        raise KeyError("a bug")

    monkeypatch.setattr("pool.validation.get_method", lambda name: stub(run))
    events, errors = 0, 0
    stream = pool.generate(call_of(PROMPT, "stub", n=3))
    try:
        async for _ in stream:
            events += 1
    except KeyError:
        errors += 1
    assert (events > 0, errors) == (True, 1)
    assert [event async for event in stream] == []
    await settled(pool)


def engine_until(count: int) -> Any:
    return StopCondition(max_tokens=count)


async def settled(pool: LocalPool) -> None:
    """Wait for the forward in progress, if any; then nothing may be held and no task may run."""
    async with asyncio.timeout(20):
        devices = [model.batcher.device for model in pool.engines.values()]
        while any(device._loop and not device._loop.done() for device in devices):
            await asyncio.sleep(0)
    stats = pool.stats()
    assert (stats.requests, stats.sequences, stats.used_blocks, stats.waiting) == (0, 0, 0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failing_forward_fails_its_requests_only(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = pool.engines["large"].batcher.runner
    original, expected = runner.run, await ask(pool, PROMPT)

    def failing(feeds: Any) -> Any:
        if any(len(feed.table.seq.tokens) >= 30 for feed in feeds):
            raise RuntimeError("no such kernel")
        return original(feeds)

    monkeypatch.setattr(runner, "run", failing)
    small = asyncio.create_task(ask(pool, [70] * 10, "plain", {"model": "small"}))
    with pytest.raises(RuntimeError, match="no such kernel"):
        await ask(pool, [70] * 40)
    assert (await small).ids
    assert (await ask(pool, PROMPT)).ids == expected.ids
    monkeypatch.setattr(runner, "run", original)
    again = await ask(pool, [70] * 40)
    fresh = await ask(pool, [70] * 40, tenant="other")
    assert again.ids == fresh.ids
    await settled(pool)


async def test_a_fault_while_planning_reaches_everybody_who_waits(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = pool.engines["large"].batcher._builder
    original = planner.plan

    def planning(*given: Any) -> Any:
        monkeypatch.setattr(planner, "plan", original)
        raise ZeroDivisionError

    monkeypatch.setattr(planner, "plan", planning)
    outcomes = await asyncio.gather(*(ask(pool, [i, 70]) for i in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 3
    assert (await ask(pool, PROMPT)).ids
    await settled(pool)


async def test_closing_the_pool_ends_calls_with_an_error(pair_folder: Path) -> None:
    loaded = LocalPool.load("pair", pair_config(pair_folder))
    stream = loaded.generate(call_of(PROMPT, "plain", max_tokens=400, ignore_eos=True))
    await anext(stream)
    await loaded.close()
    with pytest.raises(TurnoutError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code is Code.CANCELLED
    assert (loaded.stats().sequences, loaded.stats().used_blocks) == (0, 0)


async def test_models_of_one_vocabulary_padded_differently_work_together(tmp_path: Path) -> None:
    folder = tmp_path
    for name, size, seed in (("small", VOCAB + 40, 1), ("large", VOCAB, 2)):
        random_model(llama_config(size, pad_token_id=0), seed, spread=0.2).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    for swap in ({}, {"small": "large", "large": "small"}):
        loaded = LocalPool.load("pair", pair_config(folder, **swap))
        assert loaded.vocab_size == VOCAB
        for verifier in ("match", "rejection"):
            calls = [
                call_of(prompt, "speculative", {"verifier": verifier}, temperature=2.0, seed=i, ignore_eos=True)
                for i, prompt in enumerate(random_prompts(4, 10))
            ]
            for reply in await ask_all(loaded, calls):
                assert all(token.id < VOCAB for token in reply.tokens)
                assert len(reply.ids) == 16
        await loaded.close()


async def test_models_of_different_vocabularies_are_refused_where_the_default_takes_them_for_one(
    pair_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path
    random_model(llama_config(VOCAB + 1, pad_token_id=0), 1, spread=0.2).save_pretrained(folder / "other")
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(folder / "other")
    config = pair_config(pair_folder)
    other = config.models["small"].model_copy(update={"path": str(folder / "other")})
    mixed = TurnoutConfig(
        models={"other": other, "large": config.models["large"]},
        pools={"pair": PoolConfig(small="other", large="large")},
    )
    with pytest.raises(TurnoutError, match=r"pools.pair.default: 'entropy_adaptive' needs one .* 'other'"):
        LocalPool.load("pair", mixed)


async def test_the_usage_comes_last_and_adds_up(pool: LocalPool) -> None:
    events = [event async for event in pool.generate(call_of(PROMPT, "plain", max_tokens=9, ignore_eos=True))]
    assert [type(event) is Usage for event in events] == [False] * (len(events) - 1) + [True]
    usage = events[-1]
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.method) == (3, 9, "plain")
    assert 0 < usage.ttft_s <= usage.wall_s
    assert torch.get_num_threads() == 1
