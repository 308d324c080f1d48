"""Steps of an answer: where one ends, the draft of one, and rounds of speculation that keep to one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from decoding.decode_loop import reported
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import Decision, NoiseKind, Readout, ReadSpec, TokenText
from decoding.noise import Purpose, gumbel, noise_key, round_seed, uniform
from decoding.sequence import Sequence
from decoding.state import ConstantDict, Stateful
from decoding.tree import DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, emitted, probs_of
from turnout.types import Token, TokenKind
from turnout.utf8 import split_complete

if TYPE_CHECKING:
    from decoding.model import Model

# Stands for the bytes of tokens that hold something, and nothing of any separator.
STAND_IN = b"\0"


@lru_cache(maxsize=16)
def step_marks(tokens: TokenText, vocab_size: int, separators: tuple[str, ...]) -> Mapping[int, bytes]:
    """Bytes of every token that matters for finding step ends: it may be blank, or shares a byte with a separator.

    Args:
        tokens: looks up bytes of tokens; the result is kept per object.
        vocab_size: ids to look up.
        separators: what ends a step.
    """
    sought = frozenset("".join(separators).encode())
    found = ((token, tokens.token_bytes(token)) for token in range(vocab_size))
    return ConstantDict({token: data for token, data in found if not sought.isdisjoint(data) or _may_be_blank(data)})


def _may_be_blank(data: bytes) -> bool:
    try:
        return not data.decode().strip()
    except UnicodeDecodeError:
        return True  # part of a character


class StepEnd(Stateful):
    """Finds step ends in a token stream: a step ends with the token that completes a separator.

    Blank text before a step's first word belongs to the step and ends nothing, so that two newlines in a row end one
    step where a newline is the separator.

    Args:
        marks: see `step_marks`.
        separators: what ends a step.
    """

    changing = ("_begun", "_tail")

    def __init__(self, marks: Mapping[int, bytes], separators: tuple[str, ...]) -> None:
        self.marks = marks
        self.separators = tuple(separator.encode() for separator in separators)
        self._keep = max(map(len, self.separators)) - 1
        self.reset()

    def reset(self) -> None:
        """A step begins with the next token."""
        self._begun = False
        self._tail = b""

    def feed(self, token: int) -> bool:
        """Take the next token; True when a step ended with it, and the next begins."""
        self._tail += self.marks.get(token, STAND_IN)
        if not self._begun:
            text, partial = split_complete(self._tail)
            text = text.lstrip()
            self._tail = text.encode() + partial
            self._begun = bool(text)
            if not self._begun:
                return False
        if any(separator in self._tail for separator in self.separators):
            self.reset()
            return True
        self._tail = self._tail[max(len(self._tail) - self._keep, 0) :]
        return False


class StepRule(Stateful):
    """Ends a decoding stretch with the step. Implements `decoding.model.StopRule`."""

    name = "step"
    want = ReadSpec()

    def __init__(self, end: StepEnd) -> None:
        self.end = end

    def state(self) -> tuple[Any, ...]:
        """Return the progress of the step."""
        return self.end.state()

    def load_state(self, state: tuple[Any, ...]) -> None:
        """See `Stateful.load_state`."""
        self.end.load_state(state)

    def observe(self, token: int, row: Readout) -> Decision:
        """See `StopRule.observe`."""
        return Decision.STOP if self.end.feed(token) else Decision.GO_ON


class StepDrafter(Drafter):
    """Drafter of a whole step next to its model, as a chain; nothing is appended.

    Tokens are drawn from the model's processed distribution with noise that no later draft and no target uses, so
    that whether a step is kept says nothing about what the target would write in its place. The draft ends with the
    step, with the answer, or where there is no room.

    Args:
        end: finds step ends.
    """

    runs_on = "small"
    kinds = frozenset({Candidates.DRAWN})

    def __init__(self, end: StepEnd) -> None:
        super().__init__()
        self._end = end

    def state(self) -> tuple[Any, ...]:
        """Return the progress of the step."""
        return self._end.state()

    def load_state(self, state: tuple[Any, ...]) -> None:
        """See `Stateful.load_state`."""
        self._end.load_state(state)

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The step, at least one token."""
        greedy = seq.sampling.greedy
        want = ReadSpec(draw=NoiseKind.DRAFT if greedy else None, probs=not greedy)
        stop = seq.stop.clone() if seq.stop is not None else None
        seed = round_seed(seq.seed, len(seq))
        tokens: list[int] = []
        self._end.reset()
        while len(tokens) < room.depth:
            [row] = await model.extend(seq, tuple(tokens), want)
            token = row.token if greedy else _draw(row, noise_key(seed, len(seq) + len(tokens), Purpose.SWITCH))
            tokens.append(token)
            ends = token in seq.end_ids or (stop is not None and stop.feed(token))
            if self._end.feed(token) or ends:
                break
        return DraftTree.chain(tokens, model.name)


def _draw(row: Readout, key: int) -> int:
    probs = probs_of(row)
    return int((probs.log() + gumbel([key], probs.numel(), probs.device)[0]).argmax())


async def tokens_written(model: Model, seq: Sequence, step: tuple[int, ...]) -> list[Token]:
    """A drafted step as tokens of the answer, with what the request reports about tokens: one forward, if anything."""
    want = reported(seq)
    if not want.reads_logits:
        return [Token(token, model.name) for token in step]
    rows = await model.extend(seq, step[:-1], want | ReadSpec(draw=None, logits=True), every=True)
    return [emitted(token, row, model.name, TokenKind.DECODED) for token, row in zip(step, rows, strict=True)]


def without_end(step: tuple[int, ...], end_ids: Collection[int]) -> tuple[int, ...]:
    """A step without the token that ends the answer."""
    return step[:-1] if step and step[-1] in end_ids else step


class WithinStep(Verifier):
    """Judges as another verifier does, and cuts what it emits where the step ends.

    A prefix of what a lossless verifier emits follows the target's law, and so does what is emitted after it. It does
    not call itself lossless, because rounds without a draft must be judged too: they also end with the step.

    Args:
        inner: judges.
        end: finds step ends; its caller resets it when a step begins.

    Attributes:
        ended: whether the last verdict ended a step.
    """

    lossless = False
    accepts = ()

    def __init__(self, inner: Verifier, end: StepEnd) -> None:
        super().__init__()
        self.want = inner.want
        self.ended = False
        self._inner = inner
        self._end = end

    def state(self) -> tuple[Any, ...]:
        """Return the progress of the step, and whether it has ended."""
        return self.ended, self._end.state()

    def load_state(self, state: tuple[Any, ...]) -> None:
        """See `Stateful.load_state`."""
        self.ended, end = state
        self._end.load_state(end)

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`. The last token's KV is not kept, whether it was drafted or not."""
        verdict = self._inner.judge(seq, draft, rows, target)
        self.ended = False
        for count, token in enumerate(verdict.tokens, start=1):
            if self._end.feed(token.id):
                self.ended = True
                return VerifyResult(verdict.path[: count - 1], verdict.tokens[:count])
        return verdict


def keep_coin(seq: Sequence) -> float:
    """In [0, 1): the keyed coin that decides about the step drafted at the sequence's end.

    No verifier uses its purpose, so that it is independent of the target's tokens at the same place.
    """
    return uniform(noise_key(seq.seed, len(seq), Purpose.SWITCH))
