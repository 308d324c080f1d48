"""Training of AutoDeco's heads on worked answers (paper #22): temperature and top-p without labels for either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import Artifact
from decoding.model import Model, ReadSpec
from decoding.sampling_heads import LEAST_TEMPERATURE, SamplingHeads
from decoding.sequence import Sequence
from training.fitting import Schedule, fit
from training.length_predictors import Advance, claim
from turnout.errors import invalid
from turnout.types import SamplingParams

AT_ONCE = 8
HELDOUT_ONE_IN = 8
LAST = -1
MEASURED_AT_ONCE = 256
TINY = 1e-9
STEADY = Schedule(batch_size=128, learning_rate=1e-3, warmup_steps=20)

Logits = Callable[[torch.Tensor], torch.Tensor]  # states [n, width] -> raw logits [n, vocab], without gradients


@dataclass(frozen=True)
class AutoDecoRecipe:
    """How the heads are trained.

    Attributes:
        inner: width of their hidden layers.
        steepness: how sharply probability beyond top-p counts less in the loss.
        dropped: share of the places where the model's best token is right that teach no temperature.
        schedule: of the steps.
    """

    inner: int = 256
    steepness: float = 30.0
    dropped: float = 0.6
    schedule: Schedule = STEADY


@dataclass(frozen=True)
class Places:
    """Places of worked answers.

    Attributes:
        states: float32 [n, width], after the last norm, that each token is chosen from.
        tokens: int64 [n], what the answer has there.
    """

    states: torch.Tensor
    tokens: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TrainedHeads:
    """Heads ready to be saved, and what was measured on answers that they have not seen, in plain values."""

    artifact: Artifact
    report: dict[str, Any]


def temperature_loss(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy at the temperatures, each place weighted by the model's own probability of its token.

    Args:
        logits: [n, vocab], raw, without gradients.
        tokens: int64 [n].
        temperature: [n, 1].
        kept: bool [n], which places count.
    """
    scaled = (logits / temperature.clamp(min=LEAST_TEMPERATURE)).log_softmax(-1)
    weights = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
    losses = -scaled.gather(1, tokens[:, None])[:, 0] * weights
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def soft_nucleus(probs: torch.Tensor, top_p: torch.Tensor, steepness: float) -> torch.Tensor:
    """Return the factor of each token: 1 within top-p, e ** (-steepness * excess) beyond it.

    Args:
        probs: [n, vocab].
        top_p: [n, 1].
        steepness: how fast it falls.
    """
    ordered, places = probs.sort(dim=-1, descending=True, stable=True)
    factors = (-steepness * (ordered.cumsum(-1) - top_p).relu()).exp()
    return torch.zeros_like(probs).scatter(-1, places, factors)


def top_p_loss(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, steepness: float
) -> torch.Tensor:
    """Negative log-probability of the tokens under the soft nucleus, weighted as in `temperature_loss`."""
    probs = (logits / temperature.clamp(min=LEAST_TEMPERATURE)).softmax(-1)
    left = probs * soft_nucleus(probs, top_p, steepness)
    picked = (left / (left.sum(-1, keepdim=True) + TINY)).gather(1, tokens[:, None])[:, 0]
    weights = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
    return -((picked + TINY).log() * weights).mean()


async def read_places(model: Model, prompt: list[int], answer: list[int]) -> Places:
    """Let the model read a worked answer, and keep the states that its tokens would be chosen from."""
    seq = Sequence(prompt, SamplingParams(max_tokens=len(answer) + 1), 0)
    try:
        want = ReadSpec(draw=None, hidden=frozenset({LAST}))
        rows = await model.extend(seq, tuple(answer[:-1]), want, every=True)
    finally:
        model.release(seq)
    return Places(torch.stack([row.hidden[LAST].to("cpu", torch.float32) for row in rows]), torch.tensor(answer))


