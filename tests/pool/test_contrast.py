"""Contrasts of requests: refused by name before work starts, and in force in a pool's answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifact
from decoding.contrast.knn_lm import TokenStore
from deployments.grpc_messages import generate_call
from deployments.schemas import chat_job
from pool.local_pool import LocalPool
from pool.prompt_ids import num_chars
from tests.engine.harness import Reply, answer, call_of
from turnout.calls import Begun, ChatMessage, GenerateCall
from turnout.client_messages import generate_request
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.types import MOST_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = "ab ab ab ab"


def asked(contrast: Any, context: str = "", method: str = "plain", prompt: Any = "ab", **sampling: Any) -> GenerateCall:
    sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | sampling
    choice = PartChoice.model_validate(contrast) if contrast is not None else None
    return replace(call_of(prompt, method, **sampling), contrast=choice, context=context)


@pytest.mark.parametrize(
    ("call", "field", "said"),
    [
        (asked("cadd", CONTEXT), "contrast", "cad"),
        (asked({"name": "cad", "alpha": -1}, CONTEXT), "contrast.alpha", "greater than or equal to 0"),
        (asked("cad"), "context", "needs it"),
        (asked("cad", CONTEXT, "random_switch"), "contrast", "'random_switch' does not read it; allowed: cntp, "),
        (
            asked({"name": "contrastive", "amateur": "child"}),
            "contrast.amateur",
            "no model has the role 'child'; the pool's roles: large, small",
        ),
        (asked({"name": "dola", "layers": [99]}), "contrast.layers", "layer 99; allowed: 1 to"),
        (asked({"name": "cfg", "negative_prompt": "a" * 3000}), "contrast", "'negative' of 'cfg' has 3"),
        (asked("cad", CONTEXT, truncate_prompt_tokens=4), "truncate_prompt_tokens", "not allowed with contrast"),
        (asked(None, CONTEXT, prompt=(65, 66)), "context", "needs a prompt as text"),
        (asked("knn_lm"), "contrast.artifact", "'knn_lm' is not known"),
        (asked({"name": "caad", "artifact": "../x"}), "contrast.artifact", "should match pattern"),
        (asked({"name": "knn_lm", "weight": 1.5}), "contrast.weight", "less than or equal to 1"),
        (asked({"name": "knn_lm", "temperature": 0}), "contrast.temperature", "greater than 0"),
        (asked({"name": "caad", "neighbours": 0}), "contrast.neighbours", "greater than or equal to 1"),
        (asked({"name": "caad", "floor": float("nan")}), "contrast.floor", "finite"),
        (asked("lol"), "contrast.amateur", "no model has the role 'amateur'; the pool's roles: large, small"),
        (asked({"name": "lol", "amateur": "small", "layer": 2}), "contrast.layer", "layer 2; allowed: 1 to 1"),
        (asked("savcd"), "context", "contrast 'savcd' needs it"),
        (asked({"name": "savcd", "distortion": "blur"}, CONTEXT), "contrast.distortion", "'drop'"),
    ],
)
async def test_refusals_name_the_field(pool: LocalPool, call: GenerateCall, field: str, said: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call)
    assert (caught.value.field, said in caught.value.message) == (field, True), caught.value.message
    assert pool.stats().sequences == 0


async def test_an_amateur_of_another_vocabulary_is_refused(pool: LocalPool) -> None:
    foreign = replace(pool.intake(), foreign={"small": "small"})
    with pytest.raises(TurnoutError, match=r"^contrast\.amateur: the vocabulary of 'small' is not the pool's$"):
        foreign.prepare(asked("contrastive"))


async def test_an_answer_has_the_room_that_the_longest_stream_leaves(pool: LocalPool) -> None:
    """Where `max_tokens` is absent, the context would be filled."""
    prepared = pool.intake().prepare(asked({"name": "cfg", "negative_prompt": "a" * 50}, max_tokens=MOST_TOKENS))
    assert prepared.contrast is not None
    stream = len(prepared.contrast.prompts["negative"])
    assert (len(prepared.prompt) < stream, prepared.max_tokens) == (True, pool.max_length - stream)
    prepared = pool.intake().prepare(asked("cad", CONTEXT, max_tokens=MOST_TOKENS))
    assert prepared.max_tokens == pool.max_length - len(prepared.prompt)


async def test_the_tokens_of_streams_are_reported_when_it_begins(pool: LocalPool) -> None:
    call = replace(asked({"name": "cfg", "negative_prompt": "a" * 50}), include_prompt_len=True)
    begun, *_ = [event async for event in pool.generate(call)]
    stream = len(pool.tokenizer.encode("a" * 50))
    assert begun == Begun(len(pool.tokenizer.encode("ab")), stream)


async def test_long_texts_of_a_contrast_are_encoded_in_a_thread() -> None:
    assert num_chars(asked({"name": "cfg", "negative_prompt": "a" * 50}, CONTEXT)) == 50 + len(CONTEXT) + 2
    assert num_chars(asked("cfg", prompt=(65, 66))) == 2
    assert num_chars(asked(None, prompt=(65, 66))) == 0


async def test_a_context_stands_before_the_question(pool: LocalPool) -> None:
    def tokens(call: GenerateCall) -> list[int]:
        return pool.intake().prepare(call).prompt

    assert tokens(asked(None, CONTEXT)) == tokens(asked(None, prompt=f"{CONTEXT}\n\nab"))
    turns = (ChatMessage("system", "s"), ChatMessage("user", "q"))
    chat = replace(call_of("", "plain"), prompt=None, messages=turns)
    joined = replace(chat, messages=(turns[0], ChatMessage("user", f"{CONTEXT}\n\nq")))
    assert tokens(replace(chat, context=CONTEXT)) == tokens(joined)
    assert await pool.tokens(replace(chat, context=CONTEXT)) == tokens(joined)
    with pytest.raises(TurnoutError, match=r"^context: needs a message with role `user`$"):
        tokens(replace(chat, messages=turns[:1], context=CONTEXT))


async def test_streams_of_a_request(pool: LocalPool) -> None:
    prepared = pool.intake().prepare(asked("cad", CONTEXT))
    assert prepared.contrast is not None
    assert prepared.contrast.prompts == {"without_context": tuple(pool.tokenizer.encode("ab"))}
    turns = (ChatMessage("system", "Be kind."), ChatMessage("user", "q"))
    chat = replace(
        call_of("", "plain"), prompt=None, messages=turns, contrast=PartChoice.of("instructive", noise="empty")
    )
    prepared = pool.intake().prepare(chat)
    assert prepared.contrast is not None
    bare = pool.tokenizer.encode_chat(turns[1:])
    assert prepared.contrast.prompts == {"noisy": tuple(bare)}
    prepared = pool.intake().prepare(asked("cfg"))
    assert prepared.contrast is not None
    assert len(prepared.contrast.prompts["negative"]) == 1


def with_store(pool: LocalPool, folder: Path, tenant: str) -> LocalPool:
    """The pool with a datastore of the tenant's, in which every context is followed by the letter of its name."""
    large = pool.model_pool.large
    store = TokenStore(2, 64)
    store.values.fill_(pool.tokenizer.encode(tenant)[0])
    path = folder / "tenants" / tenant / "knn_lm.safetensors"
    Artifact("knn_lm", "test", {"head": store.settings}, {"large": large.digest}, dict(store.state_dict())).save(path)
    pool.model_pool.artifacts.folder = folder
    return pool


