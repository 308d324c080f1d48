"""A tri-gram model of the target, learnt while it decodes, and a tree search that drafts from it."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, FiniteFloat

from decoding.drafters._readings import readings, root_end
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult

GUESSES = 8
READ = ReadSpec(draw=None, top=GUESSES)
CHUNK = 128  # places whose logits are computed at once
MOST_ROWS = 1 << 17
# Of a context with its guesses, as Python holds them.
ROW_BYTES = 750

Context = tuple[int, ...]
# Next tokens with their probabilities, the most probable first.
Guesses = tuple[tuple[int, float], ...]


class AdedParams(MethodParams):
    """Parameters of `aded`."""

    simulations: Annotated[int, Field(ge=1, le=1024, description="paths the search walks per draft")] = 128
    exploration: Annotated[
        FiniteFloat, Field(ge=0.0, le=100.0, description="weight of a token's prior against what its paths were worth")
    ] = 1.25
    exploration_base: Annotated[
        FiniteFloat, Field(ge=1.0, le=1e9, description="visits after which that weight begins to grow")
    ] = 19652.0
    rate: Annotated[
        FiniteFloat,
        Field(gt=0.0, le=1.0, description="share of a new reading in a known context's probabilities; 1: replace them"),
    ] = 1.0


class TrigramStore:
    """Store of the tokens that the target found probable after two tokens, and after the last one of them alone.

    Args:
        most: contexts kept; those not read for longest are forgotten first.
    """

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most = most
        self._rows: OrderedDict[Context, Guesses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """About the bytes it holds."""
        return ROW_BYTES * len(self._rows)

    def learn(self, context: Context, guesses: Guesses, rate: float) -> None:
        """The target was read after a context.

        Args:
            context: the last two tokens (one at the start of a sequence).
            guesses: its most probable tokens.
            rate: share of this reading where the context is known.
        """
        for key in {context, context[-1:]}:
            known = self._rows.get(key)
            self._rows[key] = guesses if known is None or rate == 1.0 else _mixed(known, guesses, rate)
            self._rows.move_to_end(key)
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)

    def get(self, context: Context) -> Guesses:
        """Return the tokens known after exactly this context; may be empty."""
        return self._rows.get(context, ())


def _mixed(old: Guesses, new: Guesses, rate: float) -> Guesses:
    mass = {token: (1.0 - rate) * probability for token, probability in old}
    for token, probability in new:
        mass[token] = mass.get(token, 0.0) + rate * probability
    return tuple(sorted(mass.items(), key=lambda each: (-each[1], each[0]))[:GUESSES])


class TrigramCounts:
    """Relative frequencies of a text's tri-grams and bi-grams."""

    def __init__(self, tokens: list[int]) -> None:
        self._counts: dict[Context, dict[int, int]] = {}
        for width in (1, 2):
            contexts = zip(*(tokens[skip:] for skip in range(width)), strict=False)
            for context, token in zip(contexts, tokens[width:], strict=False):
                following = self._counts.get(context)
                if following is None:
                    self._counts[context] = {token: 1}
                else:
                    following[token] = following.get(token, 0) + 1

    def get(self, context: Context) -> Guesses:
        """Return the tokens that followed a context; may be empty."""
        counts = self._counts.get(context)
        if counts is None:
            return ()
        total = sum(counts.values())
        best = heapq.nlargest(GUESSES, counts.items(), key=lambda each: each[1])
        return tuple((token, count / total) for token, count in best)


@dataclass(slots=True)
class State:
    """Where the search stands: a context, and for each next token how often and how well it went on from there."""

    context: Context
    tokens: list[int]
    priors: list[float]
    visits: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # summed over the visits
    below: list[State | None] = field(default_factory=list)
    total: int = 0

    @classmethod
    def of(cls, context: Context, guesses: Guesses) -> State:
        """Not visited yet."""
        size = len(guesses)
        tokens, priors = [token for token, _ in guesses], [probability for _, probability in guesses]
        return cls(context, tokens, priors, [0] * size, [0.0] * size, [None] * size)

    def select(self, exploration: float, base: float) -> int:
        """Index of the token to try (PUCT); among equals the first."""
        weight = math.sqrt(self.total) * (exploration + math.log((self.total + base + 1.0) / base))
        best, highest = 0, -1.0
        for index, visits in enumerate(self.visits):
            score = self.priors[index] * weight / (1 + visits)
            if visits:
                score += self.values[index] / visits
            if score > highest:
                best, highest = index, score
            if not visits:
                # Priors fall: of those not visited yet, the first is the best.
                break
        return best


