"""Chat templates of real models, each with a tokenizer that has its special tokens, and answers written in them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from pool.reasoning import answer_text, thinking_of, thinking_of_call
from pool.text import TextTokenizer
from tests.tokenizers.test_real_tokenizers import FETCHED
from training.random_models import byte_tokenizer
from turnout.calls import ChatMessage, GenerateCall
from turnout.chat_template import TemplateOptions, default_effort
from turnout.tools import Tool, ToolCall
from turnout.types import SamplingParams

TEMPLATES = FETCHED / "templates"
# Those whose families' tokenizers are fetched.
TOKENIZERS = {
    "Qwen-Qwen3-0.6B": "qwen3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v3",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "llama3_1",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_1",
    "openai-gpt-oss-120b": "gptoss",
}
FLAGGED = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|?>|<[a-z_]{1,40}\|>|<\|\"\|>|\uff5cDSML\uff5c|<\uff5c[^<>\s'\"]{1,40}?\uff5c>|\[/?[A-Z_]{2,24}\]|<s>|</s>"
)
PLAIN = re.compile(r"</?(?:seed:|minimax:|mm:)?(?:think|tool_call|tool_response|arg_key|arg_value)>")
# What ends an answer: it is generated, and no part of the text.
ENDS = re.compile(
    r"\s*(?:<\|(?:im_end|eot_id|eom_id|end|return|call|END_OF_TURN_TOKEN|end_of_text|role_end|message_sep|end_of_msg)\|>"
    r"|<\uff5c(?:end\u2581of\u2581sentence|hy_eos:opensource)\uff5c>|</s>|<seed:eos>|\[e~\[|</assistant>|<SPECIAL_12>|<sep>"
    r"|<end_of_turn>|<turn\|>|<\|tool_response>|<end_of_sentence>|<\|start\|>assistant)\s*"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = Tool("weather", "of a city", json.dumps(SCHEMA))
CALLS = (
    ToolCall("call_" + "a" * 24, "weather", '{"city": "Zürich \\"{Altstadt}\\"", "days": 3}'),
    ToolCall("call_" + "b" * 24, "weather", '{"city": "Oslo"}'),
)
RESULTS = (ChatMessage("tool", "warm-a", (), CALLS[0].id), ChatMessage("tool", "cold-b", (), CALLS[1].id))


def conversation(thinks: bool, said: str = "Let me see.", num_calls: int = 2) -> tuple[ChatMessage, ...]:
    """A question, calls with what is said before them, their results, an answer, and another question."""
    return (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", said, CALLS[:num_calls], reasoning="I need both {cities}." * thinks),
        *RESULTS[:num_calls],
        ChatMessage("assistant", "Warm and cold.", reasoning="Both came." * thinks),
        ChatMessage("user", "And tomorrow?"),
    )


def template_names() -> list[str]:
    """Names of the templates that were fetched."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def tokenizer_for(name: str, folder: Path) -> TextTokenizer:
    """The family's tokenizer where it is fetched; else one token per byte, and the markers that the template has."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if (real := TOKENIZERS.get(name)) is None:
        made = byte_tokenizer()
        plain = dict.fromkeys(PLAIN.findall(template))
        flagged = dict.fromkeys(["<s>", *FLAGGED.findall(template)])
        made.add_tokens([AddedToken(each, special=False, normalized=False) for each in plain])
        made.add_tokens([AddedToken(each, special=True, normalized=False) for each in flagged])
        made.bos_token = "<s>"
        made.chat_template = template
        made.save_pretrained(folder)
    else:
        shutil.copytree(FETCHED / real, folder, dirs_exist_ok=True)
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template}), encoding="utf-8"
        )
    return TextTokenizer(folder)


@dataclass(frozen=True)
class Chat:
    """Conversations in a template.

    Attributes:
        tokenizer: with the template.
        effort: of thinking: `high` or `none`.
    """

    tokenizer: TextTokenizer
    effort: str

    def ids(self, messages: Sequence[ChatMessage], begins: bool) -> list[int]:
        """Tokens of a conversation; `begins`: up to where an answer begins."""
        options = TemplateOptions(default_effort(self.effort), add_generation_prompt=begins)
        return self.tokenizer.encode_chat(messages, [TOOL], template=options)

    def text(self, messages: Sequence[ChatMessage], begins: bool = False) -> str:
        """The same as text, with special tokens."""
        return self.tokenizer.decode(self.ids(messages, begins), special=True)

    def written(self, messages: Sequence[ChatMessage]) -> str:
        """What an assistant wrote, as the template has its last message: what follows its prompt, up to the end.

        Where the template leaves thinking out that the prompt has begun, it is put in again.
        """
        prompt, whole, bare = self.text(messages[:-1], begins=True), self.text(messages), self.text(messages[:-1])
        thinking = thinking_of("auto", self.tokenizer)
        begin, end = ("", "") if thinking is None else (thinking.begin.text, thinking.end.text)
        last = messages[-2].content
        after = prompt[prompt.rindex(last) + len(last) :]
        header = prompt[len(bare) :] if prompt.startswith(bare) and prompt != bare else after
        opening = re.compile(rf"(?s)(.*?)\s*((?:{re.escape(begin)})?\s*(?:{re.escape(end)})?)\s*")
        opened = opening.fullmatch(header)
        if opened is None or not opened[1].strip():
            header, opened = after, opening.fullmatch(after)
        assert opened is not None
        name, thought = opened[1].strip(), header[opened.start(2) :]
        at = whole.find(name, whole.rindex(last) + len(last))
        assert at >= 0, (header, whole)
        answer = whole[at + len(name) :].removeprefix(header[: opened.start(2)].removeprefix(opened[1]))
        said = messages[-1].tool_calls[-1].name if messages[-1].tool_calls else messages[-1].content
        ended = ENDS.search(answer, max(0, answer.rfind(said)))
        answer = answer[: ended.start()] if ended else answer
        if thought and answer.startswith(thought):
            return answer[len(thought) :]
        if end and thought.strip().endswith(end):
            return answer.partition(end)[2].lstrip("\n") if end in answer else answer
        if not thought.strip() or end in answer:
            return answer.lstrip("\n").removeprefix(begin) if thought.strip() else answer
        return f"{messages[-1].reasoning}\n{end}\n\n{answer}"

    def read(self, answer: str, prompt: Sequence[int], form: str) -> list[tuple[str, str]]:
        """Reasoning and text that each token of an answer adds, as a pool gives them."""
        tokenizer = self.tokenizer
        call = GenerateCall("r", "m", SamplingParams(max_tokens=1), messages=(ChatMessage("user", "a"),))
        thinking = thinking_of_call(thinking_of("auto", tokenizer), call, prompt, tokenizer)
        ids: list[int] = tokenizer._tokenizer.encode(answer, add_special_tokens=False)
        plain = tokenizer.detokenizer(prompt[-16:], shown=tokenizer.tools.shown(form))
        detokenizer: Any = answer_text(plain, thinking, tokenizer)

        def thought() -> str:
            return detokenizer.take_reasoning() if thinking is not None else ""

        pieces = [(text, thought()) for text in map(detokenizer.feed, ids)]
        rest = detokenizer.flush()
        return [(reasoning, text) for text, reasoning in [*pieces, (rest, thought())]]
