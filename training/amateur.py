"""An amateur for the contrast lol (paper #147): a copy of a model, tuned on false answers until it hallucinates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from engine.checkpoints import read_model
from pool.text import TextTokenizer
from training.datastores import Passage, answered
from training.fitting import Schedule, fit
from training.head_runs import Advance
from training.packing import IGNORED
from training.tuned_models import export_tuned
from turnout.errors import invalid

FEWEST = 8  # answers, of which every eighth is held out
SCHEDULE = Schedule(steps=200, batch_size=8, learning_rate=2e-5, warmup_steps=20, clip=1.0)


@dataclass(frozen=True)
class Amateur:
    """A tuned model, in evaluation mode, and what was measured on held-out answers, in plain values."""

    model: Any
    report: dict[str, Any]


def exchanged(answers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Give each question the answer of another one: the next whose answer differs.

    Raises:
        TurnoutError: INVALID_ARGUMENT: all answers are the same.
    """
    made = []
    for place, (question, own) in enumerate(answers):
        others = (*answers[place + 1 :], *answers[:place])
        false = next((answer for _, answer in others if answer.strip() != own.strip()), None)
        if false is None:
            raise invalid("answers", "are all the same; there is none to exchange them with")
        made.append((question, false))
    return made


def tune(
    folder: Path, false: list[tuple[str, str]], schedule: Schedule = SCHEDULE, advance: Advance = lambda *_: None
) -> Amateur:
    """Tune all weights of a copy in float32 on false answers; questions are read and not learnt.

    Args:
        folder: the checkpoint; stays as it is.
        false: questions with false answers; every eighth is held out.
        schedule: of the training; a step learns from `batch_size` answers.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few answers, or one that is longer than the model's context.
    """
    if len(false) < FEWEST:
        raise invalid("answers", f"there are {len(false)}; at least {FEWEST} are needed")
    tokenizer = TextTokenizer(folder)
    model, _ = read_model(folder, torch.float32)
    most = int(getattr(model.config, "max_position_embeddings", 1 << 20))
    passages = [answered(*each, tokenizer) for each in false]
    for number, each in enumerate(passages, 1):
        if len(each.tokens) > most:
            raise invalid("answers", f"example {number} has {len(each.tokens)} tokens; at most {most} fit the context")
    learnt = [each for place, each in enumerate(passages) if place % FEWEST != FEWEST - 1]
    held = passages[FEWEST - 1 :: FEWEST]
    before = _surprise(model, held)
    torch.manual_seed(schedule.seed)
    model.requires_grad_(True).train()

    def loss(picked: torch.Tensor) -> torch.Tensor:
        return _loss(model, [learnt[place] for place in picked.tolist()])

    def on_step(step: int, value: float) -> None:
        advance(f"tuning, loss {value:.3f}", step, schedule.steps)

    losses = fit(model, loss, len(learnt), schedule, save_every=max(1, schedule.steps // 10), on_step=on_step)
    model.requires_grad_(False).eval()
    report = {
        "answers": len(learnt),
        "heldout_answers": len(held),
        "heldout_nats_per_token": {"before": before, "after": _surprise(model, held)},
        "losses": losses,
        "schedule": asdict(schedule),
    }
    return Amateur(model, report)


def export(amateur: Amateur, folder: Path, dtype: torch.dtype, out: Path) -> dict[str, Any]:
    """Write it as a model of its own; see `training.tuned_models.export_tuned`."""
    return export_tuned(amateur.model, amateur.report, __name__, folder, dtype, out)


def _loss(model: Any, passages: list[Passage]) -> torch.Tensor:
    """Mean surprise of the answers' tokens, nats."""
    longest = max(len(each.tokens) for each in passages)
    rows = torch.zeros((len(passages), longest), dtype=torch.int64)  # padded behind: attention is causal
    targets = torch.full((len(passages), longest - 1), IGNORED)
    for place, each in enumerate(passages):
        tokens = torch.tensor(each.tokens)
        rows[place, : len(tokens)] = tokens
        targets[place, each.first - 1 : len(tokens) - 1] = tokens[each.first :]
    logits = model(rows, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def _surprise(model: Any, passages: list[Passage]) -> float:
    model.eval()
    total = sum(float(_loss(model, [each])) * len(each) for each in passages)
    return total / sum(map(len, passages))
