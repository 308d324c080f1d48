"""A training run of a draft head, from prompts to an artifact and a report of what it brings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import SUFFIX, Artifact, Artifacts
from decoding.model import ModelPool, Request
from engine.checkpoints import read_model
from engine.device import Device
from engine.loading import load_checkpoint
from engine.model import EngineModel
from pool.local_pool import DTYPES
from pool.text import TextTokenizer
from training.demo_prompts import Prompt, heldout_prompts, read_lines, training_prompts
from training.distil import Answers, distil
from training.fitting import Schedule, fit
from training.heads import Frozen, Recipe
from training.length_data import Source
from training.length_predictors import claim
from turnout.checkpoint_files import check_checkpoint
from turnout.config import EngineConfig, ModelConfig, model_path
from turnout.cost import SpeculationMeter
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import get_method
from turnout.types import SamplingParams

Advance = Callable[[str, int, int], None]  # what is being done, how much of it, out of how much

ROLE = "large"  # draft heads run with the model that verifies


@dataclass(frozen=True)
class Target:
    """The model a head is trained for.

    Attributes:
        model: answers, and stays as it is.
        tokenizer: its own.
        folder: its checkpoint.
    """

    model: EngineModel
    tokenizer: TextTokenizer
    folder: Path

    @classmethod
    def load(cls, settings: ModelConfig, engine: EngineConfig) -> Target:
        """Load a configured model.

        Raises:
            TurnoutError: an unsupported architecture.
        """
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        folder, device = model_path(settings), Device(settings.device)
        check_checkpoint(folder, "model")
        dtype = DTYPES[settings.dtype]
        checkpoint = load_checkpoint(folder, dtype, device.torch_device, engine.kernels, weights=settings.weights)
        return cls(EngineModel(ROLE, checkpoint, settings, engine, device), TextTokenizer(folder), folder)

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Raw logits of states after the last norm, [n, width]: float32 [n, vocab], on the CPU."""
        plan = self.model.batcher.runner.plan
        return plan.logits(states.to(plan.device, plan.dtype)).to("cpu", torch.float32)

    async def close(self) -> None:
        """Give back what it holds."""
        await self.model.close()
        self.model.batcher.device.close()

    def source(self, prompts: list[Prompt], sampling: SamplingParams, seed: int) -> Source:
        """What is asked, for this model."""
        ids = [prompt.encode(self.tokenizer) for prompt in prompts]
        return Source(ids, sampling, frozenset(self.tokenizer.eos_ids), seed)


@dataclass(frozen=True)
class Questions:
    """What the model is asked: to train on, and apart from it to measure on."""

    training: list[Prompt]
    heldout: list[Prompt]

    @classmethod
    def of_file(cls, path: Path, count: int) -> Questions:
        """Lines of a text file; every eighth is held out.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it has fewer than eight.
        """
        found = read_lines(path, count)
        if len(found) < 8:
            raise invalid("prompts", f"has {len(found)} lines; at least 8 are needed")
        return cls([prompt for index, prompt in enumerate(found) if index % 8 != 7], found[7::8])

    @classmethod
    def of_demo(cls, count: int, heldout: int = 120) -> Questions:
        """Texts of the kinds the demo models were taught; the held-out ones are from their held-out splits."""
        return cls(training_prompts(count, f"draft-heads-{count}"), heldout_prompts(heldout))


