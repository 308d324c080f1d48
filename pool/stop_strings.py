"""Stop strings: found in an answer's text as it comes, and cut off from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pool.detokenizer import Detokenizer
from pool.reasoning import AnswerDetokenizer
from turnout.tool_formats.grammar import form_of_calls
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from pool.text import TextTokenizer


class StopStrings:
    """Collects an answer's text and finds the first stop string in it. Implements `decoding.sequence.TextStop`.

    Args:
        detokenizer: of this answer.
        stop: stop strings; may be empty.
        included: whether the text ends behind the stop string, not before it.
        min_tokens: a stop string that is complete within this number of tokens does not end the answer.

    Attributes:
        found: the stop string that ended the answer: of several, the one that begins first; None: none did.
    """

    __slots__ = ("_detokenizer", "_early", "_included", "_sent", "_stop", "_text", "_unread", "found")

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...], included: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._included = included
        self._early = min_tokens
        self._stop = stop
        self._text = ""
        self._unread: list[int] = []  # tokens, where no stop string is looked for in their text
        self._sent = 0
        self.found: str | None = None

    @property
    def watches(self) -> bool:
        """See `decoding.sequence.TextStop`."""
        return bool(self._stop)

    @property
    def stopped(self) -> bool:
        """Whether the text contains a stop string."""
        return self.found is not None

    def feed(self, token_id: int) -> bool:
        """Take the next token; True when the text now contains a stop string, at which the text then ends."""
        if not self._stop:
            self._unread.append(token_id)
            return False
        added = self._detokenizer.feed(token_id)
        early, self._early = self._early > 0, max(self._early - 1, 0)
        before = len(self._text)
        self._text += added
        if early or not added:
            return False
        places = ((self._text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self._stop)
        found = min((each for each in places if each[0] >= 0), key=lambda each: each[0], default=None)
        if found is not None:
            first, self.found = found
            self._text = self._text[: first + (len(self.found) if self._included else 0)]
        return self.stopped

    def end(self, token_id: int) -> None:
        """Take the token that ended the answer, whose text belongs to it where stop strings are included."""
        if self._included:
            self._read()
            self._text += self._detokenizer.feed(token_id)

    def _read(self) -> None:
        if self._unread:
            self._text += self._detokenizer.feed_all(self._unread)
            self._unread = []

    def take(self, final: bool = False) -> str:
        """New text that can be shown: what might still become a stop string is held back until `final`."""
        self._read()
        if final and not self.stopped:
            self._text += self._detokenizer.flush()
        end = len(self._text) if final or self.stopped else len(self._text) - self._held()
        text = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return text

    def take_reasoning(self) -> str:
        """New reasoning that can be shown; where the text is taken as well, take that first."""
        return self._detokenizer.take_reasoning() if isinstance(self._detokenizer, AnswerDetokenizer) else ""

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
        twin = StopStrings(self._detokenizer.clone(), self._stop, self._included, self._early)
        twin._text, twin._sent, twin.found = self._text, self._sent, self.found
        twin._unread = list(self._unread)
        return twin


def detokenizer_of(tokenizer: TextTokenizer, prompt: Sequence[int], sampling: SamplingParams) -> Detokenizer:
    """Return a detokenizer of an answer's tokens, with the special tokens that its text shows.

    Args:
        tokenizer: the pool's.
        prompt: token ids before the answer.
        sampling: of the answer.
    """
    form = form_of_calls(sampling.structure)
    shown = tokenizer.tools.shown(form) if form else ()
    return tokenizer.detokenizer(prompt, not sampling.skip_special_tokens, shown)


def text_of(detokenizer: Detokenizer, sampling: SamplingParams) -> StopStrings:
    """Return the empty text of an answer.

    Args:
        detokenizer: of the answer; nothing of it was fed.
        sampling: of the answer.
    """
    return StopStrings(detokenizer, sampling.stop, sampling.include_stop_str_in_output, sampling.min_tokens)
