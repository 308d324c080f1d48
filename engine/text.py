"""Text at the edge of the engine: tokenizer, chat template, incremental detokenising, stop strings."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer

from engine.structures import Structures
from turnout.calls import ChatMessage
from turnout.errors import Code, TurnoutError, invalid, out_of_range
from turnout.tools import Tool

REPLACEMENT = "\ufffd"
# Tokens decoded before a new one, so that tokenizers that look back (spaces, joined bytes) see enough.
LOOK_BACK = 6
# Tokens after which text that still ends in a broken character is taken for broken; a character has at most 4 bytes.
PATIENCE = 8
LONGEST_WINDOW = 64
LONG = 64 << 10  # characters that are not encoded on the event loop
# What a tokenizer may do to a text before it is cut into tokens, so that no byte of it is lost.
KEEPING = frozenset({"Sequence", "ByteLevel", "Digits", "Split", "NFC"})
NFC_SHRINKS = 4  # composed characters have no fewer bytes than a third
T = TypeVar("T")
# One after another: long prompts of all requests together take no more than one core.
_long = ThreadPoolExecutor(1, thread_name_prefix="long prompts")
BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TextTokenizer:
    """The pool's tokenizer.

    Args:
        path: folder of a Hugging Face tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.eos_ids = frozenset(_eos_ids(self._tokenizer, path))
        self._prefix = _prefix_ids(self._tokenizer)
        self._longest = _longest_token(self._tokenizer)
        # Once per token and request: the wrapper around the tokenizers library takes four times as long as the library.
        self._decode = (
            self._tokenizer.backend_tokenizer.decode
            if self._tokenizer.is_fast
            else partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        )
        self.text = lru_cache(maxsize=65536)(self._text)
        self._bytes = lru_cache(maxsize=65536)(_bytes_of)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def vocabulary(self) -> dict[str, int]:
        """Every token's string and id."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    @cached_property
    def structures(self) -> Structures:
        """What answers can be constrained to, in these tokens."""
        usable = self._tokenizer.is_fast and self.eos_ids
        return Structures(self.eos_ids, self._tokenizer.backend_tokenizer.to_str if usable else None)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens spelled out in it are not special."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self._prefix + ids

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), most: int | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: the conversation.
            tools: offered in it.
            most: what cannot have as few tokens is refused before it is encoded.

        Raises:
            TurnoutError: INVALID_ARGUMENT when there is no chat template, it refuses the conversation, or it has no
                place for tools; OUT_OF_RANGE: see `most`.
        """
        if not self._tokenizer.chat_template:
            raise invalid("messages", "this model has no chat template; use a plain prompt")
        turns = [_turn(message) for message in messages]
        text = self._rendered(turns, None)
        if tools:
            plain, text = text, self._rendered(turns, [tool.for_template for tool in tools])
            if text == plain:
                raise invalid("tools", "this model's chat template has no place for tools")
        if most is not None:
            self.check_length("messages", text, most)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _rendered(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tools=tools, add_generation_prompt=True, tokenize=False
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
        return TextTokenizer(self._path)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._decode(list(ids), skip_special_tokens=True)
        return text

    def broken(self, ids: Iterable[int]) -> tuple[tuple[int, bytes], ...]:
        """Ids whose text is not all they are, as they are part of a character, each once and with its bytes."""
        texts = {each: self.text(each) for each in ids}
        parts = ((each, self._bytes(self._tokenizer, each)) for each, text in texts.items() if REPLACEMENT in text)
        return tuple((each, data) for each, data in parts if data is not None)

    def _text(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _longest_token(tokenizer: Any) -> int | None:
    """Most bytes of a text that one token can stand for; None where that is not known.

    Known it is of byte-level tokenizers that neither drop nor join any of the text.
    """
    if not tokenizer.is_fast:
        return None
    core = tokenizer.backend_tokenizer
    vocabulary = core.get_vocab()
    parts = [json.loads(part.__getstate__()) for part in (core.normalizer, core.pre_tokenizer) if part is not None]
    steps = [step for part in parts for step in _steps(part)]
    kinds = {step["type"] for step in steps}
    drops = any(step.get("behavior") == "Removed" for step in steps)
    strips = any(added.lstrip or added.rstrip for added in core.get_added_tokens_decoder().values())
    whole = "ByteLevel" in kinds and kinds <= KEEPING and _byte_alphabet().keys() <= vocabulary.keys()
    if not whole or drops or strips:
        return None
    return max(len(token.encode()) for token in vocabulary) * (NFC_SHRINKS if "NFC" in kinds else 1)


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer, and those it is made of."""
    yield part
    for inner in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _steps(inner)


def _bytes_of(tokenizer: Any, token_id: int) -> bytes | None:
    """The bytes a token stands for; None where the tokenizer does not write it in bytes."""
    written: str = tokenizer.convert_ids_to_tokens(token_id)
    if found := BYTE_FALLBACK.fullmatch(written):
        return bytes.fromhex(found[1])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in written) if all(char in alphabet for char in written) else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token means: printable Latin-1 itself, the others from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


def _turn(message: ChatMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [call.for_template for call in message.tool_calls]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _eos_ids(tokenizer: Any, path: Path) -> set[int]:
    """Ids that end a text: the tokenizer's, and those of the checkpoint's generation config."""
    from transformers import GenerationConfig

    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if (path / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        ids.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    return ids


def _prefix_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: the begin-of-text id, or nothing."""
    start = tokenizer.encode("", add_special_tokens=True)[:1]
    return start if tokenizer.bos_token_id is not None and start == [tokenizer.bos_token_id] else []


class Detokenizer:
    """Turns tokens into text as they come; never emits half a character.

    Args:
        tokenizer: decodes.
        prompt: the tokens before the answer, which a tokenizer may need to space the first word.
    """

    __slots__ = ("_ids", "_pending", "_shown", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-LOOK_BACK:])
        self._shown = len(tokenizer.decode(self._ids))  # characters of the window that were emitted before
        self._pending = 0

    def feed(self, token_id: int) -> str:
        """The text this token completes, maybe none."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(REPLACEMENT):
            added = text[self._shown :]
            self._ids = self._ids[-LOOK_BACK:]
            self._shown = len(self._tokenizer.decode(self._ids))
            self._pending = 0
            return added
        self._pending += 1
        if self._pending < PATIENCE:
            return ""
        # Bytes that are no text, or text that holds U+FFFD itself: only the last may still become something else.
        added = text[self._shown : -1]
        self._shown += len(added)
        if len(self._ids) > LONGEST_WINDOW:
            self._shorten(text)
        return added

    def _shorten(self, text: str) -> None:
        """Cut the window where its text falls into two, so that endless broken bytes stay cheap."""
        for cut in range(len(self._ids) - 1, len(self._ids) - PATIENCE, -1):
            head, tail = self._tokenizer.decode(self._ids[:cut]), self._tokenizer.decode(self._ids[cut:])
            if head + tail == text and len(head) <= self._shown:
                self._ids = self._ids[cut:]
                self._shown -= len(head)
                return

    def flush(self) -> str:
        """What is left at the end of the answer, broken characters included."""
        text = self._tokenizer.decode(self._ids)
        added = text[self._shown :]
        self._shown = len(text)
        return added

    def clone(self) -> Detokenizer:
        """An independent copy in the same state."""
        twin = Detokenizer(self._tokenizer)
        twin._ids, twin._shown, twin._pending = list(self._ids), self._shown, self._pending
        return twin


class StopStrings:
    """Collects an answer's text and finds the first stop string in it. Implements `decoding.sequence.TextStop`.

    Args:
        detokenizer: of this answer.
        stop: stop strings; may be empty.
    """

    __slots__ = ("_detokenizer", "_sent", "_stop", "_text", "stopped")

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._text = ""
        self._sent = 0
        self.stopped = False

    def feed(self, token_id: int) -> bool:
        """Take the next token; True when the text now contains a stop string (cut off from the text)."""
        added = self._detokenizer.feed(token_id)
        if not added:
            return False
        start = max(len(self._text) - max((len(s) for s in self._stop), default=1) + 1, 0)
        self._text += added
        found = [at for at in (self._text.find(s, start) for s in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True
        return self.stopped

    def take(self, final: bool = False) -> str:
        """New text that can be shown: what might still become a stop string is held back until `final`."""
        if final and not self.stopped:
            self._text += self._detokenizer.flush()
        end = len(self._text) if final or self.stopped else len(self._text) - self._held()
        text = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return text

    def _held(self) -> int:
        """Length of the longest suffix of the text that starts a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def clone(self) -> StopStrings:
        """An independent copy in the same state."""
        twin = StopStrings(self._detokenizer.clone(), self._stop)
        twin._text, twin._sent, twin.stopped = self._text, self._sent, self.stopped
        return twin
