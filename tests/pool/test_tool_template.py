"""What chat templates are given of calls: as many messages, and as much text, as a template takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pool.text import TextTokenizer
from pool.tool_template import _one_by_one
from training.random_models import byte_tokenizer
from turnout.calls import ChatMessage
from turnout.tools import ToolCall


def test_a_template_that_writes_text_instead_of_calls_gets_none_with_them(tmp_path: Path) -> None:
    """With thinking or without: DeepSeek R1's."""
    made = byte_tokenizer()
    made.chat_template = (
        "{% for message in messages %}{{ message['role'] }}:{% if message['tool_calls'] and not message['content'] %}"
        "{% for call in message['tool_calls'] %}{{ call['function']['name'] }}{{ call['function']['arguments'] }}"
        "{% endfor %}{% else %}{{ message['content'] }}{% endif %};{% endfor %}"
    )
    made.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    call, result = ToolCall("a", "f", '{"x": 1}'), ChatMessage("tool", "7", (), "a")
    for reasoning in ("", "Hm."):
        asked = (ChatMessage("user", "?"), ChatMessage("assistant", "Well.", (call,), reasoning=reasoning), result)
        assert tokenizer.decode(tokenizer.encode_chat(asked)) == "user:?;assistant:f{'x': 1};tool:7;"


def test_several_calls_become_several_messages_in_one_pass() -> None:
    compared = 0

    class Id(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    ids = [f"call_{place}" for place in range(200)]
    calls = [{"id": Id(each), "function": {"name": "f"}} for each in ids]
    results: list[dict[str, Any]] = [
        {"role": "tool", "content": each, "tool_call_id": Id(each)} for each in reversed([*ids, "none"])
    ]
    first = {"role": "assistant", "content": "So.", "tool_calls": calls}
    made = _one_by_one([first, *results, {"role": "user", "content": "?"}])
    assert [each["content"] for each in made[:4]] == ["So.", "call_0", "", "call_1"]
    assert [len(each.get("tool_calls", ())) for each in made[:4]] == [1, 0, 1, 0]
    assert [each["content"] for each in made[-2:]] == ["none", "?"]
    assert len(made) == 2 * len(ids) + 2
    assert compared <= 5 * len(ids)
