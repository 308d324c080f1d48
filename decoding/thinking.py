"""Thinking in an answer: the markers that enclose it, and the part of the answer that each token belongs to."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from decoding.model import TokenText
    from decoding.sequence import Sequence

BLANK = " \t\r\n"
TAIL = 64  # tokens of a prompt in which its template may begin the thinking
LONGEST_HEADER = 256  # characters of a channel's header, after which it is taken for text


class Part(StrEnum):
    """Part of an answer: what was thought, what is said, or a marker between them."""

    REASONING = "reasoning"
    TEXT = "text"
    MARKER = "marker"


class Phase(StrEnum):
    """Place in an answer: before thinking could begin, in it, between parts, or in what is said."""

    BEFORE = "before"
    THINKING = "thinking"
    BETWEEN = "between"
    ANSWER = "answer"


Piece = tuple[Part, str]
# Where the prompt leaves the answer: thinking may begin, has begun, or is over.
Start = Literal["open", "inside", "closed"]


@dataclass(frozen=True, slots=True)
class Marker:
    """Text that begins or ends thinking.

    Attributes:
        text: without blank lines around it, which belong to it wherever they stand.
        ids: the tokens it is written with.
        token: the token that it is; None: it is found in the text, however that is cut into tokens.
    """

    text: str
    ids: tuple[int, ...]
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Channels:
    """Special tokens of GPT-OSS's harmony format, in which each part of an answer has a header.

    Attributes:
        start: `<|start|>`, before the author.
        channel: `<|channel|>`, before the channel's name.
        message: `<|message|>`, after the header.
        ends: `<|end|>`, `<|return|>` and `<|call|>`, after a part.
    """

    start: int
    channel: int
    message: int
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thinking of one answer, or of a pool's answers.

    Attributes:
        begin: what begins it.
        end: what ends it.
        channels: of the harmony format; None: the markers are all there is.
        start: where the prompt leaves the answer.
        budget: tokens of thinking after which `end` is forced; None: no limit.
        gap: tokens that the model writes between `end` and the answer.
        strips: whether blank lines after `end` belong to it.
        apart: whether the answer's text is without the thinking.
    """

    begin: Marker
    end: Marker
    channels: Channels | None = None
    start: Start = "open"
    budget: int | None = None
    gap: tuple[int, ...] = ()
    strips: bool = True
    apart: bool = True

    @property
    def direct(self) -> tuple[int, ...]:
        """Tokens before an answer without thinking: the header of its channel, or none."""
        return self.end.ids[-3:] if self.channels is not None else ()

    def splitter(self, spelled: Callable[[str], str] = str) -> Splitter:
        """Make a splitter at the answer's start; `spelled` writes a marker as the texts that it gets."""
        if self.channels is not None:
            return ChannelSplitter(self.channels, self.start)
        return TagSplitter(self, spelled)


def start_after(tail: str, begin: str, end: str) -> Start:
    """Return where a prompt leaves the answer, by the text it ends with and the texts of a pair of markers."""
    tail = tail.rstrip(BLANK)
    return "inside" if begin and tail.endswith(begin) else "closed" if end and tail.endswith(end) else "open"


class Splitter(Protocol):
    """Splitter of an answer's text into its parts, token by token; joined, the pieces are the text."""

    phase: Phase

    def feed(self, token_id: int, text: str, name: str = "") -> list[Piece]:
        """Take the next token; return the pieces that are sure now.

        Args:
            token_id: the token.
            text: that it adds.
            name: of a special token that adds no text; else "".
        """
        ...

    def flush(self) -> list[Piece]:
        """Return what was held back, at the end of the answer."""
        ...


