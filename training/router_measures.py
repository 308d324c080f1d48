"""How good a router's predictions are: reliability, ranking, and what routing by them is worth, with intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.calibration import NUM_BINS, auc, calibration_error, cross_entropy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDS = 400
SHARES = tuple(place / 20 for place in range(21))
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval, over prompts drawn again."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(num: int, measure: Callable[[Ints], float], seed: int = 0, rounds: int = ROUNDS) -> Interval:
    """Percentile bootstrap over `num` prompts; `measure` is given the places of those drawn."""
    rng = np.random.default_rng(seed)
    values = [measure(rng.integers(0, num, num)) for _ in range(rounds)]
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(measure(np.arange(num)), float(low), float(high))


def calibration_interval(scores: Floats, labels: Floats, seed: int = 0, rounds: int = ROUNDS) -> Interval:
    """95% interval of the calibration error, which noise only ever raises: drawn again it is too large once more.

    So it is centred on the estimate less what drawing again has added, and begins at 0 where true predictions would
    show as large an error in more than one of twenty draws.

    Args:
        scores: [n] predicted chances.
        labels: [n] from 0 to 1.
        seed: of the draws.
        rounds: draws.
    """
    rng, num = np.random.default_rng(seed), len(scores)
    drawn = (rng.integers(0, num, num) for _ in range(rounds))
    again = np.array([calibration_error(scores[at], labels[at]) for at in drawn])
    were_it_true = [calibration_error(scores, (rng.random(num) < scores).astype(np.float64)) for _ in range(rounds)]
    value = calibration_error(scores, labels)
    centre, half = 2 * value - float(again.mean()), Z95 * float(again.std())
    low = 0.0 if value <= np.quantile(were_it_true, 0.95) else min(max(centre - half, 0.0), value)
    return Interval(value, low, max(centre + half, value))


@dataclass(frozen=True)
class Bin:
    """Predictions of one tenth of the scale, for a reliability diagram; the interval is Wilson's."""

    low: float
    high: float
    count: int
    predicted: float
    observed: Interval


def reliability(scores: Floats, labels: Floats) -> list[Bin]:
    """Mean prediction and mean label by bin of equal width; empty bins are left out."""
    places = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = []
    for place in range(NUM_BINS):
        chosen = places == place
        count = int(chosen.sum())
        if count:
            observed = _wilson(float(labels[chosen].mean()), count)
            mean = float(scores[chosen].mean())
            bins.append(Bin(place / NUM_BINS, (place + 1) / NUM_BINS, count, mean, observed))
    return bins


def _wilson(share: float, count: float) -> Interval:
    scale = 1 + Z95**2 / count
    centre = (share + Z95**2 / (2 * count)) / scale
    half = Z95 * float(np.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))) / scale
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0))


def prediction_report(scores: Floats, labels: Floats, constant: float, seed: int = 0) -> dict[str, Any]:
    """Everything about one predicted chance on held-out prompts, as plain values.

    Args:
        scores: [n] predicted chances.
        labels: [n] from 0 to 1.
        constant: mean label of the training prompts.
        seed: of the bootstrap.
    """
    num = len(scores)
    ranking = bootstrap(num, lambda at: auc(scores[at], labels[at]), seed)
    error = calibration_interval(scores, labels, seed)
    return {
        "num_prompts": num,
        "base_rate": float(labels.mean()),
        "auc": asdict(ranking),
        "expected_calibration_error": asdict(error),
        "loss": cross_entropy(scores, labels),
        "constant_loss": cross_entropy(np.full_like(scores, constant), labels),
        "reliability": [asdict(each) for each in reliability(scores, labels)],
    }


