"""A run that makes a draft model: answers, shape, training, vocabulary, measurements; it continues where it ended."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from decoding.vocabulary import SubVocabulary
from engine.checkpoints import read_model
from training.checkpoint import Checkpoint
from training.draft.answers import TargetAnswers, collect
from training.draft.layers import eliminate_layers
from training.draft.lessons import SoftLoss
from training.draft.measure import Acceptance, DraftEngine, forward_seconds
from training.draft.plan import HELDOUT_TOKENS, DraftPlan, Shares, text_rows
from training.draft.shapes import candidate_depths, judged, predicted_speedup
from training.draft.student import Student, cut
from training.draft.vocabulary import Sizes, frequency_order, kept_ids, mbsu, sweep
from training.fitting import fit
from training.head_runs import Advance, Target
from training.length_predictors import claim
from turnout.atomic_files import write_whole
from turnout.config import EngineConfig
from turnout.errors import invalid

SAVE_EVERY = 50  # steps
WALL_CLOCK_PROMPTS = 6


@dataclass(frozen=True)
class TrainedDraft:
    """A finished draft model and what was measured of it, in plain values."""

    model: Any
    vocabulary: SubVocabulary
    report: dict[str, Any]


class DraftRun:
    """One run of `train_draft`.

    Args:
        target: the model that the draft is for, as it is served.
        plan: what to do.
        engine: settings of the engine.
        folder: state from which an interrupted run continues.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder belongs to another run.
    """

    def __init__(
        self, target: Target, plan: DraftPlan, engine: EngineConfig, folder: Path, advance: Advance = lambda *_: None
    ) -> None:
        self._target, self._plan, self._engine = target, plan, engine
        self._folder, self._advance, self._shares = folder, advance, Shares()
        claim(folder, {"kind": "draft", "model": target.model.digest, **plan.settings})
        greedy = plan.sampling(0.0, min(plan.max_tokens, HELDOUT_TOKENS))
        self._heldout = target.source(plan.questions.heldout, greedy, plan.seed + 1)

    async def run(self) -> TrainedDraft:
        """Make the draft model, or continue to.

        Raises:
            TurnoutError: INVALID_ARGUMENT: a learning rate too high, more layers than the target has, a bad text.
        """
        plan = self._plan
        answers, unseen = await self._answers()
        plain, _ = read_model(self._target.folder, torch.float32)
        sizes, vocab, count = Sizes.of(plain), plain.config.vocab_size, plain.config.num_hidden_layers
        if plan.layers is not None and plan.layers > count:
            raise invalid("layers", f"must be at most {count}, the target's, got {plan.layers}")
        text = None if plan.text is None else text_rows(plan.text, self._target.tokenizer)
        counted = text if text is not None and plan.count_text else answers
        order = frequency_order(counted, vocab, frozenset(self._target.tokenizer.eos_ids))
        kept = kept_ids(order, min(plan.trained_ids, vocab))
        steps = self._eliminate(plain, kept, answers)
        shapes = await self._shapes(plain, sizes, kept, steps, answers, unseen)
        layers = max(shapes, key=lambda shape: shape["predicted_speedup"])["layers"]
        student = Student(cut(plain, layers), kept, plan.autocast)
        del plain
        stages = [{"stage": "initial", "steps": 0, **await self._measured("initial", student, kept)}]
        if text is not None:
            stages.append(await self._train("text", student, text, self._shares.text, hard=1.0))
        share = self._shares.distillation + (self._shares.text if text is None else 0.0)
        stages.append(await self._train("distillation", student, answers, share, plan.hard))
        report = {"layers": layers, "shapes": shapes, "elimination": steps, "stages": stages}
        report["answers"] = {
            "answers": len(answers),
            "tokens": len(answers.tokens),
            "heldout_tokens": len(unseen.tokens),
            "seconds": float(answers.seconds.sum()),
        }
        final = await self._finish(student, order, sizes, unseen)
        return TrainedDraft(student.model, final[0], {**report, **final[1]})

    async def _answers(self) -> tuple[TargetAnswers, TargetAnswers]:
        """To train on, and held out."""
        plan, target = self._plan, self._target
        limit = plan.seconds(self._shares.answers)
        heldout = await collect(target.model, [self._heldout], self._folder / "heldout")
        sources = [
            target.source(plan.questions.training, plan.sampling(temperature, plan.max_tokens), plan.seed + 2 + index)
            for index, temperature in enumerate(plan.temperatures)
        ]
        asked = len(plan.temperatures) * len(plan.questions.training)

        def report(answered: int, tokens: int, spent: float) -> None:
            done, total = (answered, asked) if limit is None else (int(min(spent, limit)), int(limit))
            self._advance(f"answering, {tokens} tokens", done, max(1, total))

        return await collect(target.model, sources, self._folder / "answers", limit, report), heldout

    def _eliminate(self, plain: Any, kept: torch.Tensor, answers: TargetAnswers) -> list[dict[str, Any]]:
        """The layers that remain at every number of layers down to the least that is asked for or tried."""
        count = plain.config.num_hidden_layers
        least = self._plan.layers or candidate_depths(count)[0]
        path = self._folder / "elimination.json"
        if path.exists():
            found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            return found
        whole = Student(plain, kept, self._plan.autocast)
        steps = eliminate_layers(
            whole, answers, least, lambda done, total: self._advance("choosing layers", done, total)
        )
        write_whole(path, json.dumps(steps).encode())
        return steps

    async def _shapes(
        self,
        plain: Any,
        sizes: Sizes,
        kept: torch.Tensor,
        steps: list[dict[str, Any]],
        answers: TargetAnswers,
        unseen: TargetAnswers,
    ) -> list[dict[str, Any]]:
        """The candidates with measured latency, bytes, and acceptance after a short training."""
        count = plain.config.num_hidden_layers
        depths = candidate_depths(count) if self._plan.layers is None else [self._plan.layers]
        sets = {len(step["layers"]): step["layers"] for step in steps} | {count: list(range(count))}
        rows = []
        for index, number in enumerate(depths):

            async def judge(number: int = number) -> dict[str, Any]:
                student = Student(cut(plain, sets[number]), kept, self._plan.autocast)
                trial = len(depths) > 1
                if trial:
                    loss = SoftLoss(student, answers, self._plan.batch_tokens, self._plan.hard)
                    schedule = self._plan.schedule(self._shares.shapes / len(depths), trial=True)
                    fit(student.trained, loss, len(loss), schedule)
                return await self._judge(student, kept, sizes, unseen) | {"layers": sets[number], "trial": trial}

            rows.append(await self._once(f"shape-{number}", judge))
            self._advance("trying shapes", index + 1, len(depths))
        return rows

    async def _judge(self, student: Student, kept: torch.Tensor, sizes: Sizes, unseen: TargetAnswers) -> dict[str, Any]:
        depth, target = self._plan.depth, self._target.model
        tau = judged(student, unseen, depth)
        draft = DraftEngine(self._target, student.model, kept, self._engine)
        try:
            row_s = await draft.row_seconds(depth)
        finally:
            await draft.close()
        one_s, chain_s = await forward_seconds(target, 1), await forward_seconds(target, depth + 1)
        cost = Sizes.of(student.model).read(len(kept)) / sizes.read()
        return {
            "tau": tau,
            "row_s": row_s,
            "target_row_s": one_s,
            "target_chain_s": chain_s,
            "c": cost,
            "mbsu": mbsu(tau, depth, cost),
            "predicted_speedup": predicted_speedup(tau, depth, row_s, one_s, chain_s),
        }

    async def _train(
        self, stage: str, student: Student, answers: TargetAnswers, share: float, hard: float
    ) -> dict[str, Any]:
        """One stage of training, then its acceptance in the engine."""
        plan, checkpoint = self._plan, self._folder / f"{stage}.pt"
        loss, schedule = SoftLoss(student, answers, plan.batch_tokens, hard), plan.schedule(share)
        total = plan.steps or int(60 * plan.minutes * share)
        spent = Checkpoint.load(checkpoint).progress.elapsed_s if checkpoint.exists() else 0.0
        began = perf_counter() - spent

        def on_step(step: int, value: float) -> None:
            done = step if plan.steps is not None else min(total, int(perf_counter() - began))
            self._advance(f"{stage}, loss {value:.3f}, step {step}", done, max(1, total))

        losses = fit(student.trained, loss, len(loss), schedule, checkpoint, SAVE_EVERY, on_step)
        student.model.eval()
        progress = Checkpoint.load(checkpoint).progress
        about = {
            "stage": stage,
            "steps": progress.step,
            "seconds": progress.elapsed_s,
            "passes": progress.step / max(1, len(loss)),
            "losses": losses,
        }
        return {**about, **await self._measured(stage, student, student.kept)}

    async def _measured(self, name: str, student: Student, kept: torch.Tensor) -> dict[str, Any]:
        """Acceptance on held-out prompts under the engine's verifier."""

        async def measure() -> dict[str, Any]:
            self._advance(f"measuring {name}", 0, 1)
            draft = DraftEngine(self._target, student.model, kept, self._engine)
            try:
                return asdict(await draft.acceptance(self._heldout, self._plan.depth))
            finally:
                await draft.close()
                self._advance(f"measuring {name}", 1, 1)

        found: dict[str, Any] = await self._once(f"acceptance-{name}", measure)
        return found

    async def _finish(
        self, student: Student, order: torch.Tensor, sizes: Sizes, unseen: TargetAnswers
    ) -> tuple[SubVocabulary, dict[str, Any]]:
        """The head's ids, and the finished draft's acceptance, bytes and wall clock."""
        depth = self._plan.depth

        async def choose() -> list[dict[str, float]]:
            return sweep(student, unseen, order, depth, sizes)

        table = await self._once("vocabulary", choose)
        best = max(range(len(table)), key=lambda index: table[index]["mbsu"])
        kept = kept_ids(order, int(table[best]["ids"]))
        found = Acceptance(**await self._measured("finished", student, kept))

        async def race() -> dict[str, float]:
            draft = DraftEngine(self._target, student.model, kept, self._engine)
            try:
                return await draft.wall_clock(self._heldout, depth, WALL_CLOCK_PROMPTS)
            finally:
                await draft.close()

        speeds = await self._once("wall-clock", race)
        draft_bytes, target_bytes = (
            self._target.model.dtype.itemsize * weights
            for weights in (Sizes.of(student.model).read(len(kept)), sizes.read())
        )
        cost, tau = draft_bytes / target_bytes, 1 + found.accepted
        return SubVocabulary(kept), {
            "vocabulary": {"sweep": table, "ids": len(kept), "interior": 0 < best < len(table) - 1},
            "depth": depth,
            "accepted": found.accepted,
            "acceptance_by_depth": found.by_depth,
            "tau": tau,
            "bytes_read": {"draft": draft_bytes, "target": target_bytes},
            "c": cost,
            "mbsu": mbsu(tau, depth, cost),
            "tokens_per_second": speeds,
        }

    async def _once(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a step in plain values: kept, so that it is not made again."""
        path = self._folder / f"{name}.json"
        if not path.exists():
            write_whole(path, json.dumps(await make()).encode())
        return json.loads(path.read_text(encoding="utf-8"))


async def train_draft(
    target: Target, plan: DraftPlan, engine: EngineConfig, folder: Path, advance: Advance = lambda *_: None
) -> TrainedDraft:
    """Make a draft model for a target (paper #161, FastDraft); see `DraftRun`."""
    return await DraftRun(target, plan, engine, folder, advance).run()
