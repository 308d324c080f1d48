"""Choice of the target's layers that a student keeps: backward elimination by distillation KL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from training.draft.answers import TargetAnswers
from training.draft.lessons import LessonBatch, batches_of
from training.draft.student import Student, layer_list

SHORTLIST = 3  # layers whose removal is tried at each step: those that change the hidden states least
CALIBRATION_TOKENS = 256


@torch.inference_mode()
def eliminate_layers(
    student: Student, answers: TargetAnswers, least: int, advance: Callable[[int, int], None] = lambda done, total: None
) -> list[dict[str, Any]]:
    """Remove layer after layer from a copy of the target, the one each time without which it stays closest to itself.

    A step tries the `SHORTLIST` layers with the highest cosine similarity between the states before and behind them,
    and removes the one with the least KL divergence (target from student, over the kept ids, at the places of the
    answers).

    Args:
        student: the target itself as a student of all its layers; it has them all again afterwards.
        answers: calibration text; about `CALIBRATION_TOKENS` of it are read.
        least: layers that remain at the end.
        advance: called with the layers removed and those to remove.

    Returns:
        For each step: `layers` that remain, `removed`, `kl` in nats per place, and `similarity` of the removed one.
    """
    batch = calibration_batch(answers)
    name, layers = layer_list(student.model)
    remaining, steps = list(range(len(layers))), list[dict[str, Any]]()
    reference = _logprobs(student, batch)
    while len(remaining) > max(1, least):
        similar = _similarities(student, name, layers, remaining, batch)
        shortlist = sorted(remaining, key=lambda layer: -similar[layer])[:SHORTLIST]
        tried = {}
        for layer in shortlist:
            rest = [each for each in remaining if each != layer]
            with _only(student.model, name, layers, rest):
                found = _logprobs(student, batch)
            tried[layer] = float((reference.exp() * (reference - found)).sum(-1).mean())
        worst = min(tried, key=lambda layer: (tried[layer], layer))
        remaining = [each for each in remaining if each != worst]
        step = {"layers": remaining, "removed": worst, "kl": tried[worst], "similarity": similar[worst]}
        steps.append(step)
        advance(len(steps), len(layers) - max(1, least))
    return steps


def calibration_batch(answers: TargetAnswers) -> LessonBatch:
    """The first batch, in order of length, that holds about `CALIBRATION_TOKENS` tokens of typical answers."""
    batches = batches_of(answers, CALIBRATION_TOKENS)
    return batches[len(batches) // 2]


def _logprobs(student: Student, batch: LessonBatch) -> torch.Tensor:
    states = student.states(batch.rows).flatten(0, 1)[batch.places]
    return student.logits(states).log_softmax(-1)


def _similarities(
    student: Student, name: str, layers: nn.ModuleList, remaining: list[int], batch: LessonBatch
) -> dict[int, float]:
    """Mean cosine similarity of the states before and behind each layer, read in one forward."""
    found: dict[int, float] = {}

    def watch(layer: int) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            before = given[0] if given else named["hidden_states"]
            behind = output[0] if isinstance(output, tuple) else output
            found[layer] = float(nn.functional.cosine_similarity(before.float(), behind.float(), dim=-1).mean())

        return layers[layer].register_forward_hook(hook, with_kwargs=True)

    hooks = [watch(layer) for layer in remaining]
    try:
        with _only(student.model, name, layers, remaining):
            student.states(batch.rows)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _only(model: Any, name: str, layers: nn.ModuleList, chosen: list[int]) -> Iterator[None]:
    """Let a model run some of its layers."""
    parent, _, attribute = name.rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, attribute, nn.ModuleList([layers[layer] for layer in chosen]))
    try:
        yield
    finally:
        setattr(holder, attribute, layers)
