"""A probability tree of a draft model that is itself sped up by an n-gram model."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from decoding.backoff_ngrams import BackoffNgrams
from decoding.draft_trees import GrowingTree, grow_top_tree
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.dyspec import grow_by_value
from decoding.lengths.base import LengthPolicy
from decoding.model import Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model

# What is learnt from a reading: its most probable tokens.
LEARNT = ReadSpec(draw=None, top=4)
# Nodes looked at for a guess, as a multiple of the draft's: what is read on the way to it does not all stay in it.
LOOKED_AT = 2


class StagedParams(MethodParams):
    """Parameters of `staged`."""

    branch: Annotated[int, Field(ge=1, le=64, description="children considered per node (fixed candidates)")] = 8
    threshold: Annotated[
        float,
        Field(ge=0.0, le=1.0, description="least probability of being reached that a draw is made at (drawn ones)"),
    ] = 0.01
    guesses: Annotated[
        int, Field(ge=0, le=64, description="tokens guessed ahead of the draft model in each of its forwards")
    ] = 8


class StagedDrafter(Drafter):
    """Speculation in two stages (paper #56, Accelerating LLM Inference with Staged Speculative Decoding).

    The tree has the most probable paths under the draft model, or draws where the verifier is most expected. While
    it grows, a back-off tri-gram model guesses which nodes will be read next, and the draft model reads these in the
    same forward. A guess only saves a forward: the tree is the one the draft model would have grown alone. The
    tri-grams are learnt from the draft model's own readings, for each tenant.
    """

    Params = StagedParams
    papers = (56,)
    runs_on = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    depth = 8
    nodes = 32
    params: StagedParams

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree."""
        params = self.params
        ngrams = model.stores.open("staged", seq.learner, BackoffNgrams)
        growing = GuessingTree(model, seq, length, ngrams, params.guesses, room)
        if self.candidates is Candidates.DRAWN:
            return await grow_by_value(growing, room, params.threshold)
        return (await grow_top_tree(growing, room, params.branch)).tree


class GuessingTree(GrowingTree):
    """A draft whose readings are asked for before they are wanted, where tri-grams foresee them.

    Args:
        model: reads.
        seq: what the draft continues.
        length: says below which candidates to draft on.
        ngrams: foresee and learn.
        guesses: tokens guessed per forward.
        room: of the draft.
    """

    def __init__(
        self, model: Model, seq: Sequence, length: LengthPolicy, ngrams: BackoffNgrams, guesses: int, room: DraftBudget
    ) -> None:
        super().__init__(model, seq, length)
        self._ngrams = ngrams
        self._guesses = guesses
        self._room = room
        self._rows: dict[tuple[int, ...], Readout] = {}
        self._paths: list[tuple[int, ...]] = []  # fed nodes
        self._places: dict[tuple[int, ...], int] = {(): ROOT}
        self._chances: dict[tuple[int, ...], list[tuple[int, float]]] = {}  # what was read, the most probable tokens

    async def _ask_root(self, want: ReadSpec) -> Readout:
        """The reading at the sequence's end, and after the tokens guessed to follow."""
        ahead = self._guess([], chain=True)
        tokens = ahead[-1] if ahead else ()
        rows = await self._model.extend(self.seq, tokens, want | LEARNT, every=True)
        self._learn([tokens[:end] for end in range(len(tokens) + 1)], rows)
        return rows[0]

    async def _ask(self, nodes: list[int], want: ReadSpec) -> list[Readout]:
        """The readings after some nodes; no forward where all of it was guessed."""
        paths = [self._path(node) for node in nodes]
        unread = [path for path in paths if path not in self._rows]
        # Room for guesses is only where all that may have to be read, and all that may be guessed, can be fed.
        can_guess = self.has_room((self._room.nodes + self._guesses) * self._room.depth)
        self._num_read += len(nodes)
        if unread:
            start = len(self._paths)
            for path in unread + (self._guess(unread) if can_guess else []):
                for end in range(1, len(path) + 1):
                    if path[:end] not in self._places:
                        self._places[path[:end]] = len(self._paths)
                        self._paths.append(path[:end])
            parents = tuple(self._places[path[:-1]] for path in self._paths)
            fed = DraftTree(tuple(path[-1] for path in self._paths), parents, self._model.name)
            rows = await self._model.expand(self.seq, fed, start, want | LEARNT)
            self._learn(self._paths[start:], rows)
        return [self._rows[path] for path in paths]

    def _path(self, node: int) -> tuple[int, ...]:
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def _learn(self, paths: list[tuple[int, ...]], rows: list[Readout]) -> None:
        """Take down what was read first at each path, and learn from it."""
        for path, row in zip(paths, rows, strict=True):
            if path not in self._rows:
                self._rows[path] = row
                chances = [(token, math.exp(logprob)) for token, logprob in row.top[: LEARNT.top]]
                self._chances[path] = chances
                self._ngrams.learn(self._before(path), chances)

    def _before(self, path: tuple[int, ...]) -> tuple[int, ...]:
        return (*self.seq.tokens[-2:], *path)[-2:]

    def _guess(self, asked: list[tuple[int, ...]], chain: bool = False) -> list[tuple[int, ...]]:
        """Paths likely to be read later, each after its beginnings: of the tree expected, what is not read or asked.

        That tree has the most probable paths, by the draft model where it was read and by the tri-grams below.
        """
        heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        passed = {(), *self._rows, *asked}
        guessed: list[tuple[int, ...]] = []
        for _ in range(1 + LOOKED_AT * self._room.nodes):
            if not heap or len(guessed) >= self._guesses:
                break
            value, path = heapq.heappop(heap)
            if path not in passed:
                guessed.append(path)
            if len(path) + 1 >= self._room.depth:
                continue
            likely = self._chances.get(path)
            if likely is None:
                known = self._ngrams.chances(self._before(path))
                likely = heapq.nlargest(1 if chain else LEARNT.top, known.items(), key=lambda item: item[1])
            for token, chance in likely:
                heapq.heappush(heap, (value * chance, (*path, token)))
        return guessed


PART = StagedDrafter