class TagSplitter:
    """Splitter at a pair of markers. Thinking begins before any text of the answer, and ends once."""

    def __init__(self, thinking: Thinking, spelled: Callable[[str], str] = str) -> None:
        self._begin, self._end = thinking.begin.token, thinking.end.token
        self._begin_text, self._end_text = spelled(thinking.begin.text), spelled(thinking.end.text)
        self._spelled = spelled
        self._strips = thinking.strips
        self._held = ""
        self._trims = thinking.start == "inside"  # newlines that come next belong to the marker before them
        self.phase = Phase.THINKING if thinking.start == "inside" else Phase.BEFORE

    def feed(self, token_id: int, text: str, name: str = "") -> list[Piece]:
        """See `Splitter.feed`."""
        if self.phase is Phase.BEFORE and token_id == self._begin:
            return self._marked(text, self._begin_text)
        if self.phase is Phase.THINKING and token_id == self._end:
            return self._marked(text, self._end_text)
        if name and name not in self._marker_text:
            return []
        return self.text(self._spelled(name) if name else text)

    @property
    def _marker_text(self) -> str:
        """The marker that this phase looks for in the text: special tokens in it are not shown otherwise."""
        if self.phase is Phase.BEFORE and self._begin is None:
            return self._begin_text
        return self._end_text if self.phase is Phase.THINKING and self._end is None else ""

    def text(self, added: str) -> list[Piece]:
        """Take text that holds no marker that is a token."""
        pieces = []
        if self._trims and added:
            kept = added.lstrip("\n")
            self._trims = not kept
            pieces, added = [(Part.MARKER, added[: len(added) - len(kept)])], kept
        if self.phase is Phase.ANSWER:
            pieces.append((Part.TEXT, added))
        elif self.phase is Phase.BEFORE:
            pieces += self._before(self._held + added)
        else:
            pieces += self._inside(self._held + added)
        return [piece for piece in pieces if piece[1]]

    def _marked(self, shown: str, marker: str) -> list[Piece]:
        """Take the token that is the marker of this phase; `shown` ends with it unless special tokens are left out."""
        phase, before = self.phase, shown.removesuffix(marker)
        pieces = self.text(before)
        if self.phase is not phase:  # it completed a broken character, which begins the answer
            return [*pieces, *self.text(marker)]
        pieces.append((Part.MARKER, self._held + marker))
        self._enter(Phase.THINKING if phase is Phase.BEFORE else Phase.ANSWER)
        return pieces

    def _enter(self, phase: Phase) -> None:
        self._held, self.phase = "", phase
        self._trims = phase is Phase.THINKING or self._strips

    def _before(self, held: str) -> list[Piece]:
        bare = held.lstrip(BLANK)
        if self._begin is None and bare.startswith(self._begin_text):
            end = len(held) - len(bare) + len(self._begin_text)
            self._enter(Phase.THINKING)
            return [(Part.MARKER, held[:end]), *self.text(held[end:])]
        if not bare or (self._begin is None and self._begin_text.startswith(bare)):
            self._held = held
            return []
        self._held, self.phase, self._trims = "", Phase.ANSWER, False
        return [(Part.TEXT, held)]

    def _inside(self, held: str) -> list[Piece]:
        marker = "" if self._end is not None else self._end_text
        at = held.find(marker) if marker else -1
        if at >= 0:
            kept, end = held[:at].rstrip("\n"), at + len(marker)
            self._enter(Phase.ANSWER)
            return [(Part.REASONING, kept), (Part.MARKER, held[len(kept) : end]), *self.text(held[end:])]
        begun = next((size for size in range(len(marker) - 1, 0, -1) if held.endswith(marker[:size])), 0)
        kept = held[: len(held) - begun].rstrip("\n")
        self._held = held[len(kept) :]
        return [(Part.REASONING, kept)]

    def begun(self) -> list[int]:
        """Return lengths of the beginnings of the end marker that the thinking ends with, 0 among them."""
        return [size for size in range(len(self._end_text)) if self._held.endswith(self._end_text[:size])]

    def flush(self) -> list[Piece]:
        """See `Splitter.flush`."""
        held, self._held = self._held, ""
        return [(Part.REASONING if self.phase is Phase.THINKING else Part.TEXT, held)] if held else []


class ChannelSplitter:
    """Splitter of the harmony format: analysis is thinking, calls stay as they are written, all else is said.

    A call is a part with a recipient (`to=`): its text keeps the header and the special tokens, by their names.
    """

    def __init__(self, channels: Channels, start: Start) -> None:
        self._channels = channels
        self._header = ""
        self._calls = False
        self.phase = {"open": Phase.BEFORE, "inside": Phase.THINKING, "closed": Phase.ANSWER}[start]

    def feed(self, token_id: int, text: str, name: str = "") -> list[Piece]:
        """See `Splitter.feed`."""
        channels, shown = self._channels, text or name
        in_header = self.phase is Phase.BEFORE
        if token_id == channels.start or (token_id == channels.channel and not in_header):
            pieces = self.flush()
            self.phase, self._header, self._calls = Phase.BEFORE, shown, False
            return pieces
        if in_header:
            return self._headed(token_id, shown)
        if token_id in channels.ends:
            calls, self.phase, self._calls = self._calls, Phase.BETWEEN, False
            return [(Part.TEXT if calls else Part.MARKER, shown)]
        if name:
            return [(Part.TEXT if self._calls else Part.MARKER, shown)]
        return [(Part.REASONING if self.phase is Phase.THINKING else Part.TEXT, text)] if text else []

    def _headed(self, token_id: int, shown: str) -> list[Piece]:
        header = self._header + shown
        self._header = header
        if token_id == self._channels.message:
            return self._opened(header)
        if token_id in self._channels.ends:
            self._header, self.phase = "", Phase.BETWEEN
            return [(Part.MARKER, header)]
        if may_be_header(header):
            return []
        self._header, self.phase = "", Phase.ANSWER
        return [(Part.TEXT, header)]

    def _opened(self, header: str) -> list[Piece]:
        self._header = ""
        self._calls = "to=" in header
        channel = "".join(header.partition("<|channel|>")[2].partition("<|message|>")[0].split()[:1])
        if self._calls:
            self.phase = Phase.BETWEEN
            return [(Part.TEXT, header)]
        thinks = channel.startswith("analysis")
        self.phase = Phase.THINKING if thinks else Phase.BETWEEN if channel == "commentary" else Phase.ANSWER
        return [(Part.MARKER, header)]

    def flush(self) -> list[Piece]:
        """See `Splitter.flush`."""
        header, self._header = self._header, ""
        return [(Part.MARKER if "<|" in header else Part.TEXT, header)] if header else []