@dataclass(frozen=True)
class Plan:
    """All that a run's outcome follows from, besides the model.

    Attributes:
        recipe: the head.
        schedule: of the training.
        questions: asked of the model.
        sampling: how the model answers them.
    """

    recipe: Recipe
    schedule: Schedule
    questions: Questions
    sampling: SamplingParams

    @property
    def settings(self) -> dict[str, Any]:
        """The plan in plain values, the questions as a digest."""
        return {
            "recipe": asdict(self.recipe),
            "schedule": asdict(self.schedule),
            "questions": hashlib.blake2b(json.dumps(asdict(self.questions)).encode(), digest_size=16).hexdigest(),
            "sampling": self.sampling.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class Trained:
    """A head ready to be saved, and what was measured on held-out prompts, in plain values."""

    artifact: Artifact
    report: dict[str, Any]


async def train_head(target: Target, plan: Plan, folder: Path, advance: Advance = lambda *_: None) -> Trained:
    """Let the model answer, fit the head, and decode held-out prompts with it.

    Args:
        target: the model.
        plan: what to do.
        folder: state from which an interrupted run continues.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder belongs to a run with another plan.
    """
    claim(folder, {"kind": plan.recipe.kind, "model": target.model.digest, **plan.settings})
    seed = plan.schedule.seed
    source = target.source(plan.questions.training, plan.sampling, seed)
    heldout = target.source(plan.questions.heldout, plan.sampling, seed + 1)
    answers = await _answers(target, plan, source, folder, "answering", advance)
    unseen = await _answers(target, plan, heldout, folder, "answering held-out prompts", advance)
    plain, _ = read_model(target.folder, torch.float32)
    torch.manual_seed(seed)
    task = plan.recipe.task(Frozen.of(plain), answers.states.shape[1])
    steps = plan.schedule.steps

    def on_step(step: int, loss: float) -> None:
        advance(f"training, loss {loss:.3f}", step, steps)

    lessons = task.lessons(answers)
    losses = fit(task.head, lessons.loss, len(lessons), plan.schedule, folder / "checkpoint.pt", on_step=on_step)
    accuracies = task.lessons(unseen).accuracies()
    artifact = Artifact(
        kind=plan.recipe.kind,
        trainer="training.head_runs",
        settings={"head": task.head.settings, "accuracies": accuracies, **task.settings(), **plan.settings},
        models={ROLE: target.model.digest},
        tensors={name: each.half() for name, each in task.head.state_dict().items()},
    )
    measured = folder / f"measured{SUFFIX}"
    artifact.save(measured)
    drafts = await measure_rounds(target, heldout, plan.recipe.kind, measured)
    report = {
        "examples": len(lessons),
        "losses": losses,
        "rank_accuracies": accuracies,
        "tokens_per_round": drafts.tokens_per_round,
        "acceptance_by_depth": drafts.acceptance,
        "nodes_per_round": drafts.draft_tokens / drafts.rounds,
    }
    return Trained(artifact, report)


async def _answers(target: Target, plan: Plan, source: Source, folder: Path, what: str, advance: Advance) -> Answers:
    def report(done: int, total: int) -> None:
        advance(what, done, total)

    layer = plan.recipe.exit_layer(target.model.num_layers)
    return await distil(target.model, source, plan.recipe.soft_top, folder / "answers", layer, report)


async def measure_rounds(target: Target, source: Source, kind: str, artifact: Path, **params: Any) -> SpeculationMeter:
    """Answer prompts by speculation with a head's drafts, and count.

    Args:
        target: drafts and verifies.
        source: the prompts; sampled and verified by match.
        kind: name of the drafter.
        artifact: its head.
        params: further parameters of the drafter.
    """
    models = ModelPool({ROLE: target.model}, {"small": ROLE, ROLE: ROLE}, target.tokenizer, Artifacts(artifact.parent))
    method = get_method("speculative")
    drafter = PartChoice.of(kind, artifact=artifact.stem, **params)
    parsed = method.parse({"drafter": drafter.model_dump(), "length": "fixed"})
    total = SpeculationMeter()
    for index in range(len(source.prompts)):
        seq = source.sequence(index)
        try:
            async with aclosing(method.run(Request(f"{kind} {index}", seq), models, parsed)) as segments:  # type: ignore[type-var]
                async for _ in segments:
                    pass
        finally:
            target.model.release(seq)
        total.merge(seq.meter.speculation)
    return total
