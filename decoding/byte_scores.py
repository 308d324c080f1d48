"""Byte-level log-probability of a text under a model, whatever tokens the text was written in (paper #122)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

import torch

from decoding.token_trie import TokenTrie
from decoding.translated_sequence import MOST_TAIL, cut_place
from decoding.translation import Translation
from decoding.vocabulary import Vocabulary
from turnout.utf8 import split_complete

MOST_RESTS = 256  # bytes of which the tokens that begin with them are kept at hand


class ByteVocabulary:
    """Tokens of a model by their bytes: `byte_vocabulary(translation)`. It never changes.

    Args:
        vocabulary: the model's.
        size: ids that the model can read are below this.
        byte_ids: the model's token for each single byte that has one.

    Attributes:
        longest: most bytes of a token.
    """

    def __init__(self, vocabulary: Vocabulary, size: int, byte_ids: Mapping[int, int]) -> None:
        self._vocabulary, self._size, self._byte_ids = vocabulary, size, byte_ids
        self._trie = TokenTrie([vocabulary.bytes_of(token) for token in range(min(size, len(vocabulary)))])
        self.longest = max(map(len, self._trie.tokens), default=0)
        self.beginning_with = lru_cache(maxsize=MOST_RESTS)(self._beginning_with)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none of a special one."""
        return self._trie.tokens[token] if token < len(self._trie.tokens) else b""

    def path(self, data: bytes) -> tuple[tuple[int, ...], bytes]:
        """Return the standard path of a text: its tokens, as the model's tokenizer encodes it.

        Args:
            data: the text; a character at its end may be unfinished.

        Returns:
            The tokens; and the bytes of an unfinished character that has no tokens.
        """
        text, rest = split_complete(data)
        tokens = [token for token in self._vocabulary.encode(text) if token < self._size] if text else []
        parts = [self._byte_ids[byte] for byte in rest if byte in self._byte_ids]
        return ((*tokens, *parts), b"") if len(parts) == len(rest) else (tuple(tokens), rest)

    def _beginning_with(self, rest: bytes) -> torch.Tensor:
        """Ids of the tokens whose bytes begin with some: int64 [n]."""
        return torch.from_numpy(self._trie.beginning_with(rest))


@lru_cache(maxsize=4)
def byte_vocabulary(translation: Translation) -> ByteVocabulary:
    """Return the vocabulary of a translation's draft model by its bytes; kept per translation."""
    return ByteVocabulary(translation.draft, translation.draft_size, translation.byte_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TextScore:
    """Score of a text, with what the score of a longer one can be worked out from.

    A place i is that of the token after the first i of the standard path.

    Attributes:
        tokens: the standard path.
        settled: of these, how many are encoded for good.
        tail: bytes of the text after them.
        sums: of each place, the log-probability of the tokens before it, nats.
        rows: of some places, the log-probabilities of the token there: float32 [vocab].
        logprob: of the text's bytes, nats.
        length: tokens of the path that contributes most to it.
    """

    tokens: tuple[int, ...] = ()
    settled: int = 0
    tail: bytes = b""
    sums: tuple[float, ...] = (0.0,)
    rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    logprob: float = 0.0
    length: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LongerText:
    """A text that is longer than one that has a score: what must be read for its own.

    Attributes:
        before: score of the shorter one.
        tokens: see `TextScore`, as `settled` and `tail`.
        rest: bytes at its end that no token of the path stands for.
        agreed: tokens at the beginning that both standard paths have.
        alternatives: by place, the tokens that cover all the rest of the text from there: int64 [n], n > 0.
        first: place of the first row that must be read; -1: none.
        last: place of the last one.
    """

    before: TextScore
    tokens: tuple[int, ...]
    settled: int
    tail: bytes
    rest: bytes
    agreed: int
    alternatives: Mapping[int, torch.Tensor]
    first: int = -1
    last: int = -1

    @classmethod
    def of(cls, before: TextScore, added: bytes, vocabulary: ByteVocabulary) -> LongerText:
        """Encode a text with some bytes added. The empty text needs a row, too: what may follow the prompt."""
        settled, tail = before.tokens[: before.settled], before.tail + added
        if len(tail) > MOST_TAIL:
            place = cut_place(tail)
            settled, tail = settled + vocabulary.path(tail[:place])[0], tail[place:]
        path, rest = vocabulary.path(tail)
        tokens = settled + path
        pairs = zip(before.tokens, tokens, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        alternatives = _alternatives(tokens, rest, vocabulary)
        needed = {*range(agreed, len(tokens)), *alternatives} or ({0} if not tokens else set())
        missing = [place for place in needed if place > agreed or place not in before.rows]
        places = (min(missing), max(needed)) if missing else (-1, -1)
        return cls(before, tokens, len(settled), tail, rest, agreed, alternatives, *places)

    def score(self, read: Items[torch.Tensor] = ()) -> TextScore:
        """Return the score: the sum over the standard path, and over each of its beginnings with an alternative.

        log P = logsumexp of log P(b_1..b_m), the standard path, and, for every place i, of log P(b_1..b_i) + logsumexp
        of the log-probabilities there of all other tokens whose bytes begin with the rest of the text from b_i+1 on.

        Args:
            read: log-probabilities of the tokens at the places from `first` to `last`: float32 [vocab] each.
        """
        rows = {place: row for place, row in self.before.rows.items() if place <= self.agreed}
        rows |= {self.first + offset: row for offset, row in enumerate(read)}
        sums = list(self.before.sums[: self.agreed + 1])
        for place in range(self.agreed, len(self.tokens)):
            sums.append(sums[-1] + float(rows[place][self.tokens[place]]))
        paths = [] if self.rest else [(sums[-1], len(self.tokens))]
        for place, ids in self.alternatives.items():
            paths.append((sums[place] + float(rows[place][ids].double().logsumexp(0)), place + 1))
        values = torch.tensor([value for value, _ in paths], dtype=torch.float64)
        logprob = float(values.logsumexp(0)) if paths else -math.inf
        length = max(paths, default=(0.0, len(self.tokens)))[1]
        kept = {*self.alternatives, max(len(self.tokens) - 1, 0)}
        rows = {place: row for place, row in rows.items() if place in kept}
        return TextScore(self.tokens, self.settled, self.tail, tuple(sums), rows, logprob, length)


def _alternatives(tokens: tuple[int, ...], rest: bytes, vocabulary: ByteVocabulary) -> dict[int, torch.Tensor]:
    """By place, the other tokens whose bytes begin with the rest of a text, the last place first."""
    found: dict[int, torch.Tensor] = {}
    place = len(tokens)
    while place >= 0 and len(rest) <= vocabulary.longest:
        if rest:
            ids = vocabulary.beginning_with(rest)
            ids = ids[ids != tokens[place]] if place < len(tokens) else ids
            if len(ids):
                found[place] = ids
        place -= 1
        rest = vocabulary.bytes_of(tokens[place]) + rest if place >= 0 else rest
    return found
