"""Prompts a model has seen, found by how much of a new prompt they hold; each namespace's are apart."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.reuse.matcher import Int64, UInt64, window_hashes
from turnout.types import BlockHash, Namespace

NGRAM = 8
SKETCH = 256
MAX_NAMESPACES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class SeenPrompt:
    """A prompt and where its KV may be found.

    Attributes:
        tokens: [n] those of its full blocks.
        hashes: of these blocks' content.
        namespaces: of these blocks.
    """

    tokens: Int64
    hashes: tuple[BlockHash, ...]
    namespaces: tuple[Namespace, ...]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return len(self.tokens) // len(self.hashes)


class PromptIndex:
    """Remembers the latest prompts. A token is found only through the namespace of the block it lies in.

    Likeness is the share of the new prompt's 8-grams that a prompt holds, estimated from the 256 of its own with the
    smallest hashes.

    Args:
        max_prompts: remembered for each namespace; the longest unused is forgotten first.
        max_tokens: remembered in all; beyond it, the namespace that has most of them forgets.
    """

    def __init__(self, max_prompts: int, max_tokens: int) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._shelves: OrderedDict[Namespace, _Shelf] = OrderedDict()

    def __len__(self) -> int:
        return len({prompt.hashes[-1] for shelf in self._shelves.values() for prompt in shelf.prompts.values()})

    def add(self, prompt: SeenPrompt) -> None:
        """Remember a prompt, under the namespace of each of its parts."""
        size = prompt.block_size
        for namespace in dict.fromkeys(prompt.namespaces):
            blocks = np.array([each == namespace for each in prompt.namespaces])
            shelf = self._shelves.setdefault(namespace, _Shelf())
            self._shelves.move_to_end(namespace)
            if not shelf.used(prompt):
                shelf.add(prompt, _sketch(prompt.tokens, np.repeat(blocks, size)))
            while len(shelf.prompts) > self._max_prompts:
                shelf.forget_oldest()
        while sum(shelf.tokens for shelf in self._shelves.values()) > self._max_tokens:
            largest = max(self._shelves, key=lambda namespace: self._shelves[namespace].tokens)
            self._shelves[largest].forget_oldest()
            if not self._shelves[largest].prompts:
                del self._shelves[largest]
        while len(self._shelves) > MAX_NAMESPACES:
            self._shelves.popitem(last=False)

    def similar(self, tokens: Int64, may_see: Callable[[Namespace], bool], least: float, most: int) -> list[SeenPrompt]:
        """Prompts that hold at least such a share of these tokens' n-grams in blocks that may be seen, best first.

        Args:
            tokens: [n] token ids.
            may_see: whose blocks may be used.
            least: share, 0 to 1.
            most: how many.
        """
        grams = np.unique(window_hashes(tokens, NGRAM))
        wanted = grams.tolist()
        found: dict[int, float] = {}
        prompts: dict[int, SeenPrompt] = {}
        for namespace, shelf in self._shelves.items():
            if may_see(namespace):
                for prompt, share in shelf.shares(wanted):
                    prompts[id(prompt)] = prompt
                    found[id(prompt)] = found.get(id(prompt), 0.0) + share
        best = sorted((key for key, share in found.items() if share >= least), key=lambda key: -found[key])[:most]
        for shelf in self._shelves.values():
            for key in reversed(best):
                shelf.used(prompts[key])
        return [prompts[key] for key in best]


def _sketch(tokens: Int64, mine: np.ndarray) -> tuple[UInt64, int]:
    """The smallest hashes of the n-grams that lie in `mine` altogether, and how many different ones there are."""
    hashes = window_hashes(tokens, NGRAM)
    if not len(hashes):
        return hashes, 0
    inside = np.convolve(mine, np.ones(NGRAM, dtype=np.int64), "valid") == NGRAM
    different = np.unique(hashes[inside])
    return different[:SKETCH], len(different)


class _Shelf:
    """One namespace's prompts, the longest unused first, and who has which n-gram."""

    def __init__(self) -> None:
        self.prompts: OrderedDict[BlockHash, SeenPrompt] = OrderedDict()
        self.tokens = 0
        self._sketches: dict[BlockHash, tuple[list[int], float]] = {}
        self._holders: dict[int, set[BlockHash]] = {}

    def add(self, prompt: SeenPrompt, sketch: tuple[UInt64, int]) -> None:
        key = prompt.hashes[-1]
        hashes, total = sketch[0].tolist(), sketch[1]
        self.prompts[key] = prompt
        self.tokens += len(prompt.tokens)
        self._sketches[key] = (hashes, total / max(len(hashes), 1))
        for each in hashes:
            self._holders.setdefault(each, set()).add(key)

    def used(self, prompt: SeenPrompt) -> bool:
        known = prompt.hashes[-1] in self.prompts
        if known:
            self.prompts.move_to_end(prompt.hashes[-1])
        return known

    def forget_oldest(self) -> None:
        key, prompt = self.prompts.popitem(last=False)
        self.tokens -= len(prompt.tokens)
        for each in self._sketches.pop(key)[0]:
            holders = self._holders[each]
            holders.discard(key)
            if not holders:
                del self._holders[each]

    def shares(self, grams: list[int]) -> list[tuple[SeenPrompt, float]]:
        """Return each prompt that holds some of these n-grams, and an estimate of the share of them it holds."""
        hits: Counter[BlockHash] = Counter()
        for gram in grams:
            hits.update(self._holders.get(gram, ()))
        return [(self.prompts[key], count * self._sketches[key][1] / len(grams)) for key, count in hits.items()]
