"""Conversations with tools and thinking in chat templates of real models: what a template writes is read back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decoding.constraints.base import Vocabulary
from decoding.structures import Compiler
from deployments.tools import CallReader
from pool.text import TextTokenizer
from tests.tokenizers.templates import CALLS, SCHEMA, Chat, conversation, template_names, tokenizer_for
from turnout.calls import ChatMessage, Chunk
from turnout.errors import TurnoutError
from turnout.tool_formats import tool_format
from turnout.tool_formats.grammar import CallRules
from turnout.tools import ToolCall
from turnout.types import FinishReason

pytestmark = pytest.mark.tokenizers

FUNCTIONS = {"weather": SCHEMA}
FORMATS = {
    "apriel": ["Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"],
    "command_r": ["Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"],
    "deepseek_v3": [
        *("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
        "llama-cpp-deepseek-r1",
    ],
    "deepseek_v31": ["deepseek-ai-DeepSeek-V3.1"],
    "deepseek_v32": [
        *("deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    ],
    "gemma4": ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"],
    "glm4": [
        *("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "inclusionai-ling-3.0-flash"),
        *("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    ],
    "granite": ["ibm-granite-granite-3.3-2B-Instruct"],
    "harmony": ["openai-gpt-oss-120b"],
    "hermes": [
        *("Bielik-11B-v3.0-Instruct", "MiMo-VL", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"),
        *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
        *("ibm-granite-granite-4.0", "ibm-granite-granite-4.1"),
    ],
    "kimi_k2": ["Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"],
    "llama3_json": [
        *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    ],
    "minicpm5": ["openbmb-MiniCPM5-1B"],
    "minimax_m1": ["MiniMax-M1"],
    "minimax_m2": ["MiniMax-M2"],
    "mistral": ["mistralai-Mistral-Nemo-Instruct-2407"],
    "mistral_args": [
        *("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"),
        "unsloth-mistral-Devstral-Small-2507",
    ],
    # Those that write nothing of calls get them as text.
    "plain_json": [
        *("HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "google-gemma-2-2b-it"),
        "microsoft-Phi-3.5-mini-instruct",
    ],
    "qwen3_coder": ["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash"],
    "seed_oss": ["ByteDance-Seed-OSS"],
}
READ = {name: form for form, names in FORMATS.items() for name in names}
# These put what is said behind the calls, or into a turn of its own.
SILENT = ("google-gemma-4", "deepseek-ai-DeepSeek-R1-Distill-Qwen", "openai")
# Templates whose variables a conversation does not have.
REFUSING = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "description",
    "fireworks-ai-llama-3-firefunction-v2": "functions",
}
OTHERS = sorted(set(template_names()) - READ.keys() - REFUSING.keys())


@pytest.fixture(scope="module", params=sorted(READ))
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TextTokenizer]:
    return request.param, tokenizer_for(request.param, tmp_path_factory.mktemp("template"))


def whole(form: str, pieces: Sequence[tuple[str, str]]) -> Chunk:
    reasoning, text = ("".join(each) for each in zip(*pieces, strict=True))
    chunk = Chunk(0, text, (), FinishReason.STOP, tool_format=form, reasoning=reasoning)
    return CallReader(FUNCTIONS).whole(chunk)


def streamed(form: str, pieces: Sequence[tuple[str, str]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of an answer that comes in pieces."""
    reader, chunks = CallReader(FUNCTIONS), []
    for place, (reasoning, text) in enumerate(pieces):
        reason = FinishReason.STOP if place == len(pieces) - 1 else None
        chunks.append(reader.part(Chunk(0, text, (), reason, tool_format=form, reasoning=reasoning)))
    calls: list[tuple[str, str]] = []
    for part in (part for chunk in chunks for part in chunk.call_parts):
        if part.id:
            calls.append((part.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    thought, said = ("".join(getattr(chunk, name) for chunk in chunks) for name in ("reasoning", "text"))
    return thought, said, [(name, json.loads(arguments)) for name, arguments in calls]


def cuts(pieces: Sequence[tuple[str, str]], draw: random.Random) -> list[list[tuple[str, str]]]:
    """An answer token by token, character by character, and in pieces of any size."""
    singles = [each for thought, text in pieces for each in [*((c, "") for c in thought), *(("", c) for c in text)]]
    sized, at = [], 0
    while at < len(singles):
        size = draw.randrange(1, 12)
        sized.append(("".join(a for a, _ in singles[at : at + size]), "".join(b for _, b in singles[at : at + size])))
        at += size
    return [list(pieces), singles, sized]


@pytest.mark.parametrize("effort", ["high", "none"])
def test_what_a_template_writes_is_read_back(named: tuple[str, TextTokenizer], effort: str) -> None:
    name, tokenizer = named
    form, chat = tokenizer.tools.form.name, Chat(tokenizer, effort)
    assert form == READ[name]
    style = tokenizer.tools._style
    single = style is not None and style.single
    said = "" if name.startswith(SILENT) else "Let me see."
    turns = conversation(effort == "high", said, 1 if single else 2)
    if name.startswith("mistralai-Mistral-Nemo"):  # it moves the system's message along with the conversation
        turns = turns[1:]
    constraint = None
    for place, message in enumerate(turns):
        if message.role != "assistant":
            continue
        answer = chat.written(turns[: place + 1])
        pieces = chat.read(answer, chat.ids(turns[:place], begins=True), form)
        read = whole(form, pieces)
        calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
        assert calls == [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        # Some leave out what is said with calls, and what is thought.
        assert read.text.strip() == (message.content if message.content in answer else "")
        assert read.reasoning.strip() == (message.reasoning if message.reasoning in answer else "")
        for cut in cuts(pieces, random.Random(place)):
            assert streamed(form, cut) == (read.reasoning, read.text, calls)

        made = tuple(
            ToolCall(old.id, new.name, new.arguments) for old, new in zip(CALLS, read.tool_calls, strict=False)
        )
        again = ChatMessage("assistant", read.text, made, reasoning=read.reasoning)
        assert chat.text([*turns[:place], again]) == chat.text(turns[: place + 1])
        assert chat.text([*turns[:place], again, *turns[place + 1 :]]) == chat.text(turns)

        constraint = constraint or held(tokenizer)
        inside = answer if tool_format(form).thinks else "".join(text for _, text in pieces)
        inside = re.sub(r', "id": "\w{9}"', "", inside)  # Mistral's models do not write the ids that its template does
        assert constraint.clone().accepts(tokenizer._tokenizer.encode(inside, add_special_tokens=False)), inside


def held(tokenizer: TextTokenizer) -> Any:
    """The constraint of answers that may call the function."""
    assert tokenizer._bytes is not None
    definition = tokenizer._bytes.for_structures()
    assert definition is not None
    rules = CallRules(FUNCTIONS).in_format(tokenizer.tools.form)
    return Compiler(Vocabulary(definition, tokenizer.eos_ids)).compile(rules.structure)


@pytest.mark.parametrize("name", OTHERS)
def test_of_formats_that_are_not_known_nothing_is_lost(name: str, tmp_path: Path) -> None:
    """Their calls are text, and a stream of it is the whole."""
    tokenizer = tokenizer_for(name, tmp_path)
    turns = conversation(thinks=True)
    chat, form = Chat(tokenizer, "high"), tokenizer.tools.form.name
    text = chat.text(turns)
    assert all(each in text for each in ("Be brief.", "Weather?", "Oslo", "warm-a", "cold-b", "And tomorrow?"))
    pieces = chat.read(text[text.index("Oslo") - 80 :], chat.ids(turns[:2], begins=True), form)
    read = whole(form, pieces)
    calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
    for cut in cuts(pieces, random.Random(1)):
        assert streamed(form, cut) == (read.reasoning, read.text, calls)


@pytest.mark.parametrize("name", REFUSING)
def test_a_template_that_lacks_a_variable_says_which(name: str, tmp_path: Path) -> None:
    chat = Chat(tokenizer_for(name, tmp_path), "high")
    with pytest.raises(TurnoutError, match=REFUSING[name]):
        chat.ids(conversation(thinks=True), begins=True)
