"""How many samples each request gets under a common budget, by what another one is expected to bring.

Paper #45 (Learning How Hard to Think: Input-Adaptive Allocation of LM Computation).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

Marginals = Sequence[float]  # [most]: what the first, second, ... sample adds to the expected reward


def marginals(success: float, most: int) -> list[float]:
    """What each of `most` samples adds to the chance that one is right: `success * (1 - success) ** (b - 1)`."""
    return [success * (1.0 - success) ** number for number in range(most)]


def best_of(success: float, num_samples: int) -> float:
    """Chance that one of `num_samples` samples is right."""
    return 1.0 - (1.0 - success) ** num_samples


def right_among(num_right: int, num_drawn: int, num_samples: int) -> float:
    """Chance that `num_samples` of the drawn samples, chosen without replacement, hold a right one.

    Raises:
        ValueError: fewer were drawn.
    """
    if num_samples > num_drawn:
        raise ValueError(f"only {num_drawn} samples were drawn, not {num_samples}")
    return 1.0 - comb(num_drawn - num_right, num_samples) / comb(num_drawn, num_samples)


def reward_marginals(rewards: Sequence[float], most: int, none: float = 0.0) -> list[float]:
    """What each of `most` samples adds to the expected best reward, all ways of picking from the drawn ones averaged.

    Args:
        rewards: of samples drawn for one prompt; at least `most`.
        most: samples.
        none: the reward of no sample at all.
    """
    drawn, ranked = len(rewards), sorted(rewards)
    if most > drawn:
        raise ValueError(f"only {drawn} samples were drawn, not {most}")
    # The best of b is the i-th smallest if it is among them, and the others are from the i before it.
    best = [sum(ranked[i] * comb(i, b - 1) for i in range(b - 1, drawn)) / comb(drawn, b) for b in range(1, most + 1)]
    return [after - before for before, after in zip([none, *best], best, strict=False)]


def falling(values: Marginals) -> list[float]:
    """Marginals as they can be at most: none above the one before it, none below zero."""
    lowest, result = float("inf"), []
    for value in values:
        lowest = min(lowest, max(value, 0.0))
        result.append(lowest)
    return result


def allocate(items: Sequence[Marginals], budget: int, least: int = 0, weights: Sequence[int] = ()) -> list[int]:
    """Samples for each item so that the expected reward of all is largest under a total budget.

    Greedy with a heap, which is optimal because marginals fall. What adds nothing is not spent; of equal marginals
    the first item's is taken.

    Args:
        items: marginals of each item; see `falling`.
        budget: samples of all items together.
        least: samples every item gets whatever they bring, 0 where no answer is an answer.
        weights: how many requests each item stands for, each of which costs a sample; absent: one each.

    Returns:
        Samples of each item, at most as many as it has marginals.
    """
    weights = weights or [1] * len(items)
    taken = [min(least, len(item)) for item in items]
    left = budget - sum(count * weight for count, weight in zip(taken, weights, strict=True))
    heap = [
        (-item[count], place) for place, (item, count) in enumerate(zip(items, taken, strict=True)) if count < len(item)
    ]
    heapq.heapify(heap)
    while heap:
        gain, place = heapq.heappop(heap)
        if gain >= 0.0:
            break
        if weights[place] > left:
            continue
        taken[place] += 1
        left -= weights[place]
        if taken[place] < len(items[place]):
            heapq.heappush(heap, (-items[place][taken[place]], place))
    return taken


@dataclass(frozen=True, slots=True)
class Bins:
    """The policy for requests that come one by one: the allocation of a held-out set, by bin of predicted difficulty.

    Attributes:
        edges: [bins - 1] rising: predictions from an edge on belong to the bin after it.
        samples: [bins] what a request of each bin gets.
    """

    edges: tuple[float, ...]
    samples: tuple[int, ...]

    @classmethod
    def solve(cls, predicted: Sequence[float], average: float, most: int, num_bins: int = 10, least: int = 0) -> Bins:
        """Solve the allocation once over bins of equal numbers of requests.

        Args:
            predicted: chances of success of held-out requests.
            average: samples a request, over all.
            most: samples of one request.
            num_bins: bins; fewer where predictions are too alike.
            least: samples of every request.
        """
        ranked = sorted(predicted)
        cuts = [ranked[len(ranked) * place // num_bins] for place in range(1, num_bins)]
        edges = sorted({cut for cut in cuts if cut > ranked[0]})
        groups: list[list[float]] = [[] for _ in range(len(edges) + 1)]
        for value in ranked:
            groups[bisect_right(edges, value)].append(value)
        means = [
            [sum(column) / len(group) for column in zip(*(marginals(each, most) for each in group), strict=True)]
            for group in groups
        ]
        sizes = [len(group) for group in groups]
        samples = allocate(means, int(average * len(ranked)), least, sizes)
        return cls(tuple(edges), tuple(samples))

    def of(self, predicted: float) -> int:
        """Samples for a request with this predicted chance of success."""
        return self.samples[bisect_right(self.edges, predicted)]


class SlidingWindow:
    """An allocation over the last requests: each new one gets its part of a batch that they would have been.

    Over any `size` consecutive requests no more than `average * size` samples are given out.

    Args:
        average: samples a request.
        size: requests.
        least: samples of every request; at most `average`.
    """

    def __init__(self, average: float, size: int, least: int = 0) -> None:
        if least > average:
            raise ValueError(f"least ({least}) must be at most average ({average:g})")
        self._average = average
        self._least = least
        self._seen: deque[Marginals] = deque(maxlen=size)
        self._given: deque[int] = deque(maxlen=size)

    def give(self, item: Marginals) -> int:
        """Samples for the next request."""
        size = self._given.maxlen or 1
        self._seen.append(item)
        wanted = allocate(list(self._seen), int(self._average * len(self._seen)), self._least)[-1]
        spent = sum(self._given) - (self._given[0] if len(self._given) == size else 0)
        # What the requests still to come in this window are owed whatever they are.
        owed = self._least * (size - len(self._given) - 1) if len(self._given) < size else 0
        count = max(min(wanted, int(self._average * size) - spent - owed), self._least)
        self._given.append(count)
        return count