def may_be_header(text: str) -> bool:
    """Return whether a text can be the beginning of a harmony header: an author, a recipient, a channel."""
    if "<|channel|>" in text:
        return len(text) <= LONGEST_HEADER
    words = text.removeprefix("<|start|>").split()
    return all("assistant".startswith(word) or "to=".startswith(word[:3]) for word in words)


@runtime_checkable
class SpecialNames(Protocol):
    """Tokenizer that knows its special tokens."""

    def special_name(self, token_id: int) -> str:
        """Return the name of a special token, which adds no text to an answer; "" for every other."""
        ...


class ThinkingWalk:
    """Walk along an answer's tokens that knows where thinking begins and ends: the one notion of it for methods,
    constraints and counts.

    Args:
        thinking: of the answer.
        tokens: looks up bytes and names of tokens.

    Attributes:
        num_thought: tokens of thinking so far, without markers.
        num_reasoning: tokens so far that are no part of the answer, markers included.
    """

    def __init__(self, thinking: Thinking, tokens: TokenText) -> None:
        self._thinking = thinking
        self._tokens = tokens
        # Bytes as characters: what is matched need not end where a character does.
        self._splitter = thinking.splitter(lambda text: text.encode().decode("latin-1"))
        self._due = 0
        self._begun = self.thinks
        self.num_thought = 0
        self.num_reasoning = 0

    @property
    def phase(self) -> Phase:
        """Where the answer stands."""
        return self._splitter.phase

    @property
    def thinks(self) -> bool:
        """True inside thinking."""
        return self.phase is Phase.THINKING

    @property
    def ended(self) -> bool:
        """True where thinking has been, and is over."""
        return self._begun and self.phase is Phase.ANSWER

    def feed(self, token_id: int) -> bool:
        """Take the next token; return whether it is no part of the answer: thought, or a marker of thinking."""
        due, before = self.due(), self.phase
        name = self._tokens.special_name(token_id) if isinstance(self._tokens, SpecialNames) else ""
        text = "" if name else self._tokens.token_bytes(token_id).decode("latin-1")
        pieces = self._splitter.feed(token_id, text, name)
        if due is not None:
            self._due = (self._due + 1) % len(self._thinking.end.ids) if token_id == due else 0
        elif before is Phase.THINKING and self.thinks:
            self.num_thought += 1
        self._begun = self._begun or self.thinks
        said = any(part is Part.TEXT for part, _ in pieces)
        apart = self.thinks or before is Phase.THINKING
        if self._thinking.channels is not None:
            apart = apart or (before is Phase.BEFORE and not said)
        self.num_reasoning += apart
        return apart

    def due(self) -> int | None:
        """Return the token of the end marker that the budget forces now; None: it forces none."""
        budget = self._thinking.budget
        spent = budget is not None and self.thinks and self.num_thought >= budget
        return self._thinking.end.ids[self._due] if self._due or spent else None

    def begun(self) -> list[int]:
        """See `TagSplitter.begun`; empty where no text can be the end marker."""
        return self._splitter.begun() if isinstance(self._splitter, TagSplitter) else []

    def clone(self) -> ThinkingWalk:
        """Return an independent copy."""
        twin = copy(self)
        twin._splitter = copy(self._splitter)
        return twin


def answer_ids(seq: Sequence, tokens: TokenText) -> list[int]:
    """Return the generated tokens of a sequence that are its answer: without thinking, and the token that ends it."""
    ids = [token.id for token in seq.generated if token.id not in seq.end_ids]
    if seq.thinking is None:
        return ids
    walk = ThinkingWalk(seq.thinking, tokens)
    return [token for token in ids if not walk.feed(token)]