async def train_autodeco(
    model: Model,
    logits_of: Logits,
    texts: list[tuple[list[int], list[int]]],
    recipe: AutoDecoRecipe,
    folder: Path | None = None,
    advance: Advance = lambda *_: None,
) -> TrainedHeads:
    """Read worked answers, fit both heads on the sum of their losses, measure them on every eighth answer.

    Args:
        model: stays as it is.
        logits_of: its output matrix.
        texts: prompts and answers, token ids.
        recipe: the settings.
        folder: where an interrupted run continues; None: nowhere.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few texts, or `folder` holds another run.
    """
    texts = [text for text in texts if all(text)]
    if len(texts) < HELDOUT_ONE_IN:
        raise invalid("texts", f"has {len(texts)} answers; at least {HELDOUT_ONE_IN} are needed")
    claim(folder, {"kind": "autodeco", "model": model.digest, "recipe": asdict(recipe), "texts": texts})
    found: list[Places] = []
    for start in range(0, len(texts), AT_ONCE):
        found += await asyncio.gather(*(read_places(model, *text) for text in texts[start : start + AT_ONCE]))
        advance("reading", len(found), len(texts))
    train, unseen = (
        _joined([places for index, places in enumerate(found) if (index % HELDOUT_ONE_IN == 0) is held])
        for held in (False, True)
    )
    torch.manual_seed(recipe.schedule.seed)
    heads = SamplingHeads(train.states.shape[1], recipe.inner)

    def loss(picked: torch.Tensor) -> torch.Tensor:
        return loss_of(heads, logits_of, train, picked, recipe)

    def on_step(step: int, value: float) -> None:
        advance(f"training, loss {value:.3f}", step, recipe.schedule.steps)

    checkpoint = folder / "checkpoint.pt" if folder is not None else None
    schedule = replace(recipe.schedule, batch_size=min(recipe.schedule.batch_size, len(train)))
    losses = fit(heads, loss, len(train), schedule, checkpoint, on_step=on_step)
    heads = heads.requires_grad_(False).eval()
    report = {"places": len(train), "losses": losses, "heldout": measure(heads, logits_of, unseen, recipe.steepness)}
    artifact = Artifact(
        kind="autodeco",
        trainer="training.autodeco",
        settings={"head": heads.settings, "recipe": asdict(recipe), "heldout": report["heldout"]},
        models={"large": model.digest},
        tensors=dict(heads.state_dict()),
    )
    return TrainedHeads(artifact, report)


def loss_of(
    heads: SamplingHeads, logits_of: Logits, places: Places, picked: torch.Tensor, recipe: AutoDecoRecipe
) -> torch.Tensor:
    """Sum of both losses at the places with these indices, int64 [b]."""
    states, tokens = places.states[picked], places.tokens[picked]
    with torch.no_grad():
        logits = logits_of(states).float()
        # Which are left out follows from the batch, so that a run that is resumed leaves out the same ones.
        draw = torch.Generator().manual_seed(int((picked * 2654435761 % 1000003).sum()))
        easy = logits.argmax(-1) == tokens
        kept = ~(easy & (torch.rand(len(tokens), generator=draw) < recipe.dropped))
    temperature, top_p = heads(states, logits)
    both = top_p_loss(logits, tokens, temperature, top_p, recipe.steepness)
    return temperature_loss(logits, tokens, temperature, kept) + both


@torch.no_grad()
def measure(heads: SamplingHeads, logits_of: Logits, places: Places, steepness: float) -> dict[str, float]:
    """Losses of the heads at places, compared with those of temperature 1 with all tokens; and what the heads say."""
    total: dict[str, float] = {}
    for start in range(0, len(places), MEASURED_AT_ONCE):
        states, tokens = (part[start : start + MEASURED_AT_ONCE] for part in (places.states, places.tokens))
        logits = logits_of(states).float()
        temperature, top_p = heads(states, logits)
        every, ones = torch.ones(len(tokens), dtype=torch.bool), torch.ones_like(temperature)
        found = {
            "temperature_loss": temperature_loss(logits, tokens, temperature, every),
            "temperature_loss_at_1": temperature_loss(logits, tokens, ones, every),
            "top_p_loss": top_p_loss(logits, tokens, temperature, top_p, steepness),
            "top_p_loss_at_1": top_p_loss(logits, tokens, ones, ones, steepness),
            "mean_temperature": temperature.mean(),
            "mean_top_p": top_p.mean(),
        }
        for name, value in found.items():
            total[name] = total.get(name, 0.0) + float(value) * len(tokens) / len(places)
    return total


def _joined(parts: list[Places]) -> Places:
    return Places(torch.cat([part.states for part in parts]), torch.cat([part.tokens for part in parts]))