async def test_datastores_of_tenants_are_apart_in_one_batch(pool: LocalPool, tmp_path: Path) -> None:
    artifacts = pool.model_pool.artifacts
    for tenant in ("a", "b"):
        with_store(pool, tmp_path, tenant)
    call = asked({"name": "knn_lm", "weight": 1}, max_tokens=4)
    calls = [replace(call, tenant=tenant) for tenant in ("a", "b", "c")] + [asked(None, max_tokens=4)]
    first, second, none, plain = await asyncio.gather(*(answer(pool, each) for each in calls), return_exceptions=True)
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert isinstance(plain, Reply)
    assert (first.text, second.text) == ("aaaa", "bbbb")
    assert plain.ids == (await answer(pool, calls[-1])).ids
    assert isinstance(none, TurnoutError)
    assert (none.field, "available: none" in none.message or "knn_lm" in none.message) == ("contrast.artifact", True)
    assert any("artifact knn_lm, version" in note for note in first.usage.notes)
    pool.forget("a")
    read = [tmp_path / "tenants" / tenant / "knn_lm.safetensors" in artifacts.files for tenant in ("a", "b")]
    assert read == [False, True]


async def test_the_model_chooses_a_distortion_before_its_answer(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TurnoutError, match=r"^contrast: the stream 'choice' of 'savcd' has .* fit the context of 512$"):
        await answer(pool, asked("savcd", CONTEXT))
    monkeypatch.setattr("decoding.contrast.savcd.QUESTION", "How is it distorted: {question}?")
    call = asked({"name": "savcd", "choice_tokens": 3, "alpha": 5}, CONTEXT)
    made = await answer(pool, call)
    fixed_call = asked({"name": "savcd", "distortion": "drop", "alpha": 5}, CONTEXT)
    fixed = await answer(pool, fixed_call)
    assert made.ids == fixed.ids  # random letters choose nothing, so it is dropped
    large = pool.roles["large"]
    prepared = pool.intake().prepare(call)
    assert prepared.contrast is not None
    question = len(prepared.contrast.prompts["choice"])
    assert prepared.contrast.num_tokens == 3 + sum(map(len, prepared.contrast.prompts.values()))
    prepared = pool.intake().prepare(fixed_call)
    assert prepared.contrast is not None
    assert prepared.contrast.num_tokens == len(prepared.contrast.prompts["drop"])
    read, other = (each.usage.models[large] for each in (made, fixed))
    both = read.prompt_tokens + read.cached_tokens - other.prompt_tokens - other.cached_tokens
    assert both == question
    assert sum(each.generated_tokens for each in made.usage.models.values()) == made.usage.completion_tokens


