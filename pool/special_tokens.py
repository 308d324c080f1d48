"""Special tokens spelled out in a text: taken as text, so that the author of the text cannot forge a turn."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

# Normalizers under which no other text becomes the name of a token.
KEEPING_NAMES = frozenset({"Sequence", "Prepend", "NFC"})


class SpecialTokens:
    """Tokens that mean something to a chat template, and texts in which they are no more than their spelling.

    A tokenizer cuts a text at its added tokens before anything else. A twin of it, whose special tokens have names
    that cannot be guessed, cuts the same text nowhere; and where one of these names stands in the text, it cuts there
    and gives the token. So a template's own tokens differ from those that a message spells out, in one pass.

    Args:
        core: a tokenizer of the `tokenizers` library.
        turns: names of tokens that begin or end a turn without being flagged as special.

    Attributes:
        flagged: names of tokens flagged as special, but for ordinary words and characters (a pad token may be `!`).
        names: these and `turns`.
        always: whether other texts than their names can become special tokens, so that a look at the text is no proof.
    """

    def __init__(self, core: Any, turns: Iterable[str] = ()) -> None:
        self._core = core
        added = core.get_added_tokens_decoder().values()
        self.flagged = {each.content for each in added if each.special and _means_something(each.content)}
        self.names = self.flagged | set(turns)
        self.always = any(each.normalized for each in added if each.content in self.names) and _changes_names(core)
        self._spelled = pattern_of(self.names)
        secret = secrets.token_hex(8)
        ordered = sorted(self.names)
        self._aliases = {name: f"\ue000{secret}{place}\ue001" for place, name in enumerate(ordered)}
        self._marks = {name: f"\ue002{secret}{place}\ue003" for place, name in enumerate(ordered)}
        self._marked = re.compile(f"\ue002{secret}([0-9]+)\ue003")
        self._ordered = ordered

    def encode(self, text: str) -> list[int]:
        """Encode a text in which no special token is meant."""
        if self.always or self._spelled.search(text):
            return self._encode_hidden(text)
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, text: str) -> list[int] | None:
        """Encode a filled-in template; None: no special token is spelled out in it, so that the tokenizer can do it.

        Args:
            text: with marks for special tokens that messages spell out, see `hide`; all others are meant.
        """
        if not (self.always or self._marked.search(text)):
            return None
        hidden = self._spelled.sub(lambda found: self._aliases[found[0]], text)
        return self._encode_hidden(self._marked.sub(lambda found: self._ordered[int(found[1])], hidden))

    def hide(self, value: Any, names: Iterable[str]) -> Any:
        """Put a mark in place of every special token that the strings of a JSON value, keys too, spell out.

        Args:
            value: as a template takes it.
            names: of the tokens.
        """
        pattern = pattern_of(names)

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda found: self._marks[found[0]], value)
            if isinstance(value, dict):
                return {hidden(name): hidden(each) for name, each in value.items()}
            return [hidden(each) for each in value] if isinstance(value, list) else value

        return hidden(value)

    def _encode_hidden(self, text: str) -> list[int]:
        twin, real = self._twin
        return [real.get(token_id, token_id) for token_id in twin.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _twin(self) -> tuple[Any, dict[int, int]]:
        """The twin, and the ids that its ids mean where they differ."""
        aliases = self._aliases
        # Models of the other kinds would find the names in their vocabulary as they find words.
        twin = self._sharing(aliases) if type(self._core.model).__name__ == "BPE" else self._renamed(aliases)
        added = self._core.get_added_tokens_decoder()
        real = {twin.token_to_id(aliases.get(each.content, each.content)): token_id for token_id, each in added.items()}
        return twin, real

    def _sharing(self, aliases: dict[str, str]) -> Any:
        """A twin on the same model, which is made at once however large the vocabulary is."""
        twin = Tokenizer(self._core.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (made := getattr(self._core, part)) is not None:
                setattr(twin, part, made)
        twin.add_tokens([_renamed(each, aliases) for _, each in sorted(self._core.get_added_tokens_decoder().items())])
        return twin

    def _renamed(self, aliases: dict[str, str]) -> Any:
        """A twin whose vocabulary has the secret names as well."""
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
        return Tokenizer.from_str(json.dumps(made))


def pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of some names, the longest first as a tokenizer does."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def strings_of(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from strings_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_of(each)


def _means_something(name: str) -> bool:
    return len(name) > 1 and not name.isalnum()


def _renamed(token: Any, aliases: dict[str, str]) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(aliases.get(token.content, token.content), special=False, **flags)


def _changes_names(core: Any) -> bool:
    """Tell whether a normalizer may turn another text into the name of a token, as lower case and NFKC do."""
    parts = [] if core.normalizer is None else [json.loads(core.normalizer.__getstate__())]
    while parts:
        part = parts.pop()
        parts += part.get("normalizers", [])
        spaces = part["type"] == "Replace" and part["pattern"] == {"String": " "}
        if not (spaces or part["type"] in KEEPING_NAMES):
            return True
    return False
