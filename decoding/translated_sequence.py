"""A sequence in the tokens of a model with another vocabulary, kept up with the one that it translates."""

from __future__ import annotations

from collections import deque

from decoding.sequence import Sequence
from decoding.translation import Translation
from turnout.types import UNBANNED, Sharing
from turnout.utf8 import split_complete

# Bytes at the end of a text that are encoded anew each time, because what follows may change their tokens.
LEAST_TAIL, MOST_TAIL = 64, 256
# The target's tokens that stand before a draft when it is encoded.
CONTEXT_TOKENS = 16


class TranslatedSequence(Sequence):
    """Translation of a sequence, for one model: text is encoded with that model's tokenizer, special tokens by name.

    `tokens` only grow: they are the text that is settled. The newest text is encoded anew with each call, and given to
    the model as hypothetical tokens: what of it encodes as before stays in the model's cache. It shares the meter of
    the sequence that it translates, and is released with it.

    A prompt of which the sequence has a rendering for the model is taken from there.

    Args:
        seq: what to translate.
        model: name of the model that reads it.
        translation: to the model's vocabulary, from that of `seq`.
    """

    __slots__ = ("_begun", "_read", "_recent", "_text", "_translation")

    def __init__(self, seq: Sequence, model: str, translation: Translation) -> None:
        draft, rendered = translation.draft, seq.renderings.get(model)
        begins = [token for token in rendered or draft.begins if token < translation.draft_size]
        # What names ids or counts tokens holds for the target's vocabulary.
        sampling = seq.sampling.model_copy(
            update={"logit_bias": {}, "processors": (), "structure": None, "stop": (), "stop_token_ids": (), **UNBANNED}
        )
        super().__init__(
            begins or (0,),  # see below
            sampling,
            seq.seed,
            (),
            None,
            Sharing(seq.sharing.rest, salt=seq.sharing.salt),  # the spans of `seq` are counted in its own tokens
            seq.tenant,
            seq.lossy,
            seq.low_priority,
        )
        self.owner = seq.owner
        self.meter = seq.meter
        self._translation = translation
        self._text = bytearray()
        self._begun = rendered is not None
        self._recent: deque[bytes] = deque(maxlen=CONTEXT_TOKENS)
        if not begins:
            self.tokens.clear()
        if rendered is None:
            starts = translation.target.begins
            first = len(starts) if tuple(seq.tokens[: len(starts)]) == starts else 0
            self._take(seq.tokens[first : seq.num_prompt_tokens])
        self._read = seq.num_prompt_tokens
        if not self.tokens:
            self._settle(len(self._text) - len(split_complete(self._text)[1]))
        if not self.tokens:  # nothing that it knows
            self._keep([draft.end or 0])
        self.num_prompt_tokens = len(self.tokens)
        self.prompt_set = frozenset(self.tokens)
        self.output_counts.clear()

    @classmethod
    def following(cls, seq: Sequence, model: str, translation: Translation) -> TranslatedSequence:
        """Return the translation of `seq` for a model, begun at its first use."""
        found = seq.companions.get(model)
        if not isinstance(found, TranslatedSequence):
            found = seq.companions[model] = cls(seq, model, translation)
        return found

    @classmethod
    def prompt_of(cls, seq: Sequence, model: str, translation: Translation) -> list[int]:
        """Return the prompt of a sequence in a model's tokens; bytes of an unfinished character only if it has them."""
        made = cls(seq, model, translation)
        text, rest = split_complete(made._text)
        parts = [translation.byte_ids[byte] for byte in rest if byte in translation.byte_ids]
        return [*made.tokens, *made._encoded(text), *(parts if len(parts) == len(rest) else ())]

    def follow(self, seq: Sequence) -> tuple[int, ...] | None:
        """Read what is new in the sequence.

        Returns:
            The tokens of the newest text, which follow `tokens`; None: the text ends inside a character of which the
            model has no bytes.
        """
        self._take(seq.tokens[self._read :])
        self._read = len(seq)
        text, rest = split_complete(self._text)
        parts = [self._translation.byte_ids.get(byte) for byte in rest]
        if None in parts:
            return None
        return (*self._encoded(text), *(part for part in parts if part is not None))

    def continuation(self, drafted: bytes) -> list[int]:
        """Return the target's tokens for bytes that are drafted after the sequence.

        Together with the newest tokens the text is encoded as the target's tokenizer would, and where these do not
        come out as they are, alone. Whatever the tokenizer does to a text, the tokens returned add a prefix of
        `drafted` and nothing else; without a token for it, or inside a character, the prefix ends.
        """
        target = self._translation.target
        before = b"".join(self._recent)
        while before and before[0] & 0xC0 == 0x80:  # starts inside a character
            before = before[1:]
        tokens = target.encode(split_complete(before + drafted)[0])
        place = start = 0
        while start < len(tokens) and place < len(before):
            place += len(target.bytes_of(tokens[start]))
            start += 1
        if place != len(before):
            tokens, start = target.encode(split_complete(drafted)[0]), 0
        kept: list[int] = []
        done = b""
        for token in tokens[start:]:
            added = target.bytes_of(token)
            done += added
            if not added or not drafted.startswith(done):
                break
            kept.append(token)
        return kept

    def _take(self, tokens: list[int]) -> None:
        """Read tokens of the target, and settle the text that is old enough."""
        target = self._translation.target
        for token in tokens:
            if token in target.special:
                self._settle(len(self._text))
                special = self._translation.special.get(token)
                self._keep([] if special is None else [special])
                self._recent.clear()
                continue
            added = target.bytes_of(token, first=not (self._begun or self._text))
            self._text += added
            self._recent.append(added)
        if len(self._text) > MOST_TAIL:
            self._settle(cut_place(self._text))

    def _settle(self, end: int) -> None:
        """Encode the text up to a place for good."""
        if end > 0:
            self._keep(self._encoded(self._text[:end].decode(errors="replace")))
            del self._text[:end]
            self._begun = True

    def _encoded(self, text: str) -> list[int]:
        """Return the model's tokens for a text, less those that only its tokenizer knows."""
        tokens = self._translation.draft.encode(text, first=not self._begun) if text else []
        return [token for token in tokens if token < self._translation.draft_size]

    def _keep(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        for token in tokens:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1


def cut_place(text: bytes | bytearray) -> int:
    """Return where a text may be cut with little effect on its tokens: before a space, else between two characters."""
    last = len(text) - LEAST_TAIL
    place = max(text.rfind(space, last - LEAST_TAIL, last) for space in (b" ", b"\n"))
    while place > 0 and text[place - 1 : place].isspace():
        place -= 1
    if place <= 0:
        place = last
        while place > 0 and text[place] & 0xC0 == 0x80:
            place -= 1
    return place
