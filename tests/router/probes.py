"""Probes and models made by hand: what they predict is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.artifacts import Artifact, Artifacts
from decoding.fakes import TableModel, pair
from decoding.model import ModelPool, Readout, ReadSpec, Request
from decoding.sequence import Sequence
from router.base import Asked, RoutingPolicy, make_policy
from router.difficulty.features import FEATURES
from router.difficulty.probe import MARGINALS_PROBE, ROUTER_LABELS, ROUTER_PROBE, STRATEGY_PROBE, ProbeNetwork
from router.difficulty.scaling import Law
from router.difficulty.strategies import STRATEGIES
from turnout.calls import RouteLimits
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

VOCAB = 10
# Chances of small and large by the prompt's last token: the gain rises from 0.0 to 0.9.
CHANCES = [[0.95 - 0.1 * t, 0.95] for t in range(10)]


def policy(name: str, **params: Any) -> RoutingPolicy:
    """A routing policy as the configuration names it."""
    return make_policy(PartChoice.of(name, **params), "routing.policy")


class LastToken(TableModel):
    """Its hidden state is the last token, one-hot; all tokens are equally likely."""

    def __init__(self, name: str, num_parameters: int, vocab: int = VOCAB) -> None:
        super().__init__(name, lambda tokens: torch.zeros(vocab), vocab, num_parameters)

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        rows = super()._read(seq, paths, want)
        for row, path in zip(rows, paths, strict=True):
            if want.hidden:
                last = (seq.tokens + list(path))[-1]
                row.hidden[-1] = torch.nn.functional.one_hot(torch.tensor(last), self.vocab_size).float()
        return rows


def network_of(chances: list[list[float]]) -> ProbeNetwork:
    """A network whose logits after token t are those of `chances[t]`."""
    return network_saying(torch.logit(torch.tensor(chances).clamp(1e-6, 1 - 1e-6)))


def network_saying(said: torch.Tensor) -> ProbeNetwork:
    """A network whose outputs after token t are `said[t]`; [tokens, outputs]."""
    num, outputs = said.shape
    network = ProbeNetwork(num + len(FEATURES), num, outputs)
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    network.first.weight.data[:, :num] = torch.eye(num)
    network.last.weight.data[:] = said.T
    return network.requires_grad_(False)


def routing_settings(gains: list[float]) -> dict[str, Any]:
    """What a trainer writes beside the network: an even curve from half as good to as good as the large model."""
    quantiles = np.quantile(gains, np.linspace(0.0, 1.0, 101)).tolist()
    curve = [{"share": s / 10, "cost": 0.1 + 0.9 * s / 10, "quality": 0.4 + 0.4 * s / 10} for s in range(11)]
    return {
        "quantiles": {"gain": quantiles, "worth": quantiles, "p_small": [0.5] * 101, "p_large": [0.5] * 101},
        "routing": {"curve": curve, "large_only": {"value": 0.8, "low": 0.7, "high": 0.9}},
    }


def save_probe(
    folder: Path, name: str, kind: str, labels: list[str], chances: list[list[float]], **settings: Any
) -> None:
    """An artifact as the trainer makes them, for `models`."""
    law: Law = "choice" if kind == STRATEGY_PROBE else "chances"
    _save(folder, name, kind, labels, network_of(chances), law, **settings)


def _save(
    folder: Path, name: str, kind: str, labels: list[str], network: ProbeNetwork, law: Law, **settings: Any
) -> None:
    about = {
        "head": network.settings,
        "features": list(FEATURES),
        "labels": labels,
        "scaling": {"law": law, "temperatures": [1.0], "knots": []},
        **settings,
    }
    digests = {"small": "table small", "large": "table large"}
    Artifact(kind, "test", about, digests, network.state_dict()).save(folder / f"{name}.safetensors")


def save_router(folder: Path, chances: list[list[float]], name: str = "router") -> None:
    """A router's artifact: chances of small and large by the prompt's last token."""
    gains = [large - small for small, large in chances]
    save_probe(folder, name, ROUTER_PROBE, list(ROUTER_LABELS), chances, **routing_settings(gains))


def save_strategies(folder: Path, best: list[str], name: str = "strategies") -> None:
    """A strategy probe: the strategy by the prompt's last token."""
    chances = [[0.9 if each == wanted else 0.1 for each in STRATEGIES] for wanted in best]
    save_probe(folder, name, STRATEGY_PROBE, list(STRATEGIES), chances)


def save_marginals(folder: Path, added: list[list[float]], role: str = "small", name: str = "marginals") -> None:
    """A marginals probe: what each sample of a role adds, by the prompt's last token."""
    labels = [f"delta_{number}" for number in range(1, len(added[0]) + 1)]
    _save(folder, name, MARGINALS_PROBE, labels, network_saying(torch.tensor(added)), "values", role=role)


def models_of(folder: Path) -> ModelPool:
    """A small model of 10 parameters and a large one of 100, with the folder's artifacts."""
    return replace(pair(LastToken("small", 10), LastToken("large", 100)), artifacts=Artifacts(folder))


def asked(last: int, limits: RouteLimits | None = None, before: int = 2, **sampling: Any) -> Asked:
    """A request whose prompt ends with a token, and the one before it."""
    seq = Sequence([0, 1, before, last], SamplingParams(**{"max_tokens": 100, **sampling}), seed=7)
    return Asked(Request(f"r{last}", seq), "pair", "tenant", "", "text", limits or RouteLimits())
