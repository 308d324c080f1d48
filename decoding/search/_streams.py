"""Sequences in which a second model reads the hypotheses of a search: forks that share their blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from decoding.model import Model, Readout, ReadSpec
from decoding.rollouts import together
from decoding.search.base import Hypothesis
from decoding.sequence import Sequence
from turnout.errors import out_of_range


@dataclass(frozen=True, slots=True)
class Reading:
    """What is to be read of a hypothesis.

    Attributes:
        hypothesis: which one.
        tokens: of it, in the second model's vocabulary; its later continuations are expected to begin with them.
        more: tokens after these that may be others in its continuations.
        want: what to read after `tokens`, and after each of `more`; None: nothing.
    """

    hypothesis: Hypothesis
    tokens: tuple[int, ...]
    more: tuple[int, ...] = ()
    want: ReadSpec | None = None


class Streams:
    """Sequences of a second model, one for each hypothesis of the last batch.

    Args:
        model: the second one.
        root: its prompt; released with the others.
        prompt: sequence of the request, which is charged.
        field: named where the context of the model is too short.
        width: named where its memory is too small.
    """

    def __init__(self, model: Model, root: Sequence, prompt: Sequence, field: str, width: str) -> None:
        self._model, self._root, self._prompt = model, root, prompt
        self._field, self._width = field, width
        self._live: dict[Hypothesis, Sequence] = {}

    async def read(self, readings: list[Reading]) -> list[list[Readout]]:
        """Read a batch together; hypotheses of the batch before are forgotten.

        Returns:
            Rows of each: one after its `tokens`, and one after each of `more`.

        Raises:
            TurnoutError: OUT_OF_RANGE: they do not fit the context or the memory of the model.
        """
        self._check(readings)
        self._place(readings)
        asked = [each for each in readings if each.want is not None]
        rows = await together(
            [
                self._model.extend(self._stream(each.hypothesis), each.more, each.want, every=True)
                for each in asked
                if each.want is not None
            ]
        )
        found = dict(zip((each.hypothesis for each in asked), rows, strict=True))
        return [found.get(each.hypothesis, []) for each in readings]

    def close(self) -> None:
        """Release all, and charge the request."""
        for each in (*self._live.values(), self._root):
            self._release(each)
        self._live.clear()

    def _stream(self, each: Hypothesis) -> Sequence:
        return self._live.get(each, self._root)

    def _place(self, readings: list[Reading]) -> None:
        """Give each hypothesis a sequence: that of its parent, or a fork of it where others go on from it."""
        before, self._live = self._live, {}
        following: dict[Hypothesis | None, list[Reading]] = {}
        for each in readings:
            if each.hypothesis.parent is not None:
                parent = before.get(each.hypothesis.parent)
                fits = parent is not None and _begins(each.tokens, parent)
                following.setdefault(each.hypothesis.parent if fits else None, []).append(each)
        parents: list[Sequence] = []
        forked: list[Reading] = []
        for source, children in following.items():
            stream = self._root if source is None else before[source]
            if source is not None:
                self._append(stream, _common([each.tokens for each in children]))
                self._live[children.pop().hypothesis] = before.pop(source)
            parents += [stream] * len(children)
            forked += children
        twins = self._model.fork_many(parents) if parents else []
        self._live |= {each.hypothesis: twin for each, twin in zip(forked, twins, strict=True)}
        for each in readings:
            self._append(self._stream(each.hypothesis), each.tokens)
        for stream in before.values():
            self._release(stream)

    def _append(self, stream: Sequence, tokens: Iterable[int]) -> None:
        missing = list(tokens)[len(stream.generated) :]
        if missing:
            stream.append_plain(missing, self._model.name, self._model.num_parameters)

    def _check(self, readings: list[Reading]) -> None:
        """Refuse hypotheses that do not fit the context of the model, or its memory together."""
        begun = len(self._root)
        texts = [(*each.tokens, *each.more) for each in readings]
        longest = begun + max(map(len, texts), default=0)
        if longest > self._model.max_length:
            least = f"{longest} tokens of {self._model.name}, whose context holds {self._model.max_length}"
            raise out_of_range(self._field, f"reads {least}; lower max_tokens, or shorten its prompt")
        busy = self._model.busy()
        size, most = busy.block_size, busy.capacity // busy.block_size
        held = -(-begun // size) + sum(len(text) // size + 2 for text in texts)
        if most and len(texts) > 1 and held > most and held_by(texts, begun, size) > most:
            message = f"{len(texts)} hypotheses of up to {longest} tokens do not fit the memory of {self._model.name}"
            fitting = bisect_right(range(1, len(texts)), most, key=lambda count: held_by(texts[:count], begun, size))
            raise out_of_range(self._width, f"{message}, {max(fitting, 1)} do; lower it or max_tokens")

    def _release(self, stream: Sequence) -> None:
        """Give a sequence back; its work is the request's, but it wrote nothing."""
        for meter in stream.meter.models.values():
            meter.generated_tokens = 0
        self._prompt.meter.merge(stream.meter)
        self._model.release(stream)


def held_by(texts: list[tuple[int, ...]], begun: int, size: int) -> int:
    """Return the blocks that caches of texts hold with that of the prompt before them, sharing what is alike.

    Args:
        texts: token ids of each.
        begun: tokens of the prompt.
        size: tokens of a block.
    """
    first = size - begun % size
    full = {text[:end] for text in texts for end in range(first, len(text) + 1, size)}
    return -(-begun // size) + len(full) + sum((begun + len(text)) % size != 0 for text in texts)


def _begins(tokens: tuple[int, ...], stream: Sequence) -> bool:
    """Return whether what a stream holds after its prompt is the beginning of some tokens."""
    return tuple(stream.answer) == tokens[: len(stream.generated)]


def _common(texts: list[tuple[int, ...]]) -> list[int]:
    """Return the tokens that all begin with."""
    return [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False))]
