"""Reasoning of a model: its markers found from template and tokens, and an answer's thinking split from its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

from decoding.constraints.base import Constraint, allows
from decoding.text import continue_with, text_within
from decoding.thinking import TAIL, Channels, Marker, Part, Phase, Splitter, Start, Thinking, start_after
from decoding.thinking_constraint import ThinkingConstraint
from pool.chat_turns import PROBE
from pool.detokenizer import Detokenizer
from pool.text import TextTokenizer, added_tokens, template_of
from pool.token_bytes import Span
from turnout.calls import ChatMessage, GenerateCall
from turnout.chat_template import TemplateOptions
from turnout.errors import TurnoutError, invalid
from turnout.pool_config import ReasoningMarkers
from turnout.structure import Structure
from turnout.tool_formats import tool_format
from turnout.tool_formats.grammar import form_of_calls

# Markers of model families, those first that more of them have: Qwen3, DeepSeek, SmolLM3, Granite 3.3, GLM and many
# more; Mistral; Seed-OSS; Cohere; Kimi; MiniMax M3; Gemma 4; Apriel; Granite 3.2.
PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<mm:think>", "</mm:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("Here is my thought process:", "Here is my response:"),
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
HARMONY_BEGIN = "<|channel|>analysis<|message|>"
HARMONY_END = "<|end|><|start|>assistant<|channel|>final<|message|>"
NO_TOKEN = -1


def thinking_of(reasoning: str | ReasoningMarkers, tokenizer: TextTokenizer) -> Thinking | None:
    """Return how thinking is found in a pool's answers.

    Args:
        reasoning: the pool's: auto, off, or markers.
        tokenizer: of its large model.
    """
    if isinstance(reasoning, ReasoningMarkers):
        found = _pair(reasoning.begin.strip("\n"), reasoning.end.strip("\n"), tokenizer)
        return replace(found, gap=_gap(found, tokenizer))
    if reasoning == "off":
        return None
    added, template = added_tokens(tokenizer), template_of(tokenizer)
    if all(name in added for name in HARMONY):
        return _harmony(tokenizer)
    for begin, end in PAIRS:
        tokens = begin in added and end in added
        # A template may name only the end, as it cuts thoughts off a history there; its models have both tokens.
        if tokens or (begin in template and end in template):
            found = _pair(begin, end, tokenizer)
            return replace(found, gap=_gap(found, tokenizer))
    return None


def _pair(begin: str, end: str, tokenizer: TextTokenizer) -> Thinking:
    return Thinking(_marker(begin, tokenizer), _marker(end, tokenizer))


def _marker(text: str, tokenizer: TextTokenizer) -> Marker:
    token = added_tokens(tokenizer).get(text)
    return Marker(text, continue_with(tokenizer, text) if token is None else (token,), token)


def _harmony(tokenizer: TextTokenizer) -> Thinking:
    added = added_tokens(tokenizer)
    start, channel, message, end = (added[name] for name in HARMONY)
    ends = {end} | {added[name] for name in ("<|return|>", "<|call|>") if name in added}
    begin, final = (Marker(text, continue_with(tokenizer, text)) for text in (HARMONY_BEGIN, HARMONY_END))
    return Thinking(begin, final, Channels(start, channel, message, frozenset(ends)))


def _gap(thinking: Thinking, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the tokens of the blank lines that the template writes between the end of thinking and the answer."""
    turns = (ChatMessage("user", "a"), ChatMessage("assistant", PROBE, reasoning="a"))
    text = ""
    with suppress(TurnoutError):  # some templates end with a question, or there is none
        ids = tokenizer.encode_chat(turns, template=TemplateOptions(add_generation_prompt=False))
        text = text_within(tokenizer, ids)
    found = re.search(re.escape(thinking.end.text) + rf"(\n+){PROBE}", text)
    return continue_with(tokenizer, found[1]) if found else ()


def thinking_of_call(
    thinking: Thinking | None, call: GenerateCall, prompt: Sequence[int], tokenizer: TextTokenizer
) -> Thinking | None:
    """Return how thinking is found in the answers of a call; None: it is not, as after a raw prompt.

    Args:
        thinking: the pool's.
        call: the call.
        prompt: its token ids.
        tokenizer: the pool's.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a budget in a raw prompt.
    """
    budget = call.sampling.thinking_token_budget
    if call.messages is None and budget is not None:
        raise invalid("thinking_token_budget", "needs a conversation: in a raw prompt thinking is text like any other")
    if thinking is None or call.messages is None:
        return None
    start = _start(thinking, call, prompt, tokenizer)
    return replace(thinking, start=start, budget=budget, apart=call.reasoning != "raw")


def budget_notes(call: GenerateCall, thinking: Thinking | None) -> list[str]:
    """Return the note of a call whose budget does nothing: agents send one to models that are not known to think."""
    if call.sampling.thinking_token_budget is None or thinking is not None:
        return []
    return ["thinking_token_budget: no markers of thinking are known; the pool's `reasoning` can name them"]