@dataclass(frozen=True)
class Routed:
    """What sending prompts to the large model brings and costs.

    Attributes:
        small: [n] reward of the small model's answer.
        large: [n] of the large model's.
        predicted: [n] predicted worth; prompts are sent to the large model in falling order of it.
        cheap: [n] cost of the small model's answer.
        dear: [n] of the large model's.
    """

    small: Floats
    large: Floats
    predicted: Floats
    cheap: Floats
    dear: Floats

    def at(self, places: Ints) -> Routed:
        """Those of some prompts."""
        return Routed(*(getattr(self, name)[places] for name in ("small", "large", "predicted", "cheap", "dear")))

    @property
    def gain(self) -> Floats:
        """[n] what the large model adds."""
        return self.large - self.small

    @property
    def extra(self) -> Floats:
        """[n] what the large model's answer costs more, below 0 where it costs less.

        All alike where it costs no more on the whole: prompts are counted then.
        """
        extra = self.dear - self.cheap
        return extra if extra.sum() > 0.0 else np.ones(len(extra))

    @property
    def hard(self) -> Floats:
        """[n] chance that only the large model is right: 1 or 0 where each answered once."""
        return (1.0 - self.small) * self.large

    @property
    def order(self) -> Ints:
        """[n] places in falling order of predicted worth."""
        return np.argsort(-self.predicted, kind="stable")

    def curve(self, order: Ints) -> tuple[Floats, Floats]:
        """Extra cost and added reward when the first prompts of an order go to the large model.

        The cost falls where the large model's answer is the cheaper one, and may lie below 0 or above 1 on the way.

        Returns:
            [n + 1] each, from none to all: as shares of the extra cost of all; as the mean over all prompts.
        """
        cost = np.concatenate([[0.0], np.cumsum(self.extra[order])])
        added = np.concatenate([[0.0], np.cumsum(self.gain[order])]) / len(order)
        return cost / cost[-1], added

    def spent(self, order: Ints) -> Floats:
        """[n + 1] cost of the curve of an order, relative to sending all."""
        extra = np.concatenate([[0.0], np.cumsum((self.dear - self.cheap)[order])])
        spent: Floats = 1.0 - (extra[-1] - extra) / self.dear.sum()  # sending all costs 1 to the last bit
        return spent

    @property
    def router(self) -> tuple[Floats, Floats]:
        """The curve in order of predicted worth."""
        return self.curve(self.order)

    @property
    def oracle(self) -> tuple[Floats, Floats]:
        """The best that any cost can buy, as `curve` has it; the cost rises."""
        cost, added = best_choices(self.extra, self.gain)
        return cost / self.extra.mean(), added


def best_choices(extra: Floats, gain: Floats) -> tuple[Floats, Floats]:
    """Cost and gain of the best choices between two answers, relative to always giving the first.

    They begin with the cheaper answer to every prompt, whichever that is, and go over to the dearer one where it brings
    most for what it costs more, until all are dear.

    Args:
        extra: [n] what the second answer costs more; below 0: the first is the dearer one.
        gain: [n] what the second brings more.

    Returns:
        [n + 1] each, means over all prompts; the cost rises.
    """
    saves = extra < 0.0
    step, brings = np.abs(extra), np.where(saves, -gain, gain)
    order = np.argsort(-brings / np.maximum(step, 1e-12), kind="stable")
    cost = np.concatenate([[extra[saves].sum()], step[order]])
    added = np.concatenate([[gain[saves].sum()], brings[order]])
    return np.cumsum(cost) / len(extra), np.cumsum(added) / len(extra)


def _at(grid: Floats, curve: tuple[Floats, Floats]) -> Floats:
    """Reward that a curve adds at some costs: its points are taken by cost, where this does not rise all along."""
    cost, added = curve
    order = np.argsort(cost, kind="stable")
    found: Floats = np.interp(grid, cost[order], added[order])
    return found


def recovered(routed: Routed, shares: tuple[float, ...] | None = None) -> float:
    """How much of what the oracle gains over random routing the router gains, at the same cost.

    Args:
        routed: held-out prompts.
        shares: of the extra cost of sending all, over which it is averaged; None: all of them, by area.

    Returns:
        1 for the oracle, 0 for random; 0 too where the oracle gains nothing.
    """
    grid = np.linspace(0.0, 1.0, 201) if shares is None else np.array(shares)
    mean = routed.gain.mean()
    mine = _at(grid, routed.router) - grid * mean
    best = np.interp(grid, *routed.oracle) - grid * mean
    return float(mine.sum() / best.sum()) if best.sum() > 1e-12 else 0.0


