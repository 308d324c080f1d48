"""Token ids of what calls give their models to read: prompts, conversations, completions, texts to embed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decoding.text import continuation_ids, continue_with
from pool.text import TextTokenizer
from turnout.call_context import last_user, with_context
from turnout.calls import GenerateCall, ScoreCall
from turnout.embed_calls import WHOLE_CONTEXT, EmbedCall
from turnout.errors import invalid, out_of_range
from turnout.message_size import MOST_UNITS, units


def with_suffix(call: GenerateCall, suffix: str, tokenizer: TextTokenizer) -> GenerateCall:
    """The call with a text after its question: the prompt, or the last user message."""
    if call.messages is None:
        assert call.prompt is not None
        if isinstance(call.prompt, str):
            return replace(call, prompt=call.prompt + suffix)
        return replace(call, prompt=call.prompt + continue_with(tokenizer, suffix))
    messages = list(call.messages)
    if (last := last_user(messages)) is not None:
        messages[last] = replace(messages[last], content=messages[last].content + suffix)
    return replace(call, messages=tuple(messages))


def bad_word_ids(words: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of words as they stand at the beginning of a text, of a line, and after a space."""
    line = continuation_ids(tokenizer, "\n")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        after = continue_with(tokenizer, f"\n{bare}")
        forms = [continue_with(tokenizer, bare), continue_with(tokenizer, f" {bare}")]
        if after[: len(line)] == line:
            forms.append(after[len(line) :])
        found |= dict.fromkeys(ids for ids in forms if ids)
    return tuple(found)


def question_of(call: GenerateCall, tokenizer: TextTokenizer) -> str:
    """The question as text: the prompt, or the last user message of a conversation."""
    if call.messages is not None:
        last = last_user(call.messages)
        return "" if last is None else call.messages[last].content
    assert call.prompt is not None
    return call.prompt if isinstance(call.prompt, str) else tokenizer.decode(call.prompt)


def num_chars(call: GenerateCall) -> int:
    """Characters that are to be encoded; of a contrast, also token ids, which are decoded."""
    apart = len(call.context)
    if call.contrast is not None:
        apart += sum(map(len, call.contrast.texts))
    if call.messages is None:
        encoded = isinstance(call.prompt, str) or call.contrast is not None
        return apart + (len(call.prompt or "") if encoded else 0)
    asked = sum(len(made.arguments) for turn in call.messages for made in turn.tool_calls)
    return (
        asked
        + apart
        + sum(len(turn.content) + len(turn.reasoning) for turn in call.messages)
        + sum(len(tool.parameters) for tool in call.tools)
    )


def encode_prompt(call: GenerateCall, tokenizer: TextTokenizer, vocab_size: int, most: int | None = None) -> list[int]:
    """Token ids of a call's prompt or conversation, with its context.

    Raises:
        TurnoutError: empty, both or none given, ids outside the vocabulary, or text that cannot have as few as `most`.
    """
    if (call.prompt is None) == (call.messages is None):
        raise invalid("prompt", "give either a prompt or messages")
    call = with_context(call)
    if call.messages is not None:
        if not call.messages:
            raise invalid("messages", "is empty; at least one message is needed")
        ids = tokenizer.encode_chat(call.messages, call.tools, most, call.template)
        return encode_tokens("messages", tuple(ids), tokenizer, vocab_size)
    assert call.prompt is not None
    return encode_tokens(
        "prompt", call.prompt, tokenizer, vocab_size, most, call.parse_special, call.add_special_tokens
    )


def encode_tokens(
    name: str,
    value: str | tuple[int, ...],
    tokenizer: TextTokenizer,
    vocab_size: int,
    most: int | None = None,
    parse_special: bool = True,
    add_special: bool = True,
) -> list[int]:
    """Text or token ids as token ids; refused when empty, outside the vocabulary, or surely longer than `most`."""
    if isinstance(value, str) and most is not None:
        tokenizer.check_length(name, value, most)
    ids = tokenizer.encode(value, parse_special, add_special) if isinstance(value, str) else list(value)
    if not ids:
        raise invalid(name, "is empty; at least one token is needed")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise out_of_range(name, f"token id {wrong}; allowed: 0 to {vocab_size - 1}")
    return ids


