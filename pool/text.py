"""Text at the edge of the engine: the tokenizer and its chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer

from decoding.translation import Vocabularies
from pool.chat_turns import in_parts_of, takes_parts, turn_of
from pool.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, spans_of
from pool.end_of_text import end_of_text
from pool.request_defaults import generation_sampling
from pool.special_tokens import SpecialTokens, pattern_of, strings_of
from pool.structures import Structures
from pool.token_bytes import BYTE_FALLBACK, Span, TokenBytes, byte_alphabet
from pool.tool_template import ToolTemplate, form_of
from pool.vocabulary import TextVocabulary
from turnout.calls import ChatMessage
from turnout.chat_template import NO_OPTIONS, TemplateOptions
from turnout.errors import Code, TurnoutError, invalid, out_of_range
from turnout.tools import Tool
from turnout.utf8 import name_of_part, split_complete

LONG = 64 << 10  # characters that are not encoded on the event loop
# What a tokenizer may do to a text before it is cut into tokens, so that no byte of it is lost.
KEEPING = frozenset({"Sequence", "ByteLevel", "Digits", "Split", "NFC"})
NFC_SHRINKS = 4  # composed characters have no fewer bytes than a third
NO_TEMPLATE = (
    "this model has no chat template: send a plain prompt (/v1/completions), or have a chat_template.jinja added to the"
    " model's files"
)
T = TypeVar("T")
# One after another: long prompts of all requests together take no more than one core.
_long = ThreadPoolExecutor(1, thread_name_prefix="long prompts")


class TextTokenizer:
    """The pool's tokenizer.

    Args:
        path: folder of a Hugging Face tokenizer.
        tool_format: how the model writes calls of tools; "": as its chat template or vocabulary shows. It may be set
            before anything is encoded.
    """

    def __init__(self, path: Path, tool_format: str = "") -> None:
        self._path = path
        self.tool_format = tool_format
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        self.ends = end_of_text(path, self._tokenizer)
        self.generation, self.notes = generation_sampling(path)
        self.eos_ids = self.ends.ids
        self._takes_parts = takes_parts(self._tokenizer)
        self._prefix = _prefix_ids(self._tokenizer)
        self.num_prefix, self.suffix = len(self._prefix), _suffix_ids(self._tokenizer, len(self._prefix))
        self._longest = _longest_token(self._tokenizer)
        self._bytes: TokenBytes | None = None
        if self._tokenizer.is_fast:
            core = self._tokenizer.backend_tokenizer
            core.no_truncation()  # a file may ask for both; they are not for prompts
            core.no_padding()
            self._bytes = TokenBytes(core)

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can become prompts."""
        return bool(self._tokenizer.chat_template)

    def vocabulary(self) -> dict[str, int]:
        """Every token's string and id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    @cached_property
    def drafting_vocabulary(self) -> TextVocabulary | None:
        """What drafting across vocabularies needs of it; None without a fast tokenizer."""
        if self._bytes is None:
            return None
        usual = self._tokenizer.eos_token_id
        end = usual if usual in self.eos_ids else min(self.eos_ids, default=None)
        names = self._bytes.names | {each: self._tokenizer.convert_ids_to_tokens(each) or "" for each in self.eos_ids}
        definition = self._tokenizer.backend_tokenizer.to_str()
        return TextVocabulary(definition, tuple(self._prefix), end, self.eos_ids, names)

    @cached_property
    def tools(self) -> ToolTemplate:
        """How conversations with tools become prompts, and how calls are written in answers."""
        form = form_of(self._tokenizer.chat_template, self.vocabulary(), self.tool_format)
        return ToolTemplate(form, self._rendered, {name: each for each, name in self._names.items()})

    @cached_property
    def structures(self) -> Structures:
        """What answers can be constrained to, in these tokens."""
        return Structures(self.eos_ids, self._bytes.for_structures if self._bytes and self.eos_ids else None)

    def encode(self, text: str, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a text, after what the tokenizer puts before every text.

        Args:
            text: any.
            parse_special: whether special tokens that are spelled out in it are meant. One that the tokenizer puts
                first, and the text as well, stands there once.
            add_special: whether the tokenizer puts anything first.
        """
        if parse_special or self._special is None:
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=not parse_special
            )
        else:
            ids = self._special.encode(text)
        there = not add_special or ids[: len(self._prefix)] == self._prefix
        return ids if there else self._prefix + ids

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        most: int | None = None,
        template: TemplateOptions = NO_OPTIONS,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer unless `template` says otherwise.

        Special tokens that messages, tools or variables spell out are text; only the template's own are meant.

        Args:
            messages: the conversation.
            tools: offered in it.
            most: what cannot have as few tokens is refused before it is encoded.
            template: what else the chat template gets.

        Raises:
            TurnoutError: INVALID_ARGUMENT when there is no chat template, or it refuses the conversation;
                OUT_OF_RANGE: see `most`.
        """
        if not self.has_chat_template:
            raise invalid("messages", NO_TEMPLATE)
        turns, offered, kwargs = self._without_special_tokens(messages, tools, template.kwargs)
        template = replace(template, kwargs=kwargs)
        text = self._rendered(*self.tools.filled(turns, offered), template)
        if most is not None:
            self.check_length("messages", text, most)
        if self._special is not None and (hidden := self._special.encode_chat(text)) is not None:
            return hidden
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _without_special_tokens(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], kwargs: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """What the template takes, with marks in place of special tokens; see `SpecialTokens.hide`."""
        turns, offered = [turn_of(message) for message in messages], [tool.for_template for tool in tools]
        special = self._special
        if special is None:
            found = pattern_of(self._names.values())
            for field, value in (("messages", turns), ("tools", offered), ("chat_template_kwargs", kwargs)):
                if name := next((match[0] for text in strings_of(value) if (match := found.search(text))), None):
                    raise invalid(field, f"spell out {name!r}, which this model's tokenizer cannot take as text")
            return turns, offered, kwargs
        hidden = []
        for turn in turns:
            # What an assistant wrote is read again as it was written: only flagged tokens are hidden in it.
            names = special.flagged if turn["role"] == "assistant" else special.names
            said = special.hide({key: each for key, each in turn.items() if key != "role"}, names)
            hidden.append({"role": turn["role"], **said})
        return hidden, special.hide(offered, special.names), special.hide(kwargs, special.names)

    def _rendered(
        self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, template: TemplateOptions = NO_OPTIONS
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [in_parts_of(turn) for turn in turns] if self._takes_parts else turns,
                tools=tools,
                add_generation_prompt=template.begins_answer,
                continue_final_message=template.continue_final_message,
                tokenize=False,
                **template.kwargs,
            )
        except Exception as error:
            raise TurnoutError(
                Code.INVALID_ARGUMENT, f"messages: refused by the chat template: {error}", "messages"
            ) from None
        return text

    def check_length(self, name: str, text: str, most: int) -> None:
        """Refuse a text that no way to encode it could fit, before time is spent on it.

        Raises:
            TurnoutError: OUT_OF_RANGE.
        """
        if self._longest is not None:
            least = -(-len(text.encode(errors="replace")) // self._longest)
            if least > most:
                raise out_of_range(name, f"at least {least} tokens; at most {most} fit")

    async def either(self, num_chars: int, work: Callable[[TextTokenizer], T]) -> T:
        """What work with a tokenizer like this one gives; with long texts it is done in a thread.

        Args:
            num_chars: of the texts that are encoded.
            work: takes the tokenizer it is to use: none is for two threads.
        """
        if num_chars <= LONG:
            return work(self)
        return await asyncio.get_running_loop().run_in_executor(_long, lambda: work(self._twin))

    @cached_property
    def _twin(self) -> TextTokenizer:
        """The thread's own."""
        return TextTokenizer(self._path, self.tool_format)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of token ids.

        Args:
            ids: any.
            special: whether special tokens show by their names, all but what the tokenizer puts before every text.
        """
        ids = list(ids)
        if special and ids[: len(self._prefix)] == self._prefix:
            ids = ids[len(self._prefix) :]
        detokenizer = self.detokenizer(special=special)
        return "".join([*map(detokenizer.feed, ids), detokenizer.flush()])

    def detokenizer(self, before: Sequence[int] = (), special: bool = False, shown: Container[int] = ()) -> Detokenizer:
        """A detokenizer of one text.

        Args:
            before: the tokens in front of it, which may be needed to space its first word.
            special: whether special tokens show by their names.
            shown: those that do in any case.
        """
        if special:
            shown = self._names.keys()
        if self._bytes is not None and self._bytes.is_local:
            return ByteDetokenizer(self._bytes, before, shown)
        return WindowDetokenizer(self._decode, self._fragment, self._names, before, shown)

    def spans(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[Span]:
        """Parts of the text of token ids; see `detokenizer.Span`."""
        return spans_of(self.detokenizer(before), ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text it does not begin; a special token's name."""
        if (name := self._names.get(token_id)) is not None:
            return name.encode()
        if self._bytes is not None:
            return self._bytes.after(token_id)
        return self._decode([token_id]).encode()

    def special_name(self, token_id: int) -> str:
        """Return the name of a special token, which adds no text to an answer; "" for every other."""
        return self._names.get(token_id, "")

    def name_of(self, token_id: int) -> str:
        """Name a token for a person: its text, or its bytes where it is a part of a character."""
        data = self.token_bytes(token_id)
        return name_of_part(split_complete(data)[0], data)

    @cached_property
    def _special(self) -> SpecialTokens | None:
        """Tokens that mean something to the chat template; None without a fast tokenizer."""
        if not self._tokenizer.is_fast:
            return None
        core, rendered = self._tokenizer.backend_tokenizer, "".join(_trials(self))
        added = core.get_added_tokens_decoder().values()
        turns = {each.content for each in added if not each.special and each.content.strip() in rendered}
        return SpecialTokens(core, {name for name in turns if name.strip() and not name.isalnum()})

    @cached_property
    def _names(self) -> dict[int, str]:
        """Names of special tokens."""
        if self._bytes is not None:
            return self._bytes.names
        return dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))

    def _decode(self, ids: list[int]) -> str:
        decode = (  # the wrapper around the tokenizers library takes four times as long as the library
            self._tokenizer.backend_tokenizer.decode
            if self._tokenizer.is_fast
            else partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        )
        text: str = decode(ids, skip_special_tokens=True)
        return text

    def _fragment(self, token_id: int) -> bytes | None:
        """Bytes of a token that is written as a byte; None for the others."""
        found = BYTE_FALLBACK.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "")
        return bytes.fromhex(found[1]) if found else None