def routing_report(routed: Routed, seed: int = 0) -> dict[str, Any]:
    """What routing by predicted worth brings on held-out prompts, as plain values.

    Every point of `curve` says: to send this share of prompts to the large model, send those with a predicted worth
    above `threshold`; then `cost` is the mean relative to sending all, `quality` the mean reward, both with intervals,
    compared with random routing's and the oracle's at the same cost (where that is beyond either model alone,
    random routing's is that model's). Of the prompts that only the large model gets right, `hard_sent_small` is the
    share that the small one answers; of those that the small one gets right, `easy_sent_large` is the share that the
    large one answers; both with Wilson's intervals, and None where there are no such prompts. `hard` and `easy` say how
    many there are, as shares of all.
    """
    num = len(routed.small)
    ranked = np.sort(routed.predicted)[::-1]
    base, mean = float(routed.small.mean()), float(routed.gain.mean())
    (x, added), spent = routed.router, routed.spent(routed.order)
    ends, errors = _curve_ends(routed, seed), _errors(routed)
    curve = []
    for place, share in enumerate(SHARES):
        count = round(share * num)
        part = float(x[count])
        curve.append(
            {
                "share": share,
                "threshold": threshold_for(ranked, share),
                "cost": float(spent[count]),
                "cost_interval": ends[:, 0, place].tolist(),
                "quality": base + float(added[count]),
                "quality_interval": ends[:, 1, place].tolist(),
                "random": base + min(max(part, 0.0), 1.0) * mean,
                "oracle": base + float(np.interp(part, *routed.oracle)),
                **errors[place],
            }
        )
    shares = {"0.1-0.5": (0.1, 0.2, 0.3, 0.4, 0.5), "all": None}
    return {
        "num_prompts": num,
        "hard": float(routed.hard.mean()),
        "easy": base,
        "small_only": asdict(bootstrap(num, lambda at: float(routed.small[at].mean()), seed)),
        "large_only": asdict(bootstrap(num, lambda at: float(routed.large[at].mean()), seed)),
        "recovered": {
            name: asdict(bootstrap(num, lambda at, part=part: recovered(routed.at(at), part), seed))  # type: ignore[misc]
            for name, part in shares.items()
        },
        "curve": curve,
    }


def _curve_ends(routed: Routed, seed: int) -> Floats:
    """[low and high, cost and quality, shares] ends of 95% intervals of a curve's points, over prompts drawn again."""
    num = len(routed.small)
    counts = [round(share * num) for share in SHARES]
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(ROUNDS):
        part = routed.at(rng.integers(0, num, num))
        _, added = part.router
        drawn.append([part.spent(part.order)[counts], part.small.mean() + added[counts]])
    ends: Floats = np.quantile(np.array(drawn), [0.025, 0.975], axis=0)
    return ends


def _errors(routed: Routed) -> list[dict[str, Any]]:
    """By share: how much of what needs the large model goes to the small one, and of what does not to the large."""
    num, order = len(routed.small), routed.order
    hard, easy = routed.hard[order], routed.small[order]
    counts = [round(share * num) for share in SHARES]
    return [
        {**_rate("hard_sent_small", hard[count:], hard), **_rate("easy_sent_large", easy[:count], easy)}
        for count in counts
    ]


def _rate(name: str, wrong: Floats, of: Floats) -> dict[str, Any]:
    """The part of some weights that is in the wrong place, with its interval, as fields of a point of the curve.

    Weights below 1, of prompts that were answered several times, count as as many whole ones as would vary as much.
    """
    total = float(of.sum())
    if total == 0.0:
        return {name: None, f"{name}_interval": None}
    share = min(float(wrong.sum()) / total, 1.0)
    # Where all or none are sent there, no other prompts would show anything else.
    sure = len(wrong) in (0, len(of))
    found = Interval(share, share, share) if sure else _wilson(share, total**2 / float(np.square(of).sum()))
    return {name: share, f"{name}_interval": [found.low, found.high]}


def threshold_for(ranked: Floats, share: float) -> float:
    """The worth above which `share` of prompts lie; `ranked` [n] falls."""
    count = round(share * len(ranked))
    if count == 0:
        return float(ranked[0])
    if count >= len(ranked):
        return float(ranked[-1]) - 1.0
    return float((ranked[count - 1] + ranked[count]) / 2)
