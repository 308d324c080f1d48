"""Training a probe from outcomes: read prompts, fit, calibrate, measure; one artifact and one report."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoding.artifacts import Artifact
from decoding.model import ModelPool
from decoding.sequence import Sequence
from router.base import PROMPT_WANT
from router.difficulty.features import features_of, inputs_of, state_of
from router.difficulty.probe import EXTRA_COST, ROUTER_LABELS, ROUTER_PROBE, SEEN, ProbeNetwork, Reads, extra_costs
from router.difficulty.text_features import TEXT_FEATURES, read_text
from training.fitting import Schedule, fit
from training.router_calibration import Way, fit_scaling
from training.router_costs import Costs, cost_loss
from training.router_measures import Floats, Routed, prediction_report, routing_report
from training.router_outcomes import ROLES, Outcome, Outcomes
from training.router_samples import allocation_report, confidence_report, kinds_report
from training.router_targets import Target, labels_of
from turnout.errors import invalid
from turnout.types import SamplingParams

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of outputs and labels [n, k]: a scalar
Advance = Callable[[str, int, int], None]  # what is being done, how much of it, out of how much

AT_ONCE = 16
FEWEST_ROWS = 20
USUAL_ROWS = 200
NUM_QUANTILES = 101


@dataclass(frozen=True)
class Recipe:
    """How a probe is trained.

    Attributes:
        hidden: width of its hidden layer.
        calibration: see `fit_scaling`.
        epochs: passes over the training prompts.
        batch_size: prompts of a step.
        learning_rate: of AdamW at its highest.
        weight_decay: of AdamW.
        seed: of the split, the first weights and the order.
    """

    hidden: int = 128
    calibration: Way = "temperature"
    epochs: int = 100
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0

    def schedule(self, count: int) -> Schedule:
        """Settings for a number of training prompts."""
        one = Schedule(
            steps=1,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            warmup_steps=0,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )
        return replace(one, steps=self.epochs * one.batches_in(count))


@dataclass(frozen=True)
class Trained:
    """A probe ready to be saved, and everything measured on prompts it has not seen."""

    artifact: Artifact
    report: dict[str, Any]


async def read_prompts(models: ModelPool, prompts: list[list[int]], advance: Advance) -> torch.Tensor:
    """What a probe sees of each prompt: float32 [n, width + features], one forward of the small model each.

    Args:
        models: the small one reads.
        prompts: token ids of each.
        advance: called with progress.
    """
    small, slots = models.small, asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(prompt: list[int]) -> npt.NDArray[np.float32]:
        nonlocal done
        seq = Sequence(prompt, SamplingParams(max_tokens=1), seed=0)
        async with slots:
            try:
                [row] = await small.extend(seq, want=PROMPT_WANT)
            finally:
                small.release(seq)
        done += 1
        advance("reading prompts", done, len(prompts))
        return inputs_of(state_of(row), features_of(row, len(prompt)))

    return torch.from_numpy(np.stack(await asyncio.gather(*(one(prompt) for prompt in prompts))))


def read_texts(texts: list[str]) -> torch.Tensor:
    """What a probe that reads texts sees of each: float32 [n, width + features]."""
    return torch.from_numpy(np.stack([inputs_of(*read_text(text), TEXT_FEATURES) for text in texts]))


def split(outcomes: Outcomes, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Places of rows for training, calibration and the report: three, one and one of every five, by hashed prompt.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there are too few.
    """
    num = len(outcomes.rows)
    if num < FEWEST_ROWS:
        raise invalid("outcomes", f"has {num} prompts; at least {FEWEST_ROWS} are needed")

    def key(place: int) -> bytes:
        return hashlib.blake2b(f"{seed} {outcomes.rows[place].key}".encode(), digest_size=8).digest()

    order = sorted(range(num), key=key)
    first, second = 3 * num // 5, 4 * num // 5
    return order[:first], order[first:second], order[second:]


