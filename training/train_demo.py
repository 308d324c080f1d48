"""Train one demo model from its recipe: `python -m training.train_demo --model large`."""

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from training.checkpoint import Checkpoint, Progress
from training.data import arithmetic, edits, passages, worksheets
from training.data.mixture import TrainingStream
from training.evaluation import complete, measure
from training.export_demo import DEMO_FOLDER, export_model
from training.model import batch_loss, build_model, exit_losses, layer_states
from training.optimiser import PairedOptimiser
from training.packing import IGNORED, Batch
from training.recipe import RECIPES, Recipe
from training.tokenizer import load_or_train
from turnout.model_location import DEMO_PREFIX

RUNS_FOLDER = Path(".runs")
_WATCH_PROBLEMS = 128
_WATCH_SEED = 1  # the final evaluation uses other seeds
_WATCH_SHEETS, _LONGEST_SHEET = 16, 800


class Trainer:
    """One run: steps forward, saves and restores itself exactly."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, stream: TrainingStream, compiled: bool = False
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.progress = Progress()
        self._stream = stream
        self.model = build_model(recipe, int(tokenizer.pad_token_id), int(tokenizer.eos_token_id))
        self._backbone = torch.compile(self.model.model, dynamic=False) if compiled else self.model.model
        self._layers = torch.compile(layer_states, dynamic=False) if compiled else layer_states
        self._optimiser = PairedOptimiser(self.model, recipe)

    def step(self) -> float:
        """Do the next optimiser step; returns its loss in nats per taught token, the exits' weighted mean."""
        started = time.monotonic()
        batch = self._stream.batch(self.progress.step)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step(self.recipe.lr_scale(self.progress.step))
        self.progress.step += 1
        self.progress.num_tokens += batch.num_tokens
        self.progress.num_taught_tokens += int((batch.targets != IGNORED).sum())
        self.progress.elapsed_s += time.monotonic() - started
        return float(loss.detach())

    def _loss(self, batch: Batch) -> torch.Tensor:
        recipe, step = self.recipe, self.progress.step
        if recipe.layer_skip is None:
            return batch_loss(self.model, batch, recipe.autocast, self._backbone)
        weights = recipe.layer_skip.weights(recipe.num_layers, step)
        kept = recipe.layer_skip.kept(recipe.num_layers, len(batch.token_ids), f"{recipe.seed}-layers-{step}")
        losses = exit_losses(self.model, batch, recipe.autocast, weights, torch.tensor(kept), self._layers)
        return torch.stack([weight * losses[layer] for layer, weight in weights.items()]).sum()

    @torch.no_grad()
    def exits(self) -> dict[str, float]:
        """Loss behind each layer, all of them run, on a batch that comes after the last step's."""
        batch = self._stream.batch(self.recipe.total_steps)
        losses = exit_losses(self.model, batch, self.recipe.autocast, range(1, self.recipe.num_layers + 1))
        return {f"loss_behind_{layer}": float(loss) for layer, loss in losses.items()}

    def watch(self, difficulties: tuple[int, ...] = (2, 3, 5)) -> dict[str, float]:
        """Held-out accuracy per grade, on problems apart from those of the final evaluation."""
        shares: dict[str, float] = {"step": self.progress.step, "minutes": self.progress.elapsed_s / 60}
        for difficulty in difficulties:
            problems = arithmetic.heldout(difficulty, _WATCH_PROBLEMS, seed=_WATCH_SEED)
            accuracy = measure(self.model, self.tokenizer, problems, arithmetic.is_correct)
            shares[f"arithmetic_{difficulty}"] = accuracy.share
        for kind in (edits, passages) if self.recipe.begins_from else ():
            problems = kind.heldout(arithmetic.MIDDLE_DIFFICULTY, _WATCH_PROBLEMS, seed=_WATCH_SEED)
            accuracy = measure(self.model, self.tokenizer, problems, kind.is_correct)
            shares[kind.__name__.rpartition(".")[2]] = accuracy.share
        if worksheets.__name__.rpartition(".")[2] in dict(self.recipe.shares.chats):
            shares["worksheets"] = self._worksheets()
        if self.recipe.layer_skip is not None:
            shares |= self.exits()
        self.progress.history.append(shares)
        return shares

    def _worksheets(self) -> float:
        """Part of the problems on held-out sheets that are right."""
        sheets = worksheets.heldout(arithmetic.MIDDLE_DIFFICULTY, _WATCH_SHEETS, seed=_WATCH_SEED)
        self.model.eval()
        texts = complete(self.model, self.tokenizer, sheets, _LONGEST_SHEET)
        self.model.train()
        return sum(map(worksheets.share_right, sheets, texts)) / len(sheets)

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        Checkpoint(self.model.state_dict(), self._optimiser.state_dict(), self.progress).save(path)

    def begin_from(self, path: Path) -> None:
        """Take over the weights of a finished run, and nothing else."""
        self.model.load_state_dict(Checkpoint.load(path).model)

    def begin_from_folder(self, folder: Path) -> None:
        """Take over the weights of a shipped model."""
        shipped = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model.load_state_dict(shipped.state_dict())

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint of the same recipe."""
        checkpoint = Checkpoint.load(path)
        self.model.load_state_dict(checkpoint.model)
        self._optimiser.load_state_dict(checkpoint.optimiser)
        self.progress = checkpoint.progress


class Reporter:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, total_steps: int) -> None:
        self._live = sys.stdout.isatty()
        self._total_steps = total_steps
        self._bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  middle grade {task.fields[middle]:.0%}"),
            disable=not self._live,
        )
        self._task = self._bar.add_task("training", total=total_steps, loss=0.0, middle=0.0)

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, progress: Progress, loss: float) -> None:
        """Show one step; without a terminal only every tenth."""
        self._bar.update(self._task, completed=progress.step, loss=loss)
        if not self._live and progress.step % 10 == 0:
            rate = progress.num_tokens / max(progress.elapsed_s, 1e-9)
            typer.echo(
                f"{time.strftime('%H:%M:%S')} step {progress.step}/{self._total_steps} loss {loss:.4f} "
                f"tokens {progress.num_tokens} tokens/s {rate:.0f}"
            )

    def accuracy(self, shares: dict[str, float]) -> None:
        """Show held-out accuracy."""
        self._bar.update(self._task, middle=shares[f"arithmetic_{arithmetic.MIDDLE_DIFFICULTY}"])
        if not self._live:
            typer.echo("held out: " + "  ".join(f"{name} {value:.3f}" for name, value in shares.items()))


def train(
    model: Annotated[str, typer.Option(help=f"Which recipe: {', '.join(RECIPES)}.")],
    threads: Annotated[int, typer.Option(min=1, help="Processor threads.")] = 2,
    runs: Annotated[Path, typer.Option(help="Folder of checkpoints and logs.")] = RUNS_FOLDER,
    compiled: Annotated[bool, typer.Option(help="Compile the forward pass (needs a C++ compiler).")] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    watch_every: Annotated[int, typer.Option(min=1, help="Steps between looks at held-out accuracy.")] = 200,
    export: Annotated[
        Path | None, typer.Option(help="Folder that the finished model is written to; absent: it is not.")
    ] = None,
) -> None:
    """Train to the end of the recipe, continuing from the last checkpoint when there is one."""
    if model not in RECIPES:
        raise typer.BadParameter(f"--model must be one of {', '.join(RECIPES)}, got {model}")
    torch.set_num_threads(threads)
    recipe = RECIPES[model]
    shipped = DEMO_FOLDER / recipe.begins_from.removeprefix(DEMO_PREFIX)
    from_shipped = recipe.begins_from.startswith(DEMO_PREFIX)
    tokenizer = load_or_train(shipped if from_shipped else runs / "tokenizer")
    trainer = Trainer(recipe, tokenizer, TrainingStream(recipe, tokenizer), compiled)
    path = runs / model / "checkpoint.pt"
    if path.exists():
        trainer.restore(path)
    elif from_shipped:
        trainer.begin_from_folder(shipped)
    elif recipe.begins_from:
        base = runs / recipe.begins_from / "checkpoint.pt"
        if not base.exists():
            raise typer.BadParameter(f"--model {model} begins from {recipe.begins_from}: train that first")
        trainer.begin_from(base)
    with Reporter(recipe.total_steps) as reporter:
        while trainer.progress.step < recipe.total_steps:
            loss = trainer.step()
            step = trainer.progress.step
            reporter.step(trainer.progress, loss)
            last = step == recipe.total_steps
            if last or step % watch_every == 0:
                reporter.accuracy(trainer.watch())
            if last or step % save_every == 0:
                trainer.save(path)
    if export is not None:
        export_model(recipe, Checkpoint.load(path), tokenizer, export)


if __name__ == "__main__":
    typer.run(train)
