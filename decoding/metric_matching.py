"""Metrics of a continuation, and the law closest to a model's whose mean metrics are those of a corpus (paper #25)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Literal, get_args

import torch

Metric = Literal["seq_rep_4", "token_rep_32", "diversity", "information", "coherence", "length"]
METRICS: tuple[Metric, ...] = get_args(Metric)
MOST_STEPS = 200


def seq_rep(ids: Items[int], n: int) -> float:
    """Return the share of a sequence's n-grams that are repetitions; 0 where it has none."""
    total = len(ids) - n + 1
    return 1.0 - len({tuple(ids[start : start + n]) for start in range(total)}) / total if total > 0 else 0.0


def token_rep(ids: Items[int], window: int) -> float:
    """Return the share of tokens that stand among the `window` before them."""
    if not ids:
        return 0.0
    return sum(token in ids[max(place - window, 0) : place] for place, token in enumerate(ids)) / len(ids)


def diversity(ids: Items[int]) -> float:
    """Return the product of 1 - seq_rep(n) for n from 2 to 4."""
    return math.prod(1.0 - seq_rep(ids, n) for n in (2, 3, 4))


def metrics_of(ids: Items[int], logprobs: Items[float], coherence: float, names: Items[Metric]) -> list[float]:
    """Measure a continuation.

    Args:
        ids: its tokens, at least one.
        logprobs: of these, nats; `information` is minus their mean.
        coherence: cosine of the embeddings of the prompt and the continuation.
        names: metrics, in order.
    """
    information = -sum(logprobs) / len(logprobs) if logprobs else 0.0
    values: dict[Metric, float] = {
        "seq_rep_4": seq_rep(ids, 4),
        "token_rep_32": token_rep(ids, 32),
        "diversity": diversity(ids),
        "information": information,
        "coherence": coherence,
        "length": float(len(ids)),
    }
    return [values[name] for name in names]


def tilt(values: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return self-normalised weights proportional to exp(-mu.f): float64 [n, k] and [k] -> [n]."""
    return (-(values @ coefficients)).softmax(0)


def fit_coefficients(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Solve for mu jointly: the weighted mean metrics of samples become the targets.

    Minimises sum_k (1 - F_k(mu) / F_k)^2, F(mu) the self-normalised mean under weights exp(-mu.f), from mu = 0.
    Metrics are standardised on the way, so that none of them sets the step size.

    Args:
        values: float64 [n, k], metrics of samples of the model.
        targets: float64 [k], not 0.

    Returns:
        float64 [k].

    Raises:
        ValueError: a target is 0, or outside what the samples reach, so that no weights meet it.
    """
    least, greatest = values.amin(0), values.amax(0)
    if bool(((targets == 0) | (targets < least) | (targets > greatest)).any()):
        raise ValueError(f"targets {targets.tolist()} are 0, or not between {least.tolist()} and {greatest.tolist()}")
    spread = values.std(0, unbiased=False).clamp_min(1e-12)
    scaled = (values - values.mean(0)) / spread
    mu = torch.zeros(values.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [mu], max_iter=MOST_STEPS, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        means = tilt(scaled, mu) @ values
        value = (1.0 - means / targets).square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return mu.detach() / spread
