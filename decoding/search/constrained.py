"""Beam search whose answers hold given phrases, anywhere and in any order (dynamic beam allocation)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from decoding.model import ModelPool, ReadSpec
from decoding.search._beams import Beam, BeamParams
from decoding.search.base import Hypothesis, Search, SearchTask, Selection, ordered
from decoding.text import codec_of, continuation_ids
from turnout.errors import invalid, out_of_range

MOST_PHRASES, MOST_TOKENS = 64, 256
Phrase = (
    Annotated[str, StringConstraints(min_length=1, max_length=1000)]
    | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=MOST_TOKENS)]
)


class ConstrainedParams(BeamParams):
    """Parameters."""

    phrases: Annotated[
        tuple[Phrase, ...],
        Field(
            max_length=MOST_PHRASES, description="what an answer must hold: texts, as they stand in it, or token ids"
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class Phrases:
    """Phrases of a request, with what of them a hypothesis holds.

    Attributes:
        phrases: token ids of each, at least one.
        met: places of the phrases that it holds.
        open: place of the phrase that its last tokens begin; -1: none.
        begun: tokens of that phrase.
    """

    phrases: tuple[tuple[int, ...], ...]
    met: frozenset[int] = frozenset()
    open: int = -1
    begun: int = 0

    @property
    def count(self) -> int:
        """Tokens of phrases that it holds: the bank of the hypothesis."""
        return sum(len(self.phrases[place]) for place in self.met) + self.begun

    @property
    def is_met(self) -> bool:
        """True if it holds all of them."""
        return len(self.met) == len(self.phrases)

    @property
    def wanted(self) -> tuple[int, ...]:
        """Tokens that bring it on: the next of the phrase that is begun, or the first of every other."""
        if self.open >= 0:
            return (self.phrases[self.open][self.begun],)
        firsts = (phrase[0] for place, phrase in enumerate(self.phrases) if place not in self.met)
        return tuple(dict.fromkeys(firsts))

    def after(self, token: int) -> Phrases:
        """Return what it holds with one more token; a phrase that does not go on is given up."""
        place, begun = self.open, self.begun
        if place < 0 or self.phrases[place][begun] != token:
            unmet = (at for at, phrase in enumerate(self.phrases) if at not in self.met and phrase[0] == token)
            place, begun = next(unmet, -1), 0
        if place < 0:
            return Phrases(self.phrases, self.met)
        if begun + 1 == len(self.phrases[place]):
            return Phrases(self.phrases, self.met | {place})
        return Phrases(self.phrases, self.met, place, begun + 1)


class ConstrainedSearch(Search):
    """Beams in banks, by paper #10 (Fast Lexically Constrained Decoding with Dynamic Beam Allocation).

    A bank holds hypotheses with the same number of tokens of phrases; the width is divided among the banks, and what
    one does not fill goes to the next lower one. Besides the likeliest continuations of all, every hypothesis has its
    own likeliest one, and those that bring a phrase on. No answer ends before it holds all phrases. A phrase that is
    given up may begin anew with the token that broke it off, but not with those before it.
    """

    Params = ConstrainedParams
    params: ConstrainedParams
    papers = (10,)

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        field = f"{self.where}.phrases"
        phrases = tuple(self._ids(phrase, models, field) for phrase in self.params.phrases)
        for place, phrase in enumerate(phrases):
            if not phrase:
                raise invalid(f"{field}.{place}", "has no token")
            if max(phrase) >= task.vocab_size:
                raise out_of_range(f"{field}.{place}", f"token id {max(phrase)}; allowed: 0 to {task.vocab_size - 1}")
            if not task.end_ids.isdisjoint(phrase):
                raise invalid(f"{field}.{place}", "holds a token that ends the answer")
        self._size = sum(map(len, phrases))
        if self._size > task.max_tokens:
            raise invalid(field, f"{self._size} tokens together; max_tokens leaves {task.max_tokens}")
        self._beam = Beam(task, task.width, self.params)
        super().begin(task, models)
        return Phrases(phrases)

    def _ids(self, phrase: str | tuple[int, ...], models: ModelPool, field: str) -> tuple[int, ...]:
        return continuation_ids(codec_of(models, field), phrase) if isinstance(phrase, str) else phrase

    def reads(self, hypothesis: Hypothesis) -> ReadSpec:
        """See `Search.reads`."""
        return super().reads(hypothesis) | ReadSpec(draw=None, processed_of=hypothesis.state.wanted)

    def expand(self, read: list[Hypothesis], rows: Any) -> list[Hypothesis]:
        """See `Search.expand`: those that may be chosen, each once."""
        found = super().expand(read, rows)
        known: dict[Hypothesis, dict[int, Hypothesis]] = {each: {} for each in read}
        for each in found:
            assert each.parent is not None
            if self._may_follow(each):
                known[each.parent][each.token] = each
        kept = dict.fromkeys(sorted(found, key=lambda each: -each.logp)[: 2 * self.fanout])
        for each, row in zip(read, rows, strict=True):
            own = known[each]
            kept |= dict.fromkeys(list(own.values())[:1])  # its likeliest one
            for token, logprob in row.processed_of:
                if token not in own and logprob > -math.inf:
                    own[token] = each.child(token, logprob, row)
                if token in own:
                    kept[own[token]] = None
        return [each for each in kept if self._may_follow(each)]

    def _may_follow(self, each: Hypothesis) -> bool:
        """Whether a continuation does not end the answer too early."""
        assert each.parent is not None
        return each.token not in self.task.end_ids or each.parent.state.is_met

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        banks: list[list[Hypothesis]] = [[] for _ in range(self._size + 1)]
        for each in candidates:
            assert each.parent is not None
            each.score, each.state = each.logp, each.parent.state.after(each.token)
            if each.state.is_met or not each.ended:
                banks[each.state.count].append(each)
        sizes = allocate(self.task.width, [sum(not each.ended for each in bank) for bank in banks])
        ranked = [ordered(bank) for bank in banks]
        following = [
            each
            for size, bank in zip(sizes, ranked, strict=True)
            for each in [each for each in bank if not each.ended][:size]
        ]
        width = self.task.width
        share = width // len(banks) + width % len(banks) if following else width
        ended = [each for each in ranked[-1][: max(sizes[-1], share)] if each.ended]
        return Selection(*self._beam.take(ordered(following), ended))

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return self._beam.finished


def allocate(width: int, counts: list[int]) -> list[int]:
    """Divide a width among banks: equal shares, the rest to the last; what a bank lacks goes to the next lower one.

    Args:
        width: hypotheses.
        counts: candidates of each bank.
    """
    last = len(counts) - 1
    sizes = [width // len(counts)] * len(counts)
    sizes[last] += width % len(counts)
    for place in [*range(last, -1, -1), *range(last, -1, -1)]:  # twice: the lowest one gives to the highest
        surplus = max(sizes[place] - counts[place], 0)
        sizes[place] -= surplus
        sizes[place - 1] += surplus  # of the lowest: the last
    return [min(size, have) for size, have in zip(sizes, counts, strict=True)]


PART = ConstrainedSearch