async def scored_ids(
    call: ScoreCall, tokenizer: TextTokenizer, vocab_size: int, most: int
) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    """Prompts with their completions as token ids, without holding up the event loop over long texts.

    Raises:
        TurnoutError: as `encode_tokens`; OUT_OF_RANGE: the scores of all completions do not fit one answer.
    """

    def encoded(tokenizer: TextTokenizer) -> list[tuple[list[int], list[tuple[int, ...]]]]:
        known = (tokenizer, vocab_size, most, call.parse_special)
        completions = [
            tuple(continuing(encode_tokens(f"completions.{place}", each, *known), each, tokenizer))
            for place, each in enumerate(call.completions)
        ]
        if not call.prompts:
            return [(encode_tokens("prompt", call.prompt, *known), completions)]
        suffix = continuing(tokenizer.encode(call.suffix, call.parse_special), call.suffix, tokenizer)
        groups = []
        for place, (prompt, completion) in enumerate(zip(call.prompts, completions, strict=True)):
            room = most - len(suffix) - len(completion)
            ids = shortened(f"prompts.{place}", prompt, call.truncate, room, *known)
            groups.append((ids + suffix, [completion]))
        return groups

    texts = (text for text in (call.prompt, *call.prompts, *call.completions) if isinstance(text, str))
    groups = await tokenizer.either(sum(map(len, texts)), encoded)
    total = sum(len(completion) for _, completions in groups for completion in completions)
    if units(total, call.top) > MOST_UNITS:
        most = MOST_UNITS // units(1, call.top)
        raise out_of_range("completions", f"{total} tokens; at most {most} at once with top {call.top}")
    return groups


def continuing(ids: list[int], value: str | tuple[int, ...], tokenizer: TextTokenizer) -> list[int]:
    """Ids of a text that stands behind others: without what the tokenizer puts before every text."""
    return ids[tokenizer.num_prefix :] if isinstance(value, str) and len(ids) > tokenizer.num_prefix else ids


def shortened(
    name: str,
    value: str | tuple[int, ...],
    truncate: int | None,
    room: int,
    tokenizer: TextTokenizer,
    vocab_size: int,
    most: int,
    parse_special: bool,
) -> list[int]:
    """Token ids as `encode_tokens` returns them: the first `truncate`, or where that is -1 the first `room` of them."""
    ids = encode_tokens(name, value, tokenizer, vocab_size, most if truncate is None else None, parse_special)
    if truncate is None:
        return ids
    return ids[: max(room, 1)] if truncate == WHOLE_CONTEXT else ids[:truncate]


async def embedded_ids(call: EmbedCall, tokenizer: TextTokenizer, vocab_size: int, most: int) -> list[list[int]]:
    """Token ids of what is embedded, texts as the tokenizer itself begins and ends them.

    Raises:
        TurnoutError: as `encode_tokens`; OUT_OF_RANGE: an input is longer than `most` tokens.
    """

    def encoded(tokenizer: TextTokenizer) -> list[list[int]]:
        found = []
        for place, each in enumerate(call.input):
            name = f"input.{place}" if len(call.input) > 1 else "input"
            end = tokenizer.suffix if isinstance(each, str) else []
            cut = call.truncate
            if cut is not None and cut != WHOLE_CONTEXT:
                cut = max(cut - len(end), 1)
            ids = shortened(name, each, cut, most - len(end), tokenizer, vocab_size, most, call.parse_special) + end
            if len(ids) > most:
                raise out_of_range(name, f"{len(ids)} tokens; at most {most}: see truncate_prompt_tokens")
            found.append(ids)
        return found

    return await tokenizer.either(sum(len(each) for each in call.input if isinstance(each, str)), encoded)