def train_probe(
    models: ModelPool,
    outcomes: Outcomes,
    inputs: torch.Tensor,
    target: Target,
    recipe: Recipe,
    advance: Advance = lambda *_: None,
    reads: Reads = "state",
) -> Trained:
    """Fit, calibrate and measure a probe; the models stay as they are.

    Args:
        models: whom the outcomes are about.
        outcomes: the rows.
        inputs: [n, width] what the probe sees of each row's prompt; see `read_prompts`, `read_texts`.
        target: what it is to predict.
        recipe: the settings.
        advance: called with progress.
        reads: what `inputs` are.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few rows, rows without what is needed, labels all alike, or answers of other
            models.
    """
    outcomes.check_models(digests := {role: models.digest_of(role) for role in ROLES})
    labels = labels_of(target, outcomes)
    train, tune, heldout = split(outcomes, recipe.seed)
    target.check(labels[train])
    network, losses = _fit(inputs, labels, (train, tune), target.loss, recipe, advance)
    with torch.inference_mode():
        outputs = network(inputs)
    scaling = fit_scaling(recipe.calibration, target.law, outputs[tune], labels[tune])
    predicted = scaling(outputs.numpy())
    priced = None
    if target.kind == ROUTER_PROBE:
        priced = _price(models, outcomes, inputs, (train, tune), recipe, advance)
    measured = _measure(outcomes, target, predicted, labels.double().numpy(), (train, heldout), priced, recipe)
    parts = {"train": len(train), "calibration": len(tune), "heldout": len(heldout)}
    about = {"kind": target.kind, "rows": parts, "data": outcomes.digest, "losses": losses}
    doubts = [each for each in (_few(len(labels), len(heldout)), target.doubt(outcomes)) if each]
    report = {**about, **({"warning": "; ".join(doubts)} if doubts else {}), **measured}
    settings = {
        "head": network.settings,
        **({EXTRA_COST: priced.network.settings} if priced is not None and priced.network is not None else {}),
        "features": list(SEEN[reads]),
        **({} if reads == "state" else {"reads": reads}),
        "labels": list(target.labels),
        "scaling": scaling.settings,
        "data": outcomes.digest,
        "recipe": asdict(recipe),
        "rows": parts,
        **target.settings,
        **measured,
    }
    tensors = _tensors(network)
    if priced is not None and priced.network is not None:
        tensors |= {f"{EXTRA_COST}.{name}": each for name, each in _tensors(priced.network).items()}
    return Trained(
        Artifact(target.kind, "training.router_training", settings, dict[str, str](digests.items()), tensors), report
    )


def _few(num: int, heldout: int) -> str:
    if num >= USUAL_ROWS:
        return ""
    return f"{num} prompts are few, {USUAL_ROWS} are usual: {heldout} are held out, and what they tell is rough"


def _tensors(network: ProbeNetwork) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in network.state_dict().items()}


@dataclass(frozen=True)
class _Priced:
    """What answers cost, and what the large model's are predicted to cost more.

    Attributes:
        costs: of all rows.
        network: predicts the extra cost; None: all cost the same.
        extra: [n] predicted for all rows, the mean being 1.
    """

    costs: Costs
    network: ProbeNetwork | None
    extra: Floats


def _price(
    models: ModelPool,
    outcomes: Outcomes,
    inputs: torch.Tensor,
    parts: tuple[list[int], list[int]],
    recipe: Recipe,
    advance: Advance,
) -> _Priced:
    costs = Costs.of(models, outcomes)
    labels = costs.labels(parts[0])
    if labels is None:
        return _Priced(costs, None, np.ones(len(outcomes.rows)))
    network, _ = _fit(inputs, labels, parts, cost_loss, recipe, advance)
    return _Priced(costs, network, extra_costs(network, inputs))