def _trials(tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield conversations that say nothing, in which every token is the template's own."""
    user, answer = ChatMessage("user", "a"), ChatMessage("assistant", "a")
    for messages in ([user], [user, answer, user], [ChatMessage("system", "a"), user]):
        if tokenizer.has_chat_template:
            with suppress(TurnoutError):  # some templates know no system message
                yield tokenizer._rendered([turn_of(message) for message in messages], None)


def template_of(tokenizer: TextTokenizer) -> str:
    """Return the chat template, or all of them where there are several; "" without one."""
    return str(tokenizer._tokenizer.chat_template or "")


def added_tokens(tokenizer: TextTokenizer) -> dict[str, int]:
    """Return the ids of the tokens that were added to the vocabulary, by name."""
    return {str(each): token for token, each in tokenizer._tokenizer.added_tokens_decoder.items()}


def vocabularies_of(tokenizer: TextTokenizer, foreign: Mapping[str, TextTokenizer]) -> Vocabularies:
    """Return the vocabularies of a pool: that of its tokenizer, and those of models with another one, by name.

    Raises:
        ValueError: a tokenizer is not a fast one; see `pool.components.check_drafting`.
    """
    if not foreign:
        return Vocabularies()
    found = {name: each.drafting_vocabulary for name, each in foreign.items()}
    others = {name: each for name, each in found.items() if each is not None}
    if len(others) < len(foreign) or tokenizer.drafting_vocabulary is None:
        raise ValueError("drafting across vocabularies needs fast tokenizers")
    return Vocabularies(tokenizer.drafting_vocabulary, others)


def _longest_token(tokenizer: Any) -> int | None:
    """Most bytes of a text that one token can stand for; None where that is not known.

    Known it is of byte-level tokenizers that neither drop nor join any of the text.
    """
    if not tokenizer.is_fast:
        return None
    core = tokenizer.backend_tokenizer
    vocabulary = core.get_vocab()
    parts = [json.loads(part.__getstate__()) for part in (core.normalizer, core.pre_tokenizer) if part is not None]
    steps = [step for part in parts for step in _nested(part)]
    kinds = {step["type"] for step in steps}
    drops = any(step.get("behavior") == "Removed" for step in steps)
    strips = any(added.lstrip or added.rstrip for added in core.get_added_tokens_decoder().values())
    whole = "ByteLevel" in kinds and kinds <= KEEPING and byte_alphabet().keys() <= vocabulary.keys()
    if not whole or drops or strips:
        return None
    return max(len(token.encode()) for token in vocabulary) * (NFC_SHRINKS if "NFC" in kinds else 1)


def _nested(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer, and those it is made of."""
    yield part
    for inner in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _nested(inner)


def _prefix_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: the begin-of-text id, or nothing."""
    start = tokenizer.encode("", add_special_tokens=True)[:1]
    return start if tokenizer.bos_token_id is not None and start == [tokenizer.bos_token_id] else []


def _suffix_ids(tokenizer: Any, num_prefix: int) -> list[int]:
    """What the tokenizer puts behind a text that is read as a whole: an end-of-text id, or nothing."""
    ids: list[int] = tokenizer.encode("", add_special_tokens=True)
    return ids[num_prefix:]
