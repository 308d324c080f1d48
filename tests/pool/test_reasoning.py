"""Reasoning through a pool: markers found, thinking split the same way streamed, whole and after a loss."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tokenizers import AddedToken

from decoding.thinking import Thinking, ThinkingWalk
from deployments import grpc_messages
from deployments.backend import merge
from deployments.openai_format import ChatFormat, token_object, usage_object
from deployments.schemas import chat_job
from pool.local_pool import LocalPool
from pool.reasoning import AnswerDetokenizer, _marker, answer_text, bound, thinking_of
from pool.text import TextTokenizer
from tests.engine.harness import pair_config
from training.random_models import BYTE_VOCAB, CHAT_TEMPLATE, byte_tokenizer, llama_config, random_model
from turnout import client_messages
from turnout.calls import ChatMessage, Chunk, Delivered, Event, GenerateCall, ReasoningMode, Usage
from turnout.chat_template import TemplateOptions
from turnout.errors import TurnoutError
from turnout.pool_config import ReasoningMarkers
from turnout.structure import Structure
from turnout.tool_formats.grammar import CallRules
from turnout.types import FinishReason, SamplingParams

THINK, DONE = BYTE_VOCAB, BYTE_VOCAB + 1
ASKED = "{% if add_generation_prompt %}<|assistant|>"
OPENS = (
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
HISTORY = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
TEMPLATE = CHAT_TEMPLATE.replace(ASKED, ASKED + OPENS).replace(
    "{{ '<|' + message['role'] + '|>' + message['content'] }}",
    "{{ '<|' + message['role'] + '|>' }}" + HISTORY + "{{ message['content'] }}",
)
OFF = TemplateOptions({"enable_thinking": False})


def thinking_tokenizer(template: str = TEMPLATE, special: bool = False) -> Any:
    made = byte_tokenizer()
    made.add_tokens([AddedToken(name, special=special, normalized=False) for name in ("<think>", "</think>")])
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("thinking")
    for place, name in enumerate(("small", "large")):
        config = llama_config(BYTE_VOCAB + 2, num_hidden_layers=1)
        random_model(config, seed=place, spread=0.2).save_pretrained(made / name)
        thinking_tokenizer().save_pretrained(made / name)
    return made


@pytest.fixture
async def thinker(folder: Path) -> AsyncIterator[LocalPool]:
    pool = LocalPool.load("pair", pair_config(folder, block_size=8, token_budget=48))
    yield pool
    await pool.close()


def asked(method: str = "plain", params: dict[str, Any] | None = None, **options: Any) -> GenerateCall:
    more = {name: options.pop(name) for name in ("template", "reasoning", "delivered") if name in options}
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 24, **options})
    messages = (ChatMessage("user", "Why?"),)
    return GenerateCall("r", "pair", sampling, messages=messages, method=method, params=params or {}, **more)


async def events_of(pool: LocalPool, call: GenerateCall) -> list[Event]:
    return [event async for event in pool.generate(call)]


async def whole(pool: LocalPool, call: GenerateCall) -> tuple[Chunk, Usage]:
    chunk, usage = merge(await events_of(pool, call))
    assert isinstance(chunk, Chunk)
    assert isinstance(usage, Usage)
    return chunk, usage


SPECULATIVE: dict[str, Any] = {"length": "fixed", "draft_length": 5}


async def test_thinking_is_apart_streamed_whole_and_over_grpc(thinker: LocalPool) -> None:
    call = asked(thinking_token_budget=9)
    events = await events_of(thinker, call)
    answer, usage = await whole(thinker, call)
    ids = [token.id for token in answer.tokens]
    assert ids.index(DONE) == 9
    assert answer.reasoning
    assert answer.text
    assert [token.thinking for token in answer.tokens] == [True] * 10 + [False] * 14
    assert usage.reasoning_tokens == 10
    assert usage_object(usage)["completion_tokens_details"]["reasoning_tokens"] == 10
    texts = thinker.tokenizer.decode(ids[:9]), thinker.tokenizer.decode(ids[10:])
    assert (answer.reasoning, answer.text) == (texts[0].strip("\n"), texts[1].lstrip("\n"))

    form = ChatFormat()
    deltas = [form.delta(event, False)["delta"] for event in events if isinstance(event, Chunk)]
    message = form.choice(answer, False)["message"]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]  # type: ignore[literal-required]
    assert token_object(answer.tokens[0])["thinking"]
    parts = [grpc_messages.chunk_message("r", "pair", (event,)) for event in events]
    received = merge([client_messages.chunk(choice) for part in parts for choice in part.choices])
    assert received == (answer,)
    assert client_messages.usage(grpc_messages.usage_message(usage)).reasoning_tokens == 10


async def test_drafts_do_not_change_the_budget_or_what_follows(thinker: LocalPool) -> None:
    for options in ({}, {"structure": Structure(kind="regex", value="[a-c]{2}[0-9]")}):
        for budget in (0, 3, 7):
            plain, _ = await whole(thinker, asked(thinking_token_budget=budget, **options))
            drafted, _ = await whole(
                thinker, asked("speculative", SPECULATIVE, thinking_token_budget=budget, **options)
            )
            assert [token.id for token in drafted.tokens] == [token.id for token in plain.tokens]
            assert [token.id for token in plain.tokens].index(DONE) == budget
            if options:
                assert len(plain.text) == 3
                assert plain.text[2].isdigit()
                assert plain.finish_reason is FinishReason.STOP


async def test_an_answer_goes_on_elsewhere_to_the_character(thinker: LocalPool) -> None:
    for stop in ((), ("a", "e")):
        call = asked(thinking_token_budget=8, stop=stop)
        events = [event for event in await events_of(thinker, call) if isinstance(event, Chunk)]
        full, _ = await whole(thinker, call)
        for count in range(len(events)):
            had = events[:count]
            delivered = Delivered(
                tuple(token.id for chunk in had for token in chunk.tokens),
                sum(len(chunk.text) for chunk in had),
                reasoning_chars=sum(len(chunk.reasoning) for chunk in had),
            )
            rest, _ = await whole(thinker, replace(call, delivered=(delivered,)))
            assert "".join(chunk.text for chunk in had) + rest.text == full.text
            assert "".join(chunk.reasoning for chunk in had) + rest.reasoning == full.reasoning


async def test_stop_strings_are_sought_in_the_answer_alone(thinker: LocalPool) -> None:
    free, _ = await whole(thinker, asked(thinking_token_budget=8))
    inside = next(char for char in free.reasoning if char not in free.text)
    stopped, _ = await whole(thinker, asked(thinking_token_budget=8, stop=(inside,)))
    assert stopped == free
    stopped, _ = await whole(thinker, asked(thinking_token_budget=8, stop=(free.text[3:5],)))
    assert (stopped.reasoning, stopped.text) == (free.reasoning, free.text[:3])


async def test_an_answer_cut_in_its_thinking_has_no_content(thinker: LocalPool) -> None:
    cut, usage = await whole(thinker, asked(max_tokens=4))
    assert cut.reasoning
    assert (cut.text, cut.finish_reason, usage.reasoning_tokens) == ("", FinishReason.LENGTH, 4)


async def test_thinking_that_the_prompt_closes_or_nobody_wants(thinker: LocalPool) -> None:
    off, usage = await whole(thinker, asked(template=OFF))
    assert (off.reasoning, usage.reasoning_tokens) == ("", 0)
    assert off.text
    split, hidden, raw = [
        (await whole(thinker, asked(thinking_token_budget=8, reasoning=mode)))[0] for mode in get_args(ReasoningMode)
    ]
    assert (hidden.reasoning, hidden.text, hidden.tokens) == ("", split.text, split.tokens)
    assert raw.reasoning == ""
    assert raw.text.startswith(split.reasoning)
    assert raw.text.endswith(split.text)
    assert "</think>" in raw.text


async def test_a_budget_without_known_markers_does_nothing_and_says_so(thinker: LocalPool) -> None:
    with pytest.raises(TurnoutError, match="needs a conversation"):
        await events_of(thinker, replace(asked(thinking_token_budget=3), messages=None, prompt="a"))
    _, usage = await whole(thinker, asked(thinking_token_budget=3))
    assert not any("thinking" in note for note in usage.notes)
    thinker.thinking = None
    free, _ = await whole(thinker, asked())
    asked_for, usage = await whole(thinker, asked(thinking_token_budget=3))
    assert asked_for.text == free.text
    assert any("no markers of thinking are known" in note for note in usage.notes)


@pytest.mark.parametrize("special", [False, True])
def test_history_and_markers_of_a_template(tmp_path: Path, special: bool) -> None:
    thinking_tokenizer(special=special).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    found = thinking_of("auto", tokenizer)
    assert found is not None
    assert (found.begin.token, found.end.token) == (THINK, DONE)
    assert found.gap == tuple(b"\n\n".replace(b"\n", bytes([tokenizer.encode("\n")[0]])))
    turns = [ChatMessage("user", "a"), ChatMessage("assistant", "b", reasoning="because"), ChatMessage("user", "c")]
    assert "<think>\nbecause\n</think>\n\nb" in tokenizer.decode(tokenizer.encode_chat(turns), special=True)
    own = thinking_of(ReasoningMarkers(begin="(", end=")\n"), tokenizer)
    assert own is not None
    assert (own.begin.text, own.end.text, own.end.token) == ("(", ")", None)
    assert thinking_of("off", tokenizer) is None


def test_markers_that_begin_with_a_special_token_are_found(tmp_path: Path) -> None:
    """As Gemma 4's: the token is not shown otherwise, and the word after it is text."""
    made = byte_tokenizer()
    names = ["<|channel>", "<channel|>", "<|other>"]
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    thinking = Thinking(*(_marker(text, tokenizer) for text in ("<|channel>thought", "<channel|>")))
    assert (thinking.begin.token, thinking.end.token) == (None, BYTE_VOCAB + 1)
    ids = made.encode("<|channel>thought\nHm.<|other><channel|>Warm.<|channel>", add_special_tokens=False)
    detokenizer = answer_text(tokenizer.detokenizer([1]), thinking, tokenizer)
    assert isinstance(detokenizer, AnswerDetokenizer)
    text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
    assert (text, detokenizer.take_reasoning()) == ("Warm.", "Hm.")
    walk = ThinkingWalk(thinking, tokenizer)
    for token in ids:
        walk.feed(token)
    assert walk.num_thought == len("\nHm.") + 1
    assert walk.ended


def test_fields_of_a_chat_say_where_thinking_goes() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    assert chat_job(body).calls[0].reasoning == "split"
    assert chat_job({**body, "include_reasoning": False}).calls[0].reasoning == "hide"
    assert chat_job({**body, "separate_reasoning": False}).calls[0].reasoning == "raw"
    assert chat_job({**body, "thinking_token_budget": -1}).calls[0].sampling.thinking_token_budget is None


@pytest.mark.parametrize(("form", "own"), [("harmony", True), ("hermes", False)])
async def test_a_tool_format_whose_grammar_has_the_thinking_holds_from_the_first_token_on(
    thinker: LocalPool, form: str, own: bool
) -> None:
    inner = await thinker.tokenizer.structures.made(Structure(kind="json_object"), "t")
    assert thinker.thinking is not None
    thinking = replace(thinker.thinking, start="open")
    found = bound(inner, thinking, thinker.tokenizer, CallRules({"f": {}}, form=form).structure)
    assert (found is inner) == own
