"""Tests of paired differences, corrections for many of them, and whether something is no worse than something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest, false_discovery_control, permutation_test, ttest_1samp

from experiments.stats.intervals import AT_A_TIME, ROUNDING, Floats

PERMUTATIONS = 4999
# Where so few of the first drawing are as far out, more are drawn: p must become small enough to stand a correction for
# hundreds of comparisons.
RARE, MORE_PERMUTATIONS = 25, 49_999
ALPHA = 0.05

Correction = Literal["holm", "benjamini-hochberg"]
Bits = npt.NDArray[np.uint8]


def paired_permutation(differences: Floats, seed: int = 0, rounds: int = PERMUTATIONS) -> float:
    """Two-sided p of no difference: what sign each prompt's difference has is taken to be chance.

    Exact where all differences are of one size, as with right and wrong answers (it is then McNemar's exact test) and
    where there are few; otherwise drawn, the observed one counted in, so that p is never too small. Where p is small,
    many more are drawn; as it is the second p that then counts, looking twice makes neither level larger.

    Args:
        differences: [n], challenger less baseline.
        seed: of the drawing.
        rounds: signs drawn.
    """
    differing = differences[differences != 0.0]
    if not len(differing):
        return 1.0
    sizes = np.abs(differing)
    if np.allclose(sizes, sizes[0]):
        return float(binomtest(int((differing > 0).sum()), len(differing), 0.5).pvalue)
    rng = np.random.default_rng(seed)
    every = 1 << len(differing)
    if every <= rounds + 1:
        return _as_far(differing, _every_sign(len(differing))) / every
    far = _drawn_as_far(differing, rounds, rng)
    if far > RARE or rounds < PERMUTATIONS:
        return (1 + far) / (1 + rounds)
    return (1 + _drawn_as_far(differing, MORE_PERMUTATIONS, rng)) / (1 + MORE_PERMUTATIONS)


def _every_sign(count: int) -> Bits:
    return (np.arange(1 << count)[:, None] >> np.arange(count) & 1).astype(np.uint8)


def _drawn_as_far(differing: Floats, rounds: int, rng: np.random.Generator) -> int:
    """Number of drawings of signs that are as far from 0 as what was observed."""
    count, bytes_ = len(differing), -(-len(differing) // 8)
    at_a_time = max(1, AT_A_TIME // count)
    far = 0
    for start in range(0, rounds, at_a_time):
        drawn = rng.integers(0, 256, (min(at_a_time, rounds - start), bytes_), dtype=np.uint8)
        far += _as_far(differing, np.unpackbits(drawn, axis=1, count=count))
    return far


def _as_far(differing: Floats, turned: Bits) -> int:
    """Of drawings [m, n], 1 where a sign is turned, those as far out as the differences [n] as they are."""
    whole = differing.sum()
    sums = whole - 2.0 * (turned @ differing)
    return int((np.abs(sums) >= abs(whole) - ROUNDING * np.abs(differing).sum()).sum())


def unpaired_permutation(one: Floats, other: Floats, seed: int = 0, rounds: int = PERMUTATIONS) -> float:
    """Two-sided p of equal means of two groups: who is in which group is taken to be chance.

    Args:
        one: [n].
        other: [m].
        seed: of the drawing.
        rounds: divisions drawn.
    """
    if np.ptp(np.concatenate([one, other])) == 0.0:
        return 1.0
    found = permutation_test(
        (one, other),
        lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        permutation_type="independent",
        n_resamples=rounds,
        batch=max(1, AT_A_TIME // (len(one) + len(other))),
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p by Holm (1979): the chance of any false alarm among them stays below the level."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def corrected(p_values: Sequence[float], correction: Correction = "holm") -> list[float]:
    """p adjusted for how many there are.

    Args:
        p_values: of all comparisons of one question.
        correction: holm bounds the chance of any false alarm, benjamini-hochberg the share of false among the alarms.
    """
    if not p_values or correction == "holm":
        return holm(p_values)
    return [float(p) for p in false_discovery_control(p_values, method="bh")]


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Two one-sided tests (Schuirmann 1987).

    Attributes:
        margin: the difference that would matter.
        p_worse: of "worse by at least the margin": small means no worse.
        p_better: of "better by at least the margin".
    """

    margin: float
    p_worse: float
    p_better: float

    @property
    def no_worse(self) -> bool:
        """Whether it is shown that the loss is below the margin."""
        return self.p_worse < ALPHA

    @property
    def equivalent(self) -> bool:
        """Whether it is shown that the difference is below the margin either way."""
        return max(self.p_worse, self.p_better) < ALPHA


def equivalence(differences: Floats, margin: float) -> Equivalence:
    """Whether paired differences are within a margin.

    Of right and wrong answers, whose differences are -1, 0 and 1, p is counted out: a t-test takes the few that
    differ for a sample of many, and finds a loss of exactly the margin to be less far too often. Where no prompt
    differs, p is then the chance that a share `margin` of changed prompts shows none.

    Args:
        differences: [n] of scores from 0 to 1, challenger less baseline.
        margin: above 0.

    Raises:
        ValueError: no margin.
    """
    if margin <= 0:
        raise ValueError(f"margin must be above 0, got {margin:g}")
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        share = min(margin, 1.0)
        return Equivalence(margin, _as_good(differences, share), _as_good(-differences, share))
    if np.ptp(differences) == 0.0:
        mean = float(differences[0])
        silent = float((1.0 - min(margin, 1.0)) ** len(differences))
        return Equivalence(margin, silent if mean > -margin else 1.0, silent if mean < margin else 1.0)
    worse = ttest_1samp(differences, -margin, alternative="greater").pvalue
    better = ttest_1samp(differences, margin, alternative="less").pvalue
    return Equivalence(margin, float(worse), float(better))


def _as_good(differences: Floats, loss: float) -> float:
    """Chance of a sum as high as that of these differences, each -1, 0 or 1, where their mean is `-loss`.

    That mean leaves open how often something is won. Taken is what is likeliest after what was seen (as Lloyd 2008
    does: "Exact p-values for discrete models obtained by estimation and maximization"); of gains nowhere, none.
    """
    count, won, lost = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    # Likeliest share of gains where losses are that share and `loss`: the root of its quadratic.
    middle = (won + lost) * (1 - loss) - 2 * loss * (count - lost)
    gains = (middle + math.sqrt(middle**2 + 8 * count * won * loss * (1 - loss))) / (4 * count)
    one = np.zeros(2 * count + 1)
    one[:3] = gains + loss, 1 - loss - 2 * gains, gains
    # Of all sums from -count to count: the distribution of one difference, folded with itself.
    chances = np.fft.irfft(np.fft.rfft(one) ** count, len(one))
    return float(np.clip(chances[won - lost + count :].sum(), 0.0, 1.0))