@pytest.mark.parametrize("method", ["plain", "speculative"])
async def test_a_contrast_holds_in_answers(pool: LocalPool, method: str) -> None:
    plain = await answer(pool, asked(None, CONTEXT, method))
    off = await answer(pool, asked({"name": "cad", "alpha": 0}, CONTEXT, method))
    assert off.ids == plain.ids
    held = await answer(pool, asked({"name": "cad", "alpha": 20}, CONTEXT, method, n=2))
    alone = await answer(pool, asked({"name": "cad", "alpha": 20}, CONTEXT))
    assert held.ids == alone.ids != plain.ids
    large = pool.roles["large"]
    read = held.usage.models[large]
    stream = len(pool.tokenizer.encode("ab"))
    assert held.usage.prompt_tokens == plain.usage.prompt_tokens
    assert held.usage.cached_tokens <= held.usage.prompt_tokens
    assert read.prompt_tokens + read.cached_tokens >= held.usage.prompt_tokens + 2 * stream
    assert sum(each.generated_tokens for each in held.usage.models.values()) == held.usage.completion_tokens
    assert pool.stats().sequences == 0


async def test_the_fields_of_each_interface() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    job = chat_job({**body, "decoding": {"contrast": {"name": "cad", "alpha": 1}, "context": CONTEXT}})
    assert (job.calls[0].contrast, job.calls[0].context) == (PartChoice.of("cad", alpha=1), CONTEXT)
    with pytest.raises(TurnoutError) as caught:
        chat_job({**body, "decoding": {"contrast": {"alpha": 1}}})
    assert caught.value.field == "decoding.contrast.name"
    call = generate_call(generate_request("x", None, {"contrast": {"name": "cad", "alpha": 0.5}, "context": CONTEXT}))
    assert (call.contrast, call.context) == (PartChoice.of("cad", alpha=0.5), CONTEXT)
    assert generate_call(generate_request("x", None, {})).contrast is None
    with pytest.raises(TurnoutError, match=r"^contrast\.name: "):
        generate_request("x", None, {"contrast": {"alpha": 0.5}})