def search(look_up: Callable[[Context], Guesses], context: Context, depth: int, params: AdedParams) -> State:
    """Monte-Carlo tree search over likely continuations.

    A simulation ends at a new state, the deepest level, or where nothing is known; it is worth the probability of
    its path from the root, and a token the mean of the simulations through it.

    Args:
        look_up: next tokens after a context.
        context: the last tokens.
        depth: deepest level.
        params: how many simulations, and how they choose.
    """
    root = State.of(context, look_up(context))
    if not root.tokens:
        return root
    for _ in range(params.simulations):
        state, worth = root, 1.0
        trail: list[tuple[State, int]] = []
        while state.tokens:
            index = state.select(params.exploration, params.exploration_base)
            trail.append((state, index))
            worth *= state.priors[index]
            below = state.below[index]
            if below is None:
                following = (*state.context, state.tokens[index])[-2:]
                guesses = look_up(following) if len(trail) < depth else ()
                state.below[index] = State.of(following, guesses)
                break
            state = below
        for state, index in trail:
            state.total += 1
            state.visits[index] += 1
            state.values[index] += worth
    return root


def most_visited(root: State, most: int, source: str) -> DraftTree:
    """The search's most visited nodes as a draft, the more valuable among equals, then the first found.

    A node's first visit ended at it, so its parent has been visited more often than it and stands before it.
    """
    found: list[tuple[int, float, int, int, int]] = []  # visits and value negated, order, parent's order, token
    states: list[tuple[State, int]] = [(root, ROOT)]
    for state, parent in states:
        for index, visits in enumerate(state.visits):
            if visits:
                order = len(found)
                found.append((-visits, -state.values[index] / visits, order, parent, state.tokens[index]))
                below = state.below[index]
                if below is not None:
                    states.append((below, order))
    kept = sorted(found)[:most]
    place = {ROOT: ROOT} | {order: index for index, (_, _, order, _, _) in enumerate(kept)}
    return DraftTree(tuple(each[4] for each in kept), tuple(place[each[3]] for each in kept), source)


class AdedDrafter(Drafter):
    """ADED (paper #6, Adaptive Draft-Verification for Efficient Large Language Model Decoding).

    The tenant's store learns the 8 most probable tokens of every row the target is read at: the root, all draft nodes,
    rejected ones included, and before the second draft the prompt, from the states that the first forward left at its
    places; only the head runs for them, and places whose keys and values were in a cache have none. An answer that does
    not draft in its first round does not ask for these states: drafts that are held back would pay for a last layer
    over the whole prompt. The tri-grams' counts in the prompt are known to this request alone. The search looks after
    two tokens first, the store before the counts, then after one. That a path is worth its probability, and that
    readings are mixed at a rate, are this implementation's choices.
    """

    Params = AdedParams
    papers = (6,)
    depth = 10
    nodes = 64
    want = READ
    changing = ("want", "_first_round")
    params: AdedParams

    def __init__(self, params: AdedParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._counts: TrigramCounts | None = None
        self._num_layers = 0
        self._first_round = True
        self._unread: tuple[int, torch.Tensor] | None = None  # a place, and the states from there on

    def check(self, models: ModelPool) -> None:
        """Note which states are those behind the target's last layer."""
        self._num_layers = models.large.num_layers

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The search's most visited nodes."""
        if self._first_round:
            self.want = READ | ReadSpec(draw=None, before=frozenset({self._num_layers}))
        if self._counts is None:
            self._counts = TrigramCounts(seq.tokens[: seq.num_prompt_tokens])
        store, counts = _store(model, seq), self._counts
        await self._read_prompt(model, seq, store)

        def look_up(context: Context) -> Guesses:
            last = context[-1:]
            return store.get(context) or counts.get(context) or store.get(last) or counts.get(last)

        root = search(look_up, tuple(seq.tokens[-2:]), room.depth, self.params)
        return most_visited(root, room.nodes, model.name)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Learn every row of the round; of the first, keep the states at the prompt's places for the next draft."""
        store = _store(model, seq)
        for context, row in readings(seq, draft, verdict, width=2):
            self._learn(store, context, row)
        before = verdict.rows[0].before.get(self._num_layers)
        if self._first_round and before is not None and len(before):
            self._unread = root_end(seq, verdict) - 1 - len(before), before.to("cpu", copy=True)
        self._first_round = False
        self.want = READ  # later rounds have no prompt whose states could be asked for

    async def _read_prompt(self, model: Model, seq: Sequence, store: TrigramStore) -> None:
        """Learn what the target says at the places whose states were kept."""
        if self._unread is None:
            return
        (start, states), self._unread = self._unread, None
        for part in torch.split(states, CHUNK):
            for end, row in enumerate(await model.read(seq, part, [()] * len(part), READ), start + 1):
                self._learn(store, tuple(seq.tokens[max(end - 2, 0) : end]), row)
            start += len(part)

    def _learn(self, store: TrigramStore, context: Context, row: Readout) -> None:
        guesses = tuple((token, math.exp(logprob)) for token, logprob in row.top[:GUESSES])
        store.learn(context, guesses, self.params.rate)


def _store(model: Model, seq: Sequence) -> TrigramStore:
    return model.stores.open("aded", seq.learner, TrigramStore)


PART = AdedDrafter
