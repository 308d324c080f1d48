"""Put the trained models where Turnout ships them: `python -m training.export_demo`."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedTokenizerFast

from training.checkpoint import Checkpoint, Progress
from training.model import build_model
from training.recipe import LARGE, RECIPES, SHIPPED, WORKSHEETS, Recipe
from training.tokenizer import load_or_train

DEMO_FOLDER = Path("turnout/demo")
TRAINING_FACTS = "training.json"
_WEIGHTS_SUFFIX = ".safetensors"


def replace_files(source: Path, target: Path) -> None:
    """Move every file of `source` over its namesake in `target`, one rename each, weights last.

    A reader that opens a file during the change gets the whole old or the whole new file.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda item: item.suffix == _WEIGHTS_SUFFIX):
        path.chmod(0o644)
        path.replace(target / path.name)


def export_model(recipe: Recipe, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Write the model (bfloat16 weights) and its tokenizer to `target`."""
    model = build_model(recipe, int(tokenizer.pad_token_id), int(tokenizer.eos_token_id))
    model.load_state_dict(checkpoint.model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        replace_files(Path(folder), target)


def training_facts(recipe: Recipe, progress: Progress, num_parameters: int) -> dict[str, Any]:
    """What was done, for the model card."""
    return {
        "recipe": asdict(recipe),
        "num_parameters": num_parameters,
        "num_steps": progress.step,
        "num_tokens": progress.num_tokens,
        "num_taught_tokens": progress.num_taught_tokens,
        "minutes": round(progress.elapsed_s / 60, 1),
        "history": progress.history,
    }


def write_json(path: Path, content: object) -> None:
    """Replace the file at `path` in one rename."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


def export(
    runs: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = Path(".runs"),
    demo: Annotated[Path, typer.Option(help="Folder the models are shipped in.")] = DEMO_FOLDER,
    large: Annotated[str, typer.Option(help=f"Whose model is shipped as the large one: {', '.join(LARGE)}.")] = "large",
) -> None:
    """Export the shipped models that have a checkpoint, finished or not, and the facts of their runs."""
    if large not in LARGE:
        raise typer.BadParameter(f"--large must be one of {', '.join(LARGE)}, got {large}")
    tokenizer = load_or_train(runs / "tokenizer")
    facts: dict[str, Any] = {}
    others = {recipe.name for recipe in WORKSHEETS} | {*LARGE}
    courses = {name: recipe for name, recipe in RECIPES.items() if name not in others} | {"large": RECIPES[large]}
    for name, recipe in courses.items():
        path = runs / recipe.name / "checkpoint.pt"
        if not path.exists():
            typer.echo(f"{name}: no checkpoint, left out")
            continue
        checkpoint = Checkpoint.load(path)
        if name in SHIPPED:
            export_model(recipe, checkpoint, tokenizer, demo / name)
        # The output layer is tied, and a state dict lists the shared matrix twice.
        num_parameters = sum(tensor.numel() for key, tensor in checkpoint.model.items() if key != "lm_head.weight")
        facts[name] = training_facts(recipe, checkpoint.progress, num_parameters)
        typer.echo(f"{name}: {num_parameters} parameters, step {checkpoint.progress.step}/{recipe.total_steps}")
    write_json(demo / TRAINING_FACTS, facts)


if __name__ == "__main__":
    typer.run(export)