def _fit(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    parts: tuple[list[int], list[int]],
    loss_of: Loss,
    recipe: Recipe,
    advance: Advance,
) -> tuple[ProbeNetwork, dict[str, Any]]:
    """Fit to the first part, and keep the epoch that is best on the second: a probe soon knows its rows by heart."""
    train, tune = parts
    torch.manual_seed(recipe.seed)
    network = ProbeNetwork(inputs.shape[1], recipe.hidden, labels.shape[1])
    network.standardise(inputs[train])
    learnt, wanted = inputs[train], labels[train]
    schedule = recipe.schedule(len(train))
    every = schedule.batches_in(len(train))
    best: tuple[float, int, dict[str, torch.Tensor]] = (float("inf"), 0, {})
    tuned: list[float] = []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return loss_of(network(learnt[batch]), wanted[batch])

    def on_step(step: int, value: float) -> None:
        nonlocal best
        if step % every:
            return
        with torch.no_grad():
            tuned.append(float(loss_of(network(inputs[tune]), labels[tune])))
        if tuned[-1] < best[0]:
            best = (tuned[-1], step // every, {name: each.clone() for name, each in network.state_dict().items()})
        advance(f"fitting, loss {value:.3f}", step // every, recipe.epochs)

    losses = fit(network, loss, len(train), schedule, save_every=every, on_step=on_step)
    if not best[2]:
        raise invalid("learning_rate", f"is {recipe.learning_rate:g}; no epoch has a finite loss, lower it")
    network.load_state_dict(best[2])
    return network.eval(), {"train": losses, "calibration": tuned, "kept_epoch": best[1]}


def _measure(
    outcomes: Outcomes,
    target: Target,
    predicted: Floats,
    labels: Floats,
    parts: tuple[list[int], list[int]],
    priced: _Priced | None,
    recipe: Recipe,
) -> dict[str, Any]:
    """What is measured on held-out rows, and the quantiles of what is predicted for them."""
    train, heldout = parts
    seed, scores, true = recipe.seed, predicted[heldout], labels[heldout]
    report: dict[str, Any] = {"predictions": {}}
    for place, name in enumerate(target.labels):
        if target.law == "values":
            constant = float(labels[train, place].mean())
            error = float(np.square(scores[:, place] - true[:, place]).mean())
            alone = float(np.square(constant - true[:, place]).mean())
            report["predictions"][name] = {"squared_error": error, "constant_squared_error": alone}
        else:
            constant = float(labels[train, place].mean())
            report["predictions"][name] = prediction_report(scores[:, place], true[:, place], constant, seed)
    report["quantiles"] = {
        name: _quantiles(scores[:, place]) for place, name in enumerate(target.labels) if target.law != "choice"
    }
    if priced is not None:
        rows = [outcomes.rows[place] for place in heldout]
        gains, extra = scores[:, 1] - scores[:, 0], priced.extra[heldout]
        routed = _routed(rows, gains / extra, priced.costs, heldout)
        report["quantiles"] |= {"gain": _quantiles(gains), "worth": _quantiles(routed.predicted)}
        if priced.network is not None:
            report["predictions"][EXTRA_COST] = _cost_report(routed, extra)
        report["routing"] = routing_report(routed, seed)
        report["allocation"] = {
            role: allocation_report(rows, role, scores[:, ROUTER_LABELS.index(f"p_{role}")], seed) for role in ROLES
        }
        report["confidence"] = confidence_report(rows, routed, seed)
        report["kinds"] = kinds_report(rows, routed, gains)
    elif target.law == "choice":
        hits = scores.argmax(1) == true.argmax(1)
        most = int(labels[train].sum(0).argmax())
        report["accuracy"] = float(hits.mean())
        report["majority_accuracy"] = float(true[:, most].mean())
    return report


def _quantiles(values: Floats) -> list[float]:
    return [float(each) for each in np.quantile(values, np.linspace(0.0, 1.0, NUM_QUANTILES))]


def _routed(rows: list[Outcome], worths: Floats, costs: Costs, heldout: list[int]) -> Routed:
    """Held-out rows in the order of their predicted worth."""
    small, large = (np.array([row.reward(role) for row in rows]) for role in ROLES)
    return Routed(small, large, worths, costs.cheap[heldout], costs.dear[heldout])


def _cost_report(routed: Routed, predicted: Floats) -> dict[str, float]:
    """Mean error of the predicted extra cost, and of one constant, both as parts of the mean extra cost."""
    extra = np.maximum(routed.dear - routed.cheap, 0.0)
    true = extra / extra.mean()
    return {
        "absolute_error": float(np.abs(predicted - true).mean()),
        "constant_absolute_error": float(np.abs(1.0 - true).mean()),
    }
