"""Tools on tokenizers and chat templates of real models: conversations with calls and results, read back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from decoding.constraints.base import Vocabulary
from decoding.grammars.compiler import tokenizer_of
from decoding.structures import Compiler
from deployments.tools import CallReader
from pool.text import TextTokenizer
from tests.tokenizers.test_real_tokenizers import FETCHED, tokenizer  # noqa: F401
from turnout.calls import ChatMessage, Chunk
from turnout.structure import Structure
from turnout.tool_formats import tool_format
from turnout.tool_formats.grammar import CallRules
from turnout.tools import Tool, ToolCall
from turnout.types import FinishReason

pytestmark = pytest.mark.tokenizers

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = (
    ToolCall("call_" + "a" * 24, "weather", '{"city": "Zürich \\"{Altstadt}\\"", "days": 3}'),
    ToolCall("call_" + "b" * 24, "weather", '{"city": "Oslo"}'),
)
CONVERSATION = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", "", CALLS),
    ChatMessage("tool", "warm-a", (), CALLS[0].id),
    ChatMessage("tool", "cold-b", (), CALLS[1].id),
    ChatMessage("assistant", "Warm and cold."),
    ChatMessage("user", "And tomorrow?"),
]
TOOL = Tool("weather", "of a city", json.dumps(CITY))


def answer_text(tokenizer: TextTokenizer, ids: list[int], form: str) -> str:  # noqa: F811
    """The text of an answer's tokens, as a reader of calls gets it."""
    detokenizer = tokenizer.detokenizer([1], shown=tokenizer.tools.shown(form))
    return "".join([*map(detokenizer.feed, ids), detokenizer.flush()])


def read(text: str, form: str, sizes: random.Random | None = None) -> list[tuple[str, Any]]:
    """Name and arguments of the calls in an answer; with `sizes` from a stream of pieces."""
    reader = CallReader()
    if sizes is None:
        calls = reader.whole(Chunk(0, text, (), FinishReason.STOP, tool_format=form)).tool_calls
        return [(call.name, json.loads(call.arguments)) for call in calls]
    found: list[tuple[str, str]] = []
    while True:
        size = sizes.randrange(1, 9)
        piece, text = text[:size], text[size:]
        made = reader.part(Chunk(0, piece, (), None if text else FinishReason.STOP, tool_format=form))
        for part in made.call_parts:
            if part.id:
                found.append((part.name, ""))
            found[-1] = (found[-1][0], found[-1][1] + part.arguments)
        if not text:
            return [(name, json.loads(arguments)) for name, arguments in found]


def test_a_conversation_with_calls_and_results_has_all_of_them(tokenizer: TextTokenizer) -> None:  # noqa: F811
    text = tokenizer.decode(tokenizer.encode_chat(CONVERSATION, [TOOL]), special=True)
    places = [
        text.find(each) for each in ("Be brief.", "of a city", "Weather?", "Oslo", "warm-a", "cold-b", "tomorrow?")
    ]
    assert -1 not in places
    assert places[2:] == sorted(places[2:])
    written = text[places[2] : places[4]]
    found = read(written, tokenizer.tools.form.marked.name)
    assert found == [(call.name, json.loads(call.arguments)) for call in CALLS]


def test_calls_in_real_tokens_fit_the_grammar_and_are_read_back(tokenizer: TextTokenizer) -> None:  # noqa: F811
    assert tokenizer._bytes is not None
    definition = tokenizer._bytes.for_structures()
    assert definition is not None
    vocabulary = Vocabulary(definition, tokenizer.eos_ids)
    compiler, known = Compiler(vocabulary), vocabulary.shared(tokenizer_of)
    answer = Structure.model_validate({"json_object": True})
    for given in (None, answer):
        rules = CallRules({"weather": CITY}, answer=given).in_format(tokenizer.tools.form)
        form = tool_format(rules.form)
        calls = CALLS[:1] if form.single else CALLS
        constraint = compiler.compile(rules.structure)
        for chosen in (calls, calls[:1]):
            ids = tokenizer._tokenizer.encode(form.written(chosen), add_special_tokens=False)
            if known.decode_bytes(ids) != form.written(chosen).encode():
                pytest.skip("begins every text with a space")
            assert constraint.clone().accepts(ids), form.written(chosen)
            wrong = form.written(chosen).replace('"days": 3', '"days": "3"')
            assert not constraint.clone().accepts(tokenizer._tokenizer.encode(wrong, add_special_tokens=False))
            text = answer_text(tokenizer, ids, rules.form)
            expected = [(call.name, json.loads(call.arguments)) for call in chosen]
            assert read(text, rules.form) == expected
            assert read(text, rules.form, random.Random(1)) == expected
        words = tokenizer.encode("It is warm.", parse_special=False)[len(tokenizer._prefix) :]
        assert constraint.clone().accepts(words) == (given is None)


def test_calls_as_mistrals_own_library_writes_them() -> None:
    """Tokens of an assistant's turn, as the library encodes them."""
    from mistral_common.protocol.instruct.messages import AssistantMessage
    from mistral_common.protocol.instruct.tool_calls import FunctionCall
    from mistral_common.protocol.instruct.tool_calls import ToolCall as TheirCall
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV3
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = max((FETCHED / "mistral" / "mistral_common" / "data").glob("tekken_*.json"))
    theirs = InstructTokenizerV3(Tekkenizer.from_file(file))
    made = [FunctionCall(name=each.name, arguments=each.arguments) for each in CALLS]
    calls = [TheirCall(id="abcdef123", function=each) for each in made]
    ids = theirs._encode_tool_calls_in_assistant_message(AssistantMessage(tool_calls=calls))
    text = theirs.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
    expected = [(call.name, json.loads(call.arguments)) for call in CALLS]
    assert read(text, "mistral") == expected
    assert read(text, "mistral", random.Random(2)) == expected