def _start(thinking: Thinking, call: GenerateCall, prompt: Sequence[int], tokenizer: TextTokenizer) -> Start:
    """Return where the prompt leaves the answer."""
    if thinking.channels is not None:
        starts = [place for place, token in enumerate(prompt) if token == thinking.channels.start]
        splitter = thinking.splitter()
        for token in prompt[starts[-1] if starts else len(prompt) :]:
            splitter.feed(token, text_within(tokenizer, [token]), tokenizer.special_name(token))
        return "inside" if splitter.phase is Phase.THINKING else "open" if splitter.phase is Phase.BEFORE else "closed"
    begin, end = thinking.begin.text, thinking.end.text
    if call.template.continue_final_message and call.messages:
        said = call.messages[-1].content
        if (begun := said.rfind(begin)) > (ended := said.rfind(end)):
            return "inside"
        if ended > begun or said.strip():
            return "closed"
    return start_after(text_within(tokenizer, prompt[-TAIL:]), begin, end)


def with_structure(thinking: Thinking | None, constraint: Constraint | None) -> Thinking | None:
    """Return the thinking of answers with a structure, whose own blank lines are no part of the end marker."""
    if thinking is None or constraint is None:
        return thinking
    gap = thinking.gap
    clear = bool(gap) and not allows(constraint.masks([], [()])[0], gap[0])
    return replace(thinking, gap=gap if clear else (), strips=clear)


def bound(
    inner: Constraint | None, thinking: Thinking | None, tokenizer: TextTokenizer, structure: Structure | None
) -> Constraint | None:
    """Return the constraint of an answer: `inner` once thinking has ended, and the thinking's own budget.

    A tool format whose grammar has the thinking as well is followed from the first token on, without a budget.

    Args:
        inner: of the structure; None: there is none.
        thinking: the answer's.
        tokenizer: the pool's.
        structure: that `inner` is made of.
    """
    if thinking is None or (inner is None and thinking.budget is None):
        return inner
    if inner is not None and (form := form_of_calls(structure)) and tool_format(form).thinks:
        return inner
    if inner is not None and thinking.start == "closed" and thinking.budget is None:
        return inner
    return ThinkingConstraint(thinking, tokenizer, inner, tokenizer.eos_ids, len(tokenizer))


def answer_text(
    detokenizer: Detokenizer, thinking: Thinking | None, tokenizer: TextTokenizer, keeps: bool = True
) -> Detokenizer:
    """Return a detokenizer of the answer alone, where its thinking goes apart.

    Args:
        detokenizer: of all its tokens.
        thinking: the answer's.
        tokenizer: the pool's.
        keeps: whether anybody takes the reasoning.
    """
    if thinking is None or not thinking.apart:
        return detokenizer
    return AnswerDetokenizer(detokenizer, thinking.splitter(), tokenizer, keeps)


class AnswerDetokenizer:
    """Detokenizer of an answer without its thinking, which is taken apart. Implements `pool.detokenizer.Detokenizer`.

    Args:
        inner: of all tokens.
        splitter: of their text.
        tokenizer: names special tokens.
        keeps: whether anybody takes the reasoning.
    """

    __slots__ = ("_inner", "_keeps", "_reasoning", "_splitter", "_tokenizer")

    def __init__(self, inner: Detokenizer, splitter: Splitter, tokenizer: TextTokenizer, keeps: bool) -> None:
        self._inner = inner
        self._splitter = splitter
        self._tokenizer = tokenizer
        self._keeps = keeps
        self._reasoning = ""

    def feed(self, token_id: int) -> str:
        """See `Detokenizer.feed`."""
        text = self._inner.feed(token_id)
        return self._said(self._splitter.feed(token_id, text, "" if text else self._tokenizer.special_name(token_id)))

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.feed_all`."""
        return "".join(map(self.feed, token_ids))

    def _said(self, pieces: list[tuple[Part, str]]) -> str:
        if self._keeps:
            self._reasoning += "".join(text for part, text in pieces if part is Part.REASONING)
        return "".join(text for part, text in pieces if part is Part.TEXT)

    def take_reasoning(self) -> str:
        """Return what was thought since the last time."""
        taken, self._reasoning = self._reasoning, ""
        return taken

    def span(self, token_id: int) -> Span:
        """See `Detokenizer.span`."""
        said = self.feed(token_id)
        return Span(said, said.encode())

    def peek(self, token_id: int) -> Span:
        """See `Detokenizer.peek`."""
        return self._inner.peek(token_id)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        rest = self._inner.flush()
        pieces = self._splitter.feed(NO_TOKEN, rest) if rest else []
        return self._said([*pieces, *self._splitter.flush()])

    def clone(self) -> AnswerDetokenizer:
        """See `Detokenizer.clone`."""
        twin = AnswerDetokenizer(self._inner.clone(), copy(self._splitter), self._tokenizer, self._keeps)
        twin._reasoning = self._reasoning
        return twin
