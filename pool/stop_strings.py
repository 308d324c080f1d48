"""Stop strings: found in an answer's text as it comes, and cut off from it."""

from __future__ import annotations

from pool.detokenizer import Detokenizer


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
