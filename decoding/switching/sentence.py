"""Switch by place in the sentence: one model opens, the other finishes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from decoding.model import Decision, Readout, ReadSpec, TokenText
from decoding.noise import Purpose, noise_key, uniform
from decoding.state import Stateful
from decoding.switching.base import Role
from turnout.utf8 import split_complete

TERMINAL = ".!?…"
# Chinese and Japanese put no space after a sentence.
TERMINAL_UNSPACED = "\u3002\uff01\uff1f"
# Stands for the bytes of tokens that are nothing but part of a word.
WORD = b"w"
LONGEST_LINE = 32


class SentenceMarks(dict[int, bytes]):
    """Bytes by token, one object for each tokenizer. It never changes, so a model elsewhere gets it once."""

    is_constant = True

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


@lru_cache(maxsize=8)
def sentence_marks(tokens: TokenText, vocab_size: int) -> SentenceMarks:
    """Bytes of every token that matters for finding sentence ends; any other token is part of a word.

    Args:
        tokens: looks up bytes of tokens; the result is kept per object.
        vocab_size: ids to look up.
    """
    found = ((token, tokens.token_bytes(token)) for token in range(vocab_size))
    return SentenceMarks({token: data for token, data in found if _matters(data)})


def _matters(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return True  # part of a character, which may end a sentence
    ends = any(char in TERMINAL or char in TERMINAL_UNSPACED or char == "\n" or char.isdigit() for char in text)
    return ends or not any(char.isalnum() for char in text)


class SentenceTracker:
    """Finds sentence ends in a token stream.

    A sentence ends with a token that holds a newline or terminal punctuation, if it has a word at all (so "..."
    and blank lines end once). Guards: punctuation inside a word ("3.14", "a.b") ends nothing; a full stop after
    a number that stands alone at the start of a line ("1.") is a list number; after any other number
    a full stop at the end of a token is undecided until the next token shows whether a decimal follows.
    Abbreviations are not known.
    """

    def __init__(self) -> None:
        self.partial = b""  # first bytes of a character
        self.line = ""
        self.has_word = False
        self.undecided = False

    def opens(self, data: bytes) -> bool:
        """Look at the next token's bytes; True when they settle that the sentence had ended before them."""
        text, _ = split_complete(self.partial + data)
        opened = self.undecided and not text[:1].isdigit()
        self.undecided = False
        if opened:
            self.has_word = False
        return opened

    def feed(self, data: bytes) -> bool:
        """Take the next token's bytes; True when a sentence ended in them."""
        text, self.partial = split_complete(self.partial + data)
        ended = self.undecided = False
        for index, char in enumerate(text):
            if self._ends(char, text[index + 1 : index + 2]):
                ended = True
                self.has_word = False
            self.line = "" if char == "\n" else self.line + char
            self.has_word = self.has_word or char.isalnum()
        self.line = self.line[-LONGEST_LINE:]
        return ended

    def _ends(self, char: str, following: str) -> bool:
        if not self.has_word:
            return False
        if char == "\n" or char in TERMINAL_UNSPACED:
            return True
        if char not in TERMINAL or following.isalnum():
            return False
        if char == "." and self.line[-1:].isdigit():
            if self.line.strip().isdigit():
                return False
            self.undecided = not following
            return not self.undecided
        return True


class SentenceSwitch(Stateful):
    """Paper #202 (FoReaL-Decoding): the large model opens sentences, the small one finishes them.

    At the start of each sentence a keyed coin decides whether the large model leads; if so it writes the first
    `lead_tokens` tokens, fewer where the sentence ends, and the small one the rest. When a sentence turns out to
    have ended one token ago, that token is dropped and the right model chooses it, unless it ends the answer.

    Args:
        lead_tokens: tokens the large model writes in a sentence it leads.
        lead_probability: chance that it leads.
        marks: see `sentence_marks`.
        seed: of the keyed noise.
        position: absolute position of the first token.
        end_ids: tokens that end the answer; either model may write them.
    """

    name = "sentence"
    want = ReadSpec()
    changing = ("active", "position", "lead_left", "tracker")

    def __init__(
        self,
        *,
        lead_tokens: int,
        lead_probability: float,
        marks: Mapping[int, bytes],
        seed: int,
        position: int,
        end_ids: Collection[int] = (),
    ) -> None:
        self.lead_tokens = lead_tokens
        self.lead_probability = lead_probability
        self.seed = seed
        self.position = position
        self.end_ids = frozenset(end_ids)
        self.marks = marks
        self.tracker = SentenceTracker()
        self.active: Role = "small"
        self.lead_left = 0
        self._open()

    def observe(self, token: int, row: Readout) -> Decision:
        """See `SwitchRule.observe`."""
        before, data = self.active, self.marks.get(token, WORD)
        if self.tracker.opens(data):
            self._open()
            if self.active != before and token not in self.end_ids:
                return Decision.DROP
        self.position += 1
        if self.tracker.feed(data):
            self._open()
        elif self.active == "large":
            self.lead_left -= 1
            if self.lead_left <= 0:
                self.active = "small"
        return Decision.GO_ON if self.active == before else Decision.STOP

    def _open(self) -> None:
        """A sentence starts at `position`: who writes its first token?"""
        chance = uniform(noise_key(self.seed, self.position, Purpose.SWITCH))
        self.active = "large" if chance < self.lead_probability else "small"
        self.lead_left = self.lead_tokens


RULE = SentenceSwitch
