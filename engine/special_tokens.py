"""Special tokens spelled out in a text: taken as text, so that whoever writes the text cannot forge a turn."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

# Private-use characters stand for the special tokens that a conversation spells out while its template is filled in.
STAND_INS = range(0xF0000, 0xFFFFE)


class SpecialTokens:
    """The special tokens of a tokenizer, and texts in which they are no more than their spelling.

    A tokenizer cuts a text at its special tokens before anything else. A copy of it whose special tokens have names
    that nobody can guess cuts the same text nowhere; and where one of these names stands in the text, it cuts there
    and gives the token. So a template's own tokens are told from those that a message spells out, in one pass.

    Args:
        core: a tokenizer of the `tokenizers` library.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        names = {added.content for added in core.get_added_tokens_decoder().values() if added.special}
        self._names = sorted(filter(None, names), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")

    def spelled_out(self, text: str) -> set[str]:
        """Special tokens that a text spells out."""
        return set(self._spelled.findall(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which no special token is meant."""
        if not self._spelled.search(text):
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
            return ids
        return self._encode_hidden(text)

    def encode_marked(self, text: str, marks: dict[str, str]) -> list[int]:
        """Token ids of a text in which marks stand for special tokens that are spelled out, and the others are meant.

        Args:
            text: filled-in template.
            marks: the special token that each mark stands for; see `hide`.
        """
        hidden = self._spelled.sub(lambda found: self._hidden[1][found[0]], text)
        for mark, name in marks.items():
            hidden = hidden.replace(mark, name)
        return self._encode_hidden(hidden)

    def _encode_hidden(self, text: str) -> list[int]:
        twin, aliases = self._hidden
        ids = {twin.token_to_id(alias): self._core.token_to_id(name) for name, alias in aliases.items()}
        return [ids.get(token_id, token_id) for token_id in twin.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _hidden(self) -> tuple[Any, dict[str, str]]:
        """A copy of the tokenizer whose special tokens have secret names, and the secret name of each."""
        secret = secrets.token_hex(8)
        aliases = {name: f"\ue000{secret}{place}\ue001" for place, name in enumerate(self._names)}
        made = json.loads(self._core.to_str())
        made["post_processor"] = made["truncation"] = made["padding"] = None
        for added in made["added_tokens"]:
            added["content"] = aliases.get(added["content"], added["content"])
        model = made["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {aliases.get(written, written): number for written, number in vocab.items()}
        else:  # of a Unigram model: pairs of piece and score, by id
            model["vocab"] = [[aliases.get(written, written), score] for written, score in vocab]
        if isinstance(unknown := model.get("unk_token"), str):
            model["unk_token"] = aliases.get(unknown, unknown)
        return Tokenizer.from_str(json.dumps(made)), aliases


def hide(value: Any, special: SpecialTokens) -> tuple[Any, dict[str, str]]:
    """Put a mark in place of every special token that the strings of a JSON value, names too, spell out.

    Args:
        value: messages, as a template takes them.
        special: of the tokenizer.

    Returns:
        The value with marks, and the special token that each mark stands for; no marks where nothing is spelled out.
    """
    texts = list(_strings(value))
    found = sorted(set().union(*map(special.spelled_out, texts)))
    used = set().union(*texts)
    free = (chr(code) for code in STAND_INS if chr(code) not in used)
    marks = dict(zip(free, found, strict=False))
    mark_of = {name: mark for mark, name in marks.items()}
    # Longest first, as the tokenizer would find them.
    pattern = re.compile("|".join(map(re.escape, sorted(mark_of, key=len, reverse=True))) or r"(?!)")

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: mark_of[match[0]], value)
        if isinstance(value, dict):
            return {hidden(name): hidden(each) for name, each in value.items()}
        return [hidden(each) for each in value] if isinstance(value, list) else value

    return (hidden(value) if marks else value), marks


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
