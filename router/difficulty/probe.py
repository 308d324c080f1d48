"""The probe: a small network on the small model's hidden state after prefill, with what it takes to be believed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from decoding.artifacts import Artifact
from decoding.length_heads import Head
from router.difficulty.features import FEATURES, inputs_of
from router.difficulty.scaling import Scaling
from router.difficulty.text_features import TEXT_FEATURES
from turnout.errors import invalid

ROUTER_PROBE = "router_probe"
STRATEGY_PROBE = "strategy_probe"
MARGINALS_PROBE = "marginals_probe"

ROUTER_LABELS = ("p_small", "p_large")
EXTRA_COST = "extra_cost"  # its network's name in an artifact, and that of its prediction
LEAST_EXTRA = 0.05  # of the mean extra cost: no answer counts as cheaper, so that worths stay within 1 / LEAST_EXTRA

Vector = npt.NDArray[np.float32]
Reads = Literal["state", "text"]  # the small model's state after the prompt, or nothing but the prompt's text
SEEN: dict[Reads, tuple[str, ...]] = {"state": FEATURES, "text": TEXT_FEATURES}

FARTHEST = 6.0  # standard deviations; beyond what training saw, a straight line must not run on


class ProbeNetwork(Head):
    """Two layers, `W2 ReLU(W1 x + b1) + b2`, over standardised inputs (papers #45 and #52).

    Args:
        inputs: width of what it is fed: hidden state and features.
        hidden: width of its hidden layer.
        outputs: how many numbers come out.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(inputs))
        self.first = nn.Linear(inputs, hidden)
        self.last = nn.Linear(hidden, outputs)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return {
            "inputs": self.first.in_features,
            "hidden": self.first.out_features,
            "outputs": self.last.out_features,
        }

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """float32 [n, inputs] -> [n, outputs]."""
        known = ((inputs - self.mean) / self.spread).clamp(-FARTHEST, FARTHEST)
        outputs: torch.Tensor = self.last(self.first(known).relu())
        return outputs

    def standardise(self, inputs: torch.Tensor) -> None:
        """Take mean and spread from float32 [n, inputs]; what hardly varies there is ignored from then on."""
        spread = inputs.std(0)
        self.mean.copy_(inputs.mean(0))
        self.spread.copy_(torch.where(spread > 1e-3, spread, 1e6))


class Layers:
    """A network's arithmetic for one prompt.

    A request's decision stands between its prompt and its first token, and other requests wait for it: torch
    takes longer to dispatch operations of a few hundred numbers than these take.

    Args:
        network: trained to its end.
    """

    def __init__(self, network: ProbeNetwork) -> None:
        self._mean, self._scale = network.mean.numpy(), (1.0 / network.spread).numpy()
        self._first, self._shift = (each.detach().numpy() for each in (network.first.weight, network.first.bias))
        self._last, self._offset = (each.detach().numpy() for each in (network.last.weight, network.last.bias))

    def __call__(self, inputs: Vector) -> Vector:
        """float32 [inputs] -> [outputs]; see `ProbeNetwork.forward`."""
        known = np.clip((inputs - self._mean) * self._scale, -FARTHEST, FARTHEST)
        outputs: Vector = self._last @ np.maximum(self._first @ known + self._shift, 0.0) + self._offset
        return outputs


@dataclass(frozen=True)
class Probe:
    """A trained probe, ready to be asked.

    Attributes:
        network: see there.
        labels: names of what it predicts.
        scaling: from the network's outputs to predictions.
        extra: a router's second network, whose one output is the logarithm of what the large model's answer costs more,
            the mean being 1; None: the costs of answers were unknown in training.
        reads: what it is fed.
    """

    network: ProbeNetwork
    labels: tuple[str, ...]
    scaling: Scaling
    extra: ProbeNetwork | None = None
    reads: Reads = "state"

    @classmethod
    def load(cls, artifact: Artifact) -> Self:
        """The probe an artifact holds.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it sees other features than this version computes.
        """
        found, reads = tuple(artifact.settings["features"]), artifact.settings.get("reads", "state")
        if found != SEEN.get(reads):
            known = ", ".join(SEEN.get(reads, FEATURES))
            raise invalid("artifact", f"its probe sees {', '.join(found)}; this version computes {known}")
        scaling = Scaling(**artifact.settings["scaling"])
        main, extra = _parts(artifact)
        costs = None if extra is None else ProbeNetwork.of(extra)
        return cls(ProbeNetwork.of(main), tuple(artifact.settings["labels"]), scaling, costs, reads)

    @cached_property
    def _layers(self) -> list[Layers]:
        return [Layers(network) for network in (self.network, self.extra) if network is not None]

    def predict(self, hidden: Vector, features: dict[str, float]) -> dict[str, float]:
        """Calibrated predictions for one prompt, by label, and `extra_cost` where the probe predicts it.

        Args:
            hidden: the small model's state after the prompt, or the text's hashed words: float32 [width].
            features: see `features_of`, `read_text`.

        Raises:
            ValueError: the state has another width than the probe was trained on.
        """
        inputs = inputs_of(hidden, features, SEEN[self.reads])
        if len(inputs) != self.network.first.in_features:
            raise ValueError(f"the probe is fed {self.network.first.in_features} numbers, not {len(inputs)}")
        outputs, *extra = (layers(inputs) for layers in self._layers)
        found = dict(zip(self.labels, self.scaling(outputs).tolist(), strict=True))
        for [logarithm] in extra:
            found[EXTRA_COST] = math.exp(min(max(logarithm, math.log(LEAST_EXTRA)), -math.log(LEAST_EXTRA)))
        return found


def extra_costs(network: ProbeNetwork, inputs: torch.Tensor) -> npt.NDArray[np.float64]:
    """What the large model's answers are predicted to cost more, the mean being 1: float32 [n, width] -> [n]."""
    with torch.inference_mode():
        logarithms: npt.NDArray[np.float64] = network(inputs)[:, 0].double().numpy()
    return np.exp(logarithms).clip(LEAST_EXTRA, 1.0 / LEAST_EXTRA)


def worth_of(scores: dict[str, float]) -> float:
    """What the large model's answer is predicted to gain for what it costs more: in this order requests go to it."""
    return (scores["p_large"] - scores["p_small"]) / scores.get(EXTRA_COST, 1.0)


def _parts(artifact: Artifact) -> tuple[Artifact, Artifact | None]:
    """An artifact with the tensors of the network of labels, and one with those of the network of costs, if any."""
    prefix = f"{EXTRA_COST}."
    main = {name: each for name, each in artifact.tensors.items() if not name.startswith(prefix)}
    extra = {name.removeprefix(prefix): each for name, each in artifact.tensors.items() if name.startswith(prefix)}
    if not extra:
        return artifact, None
    settings = {**artifact.settings, "head": artifact.settings[EXTRA_COST]}
    return replace(artifact, tensors=main), replace(artifact, tensors=extra, settings=settings)
