"""Tuned copies of a checkpoint as Hugging Face folders of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from turnout.atomic_files import write_whole
from turnout.checkpoint_files import TEXT_FILES
from turnout.errors import invalid


def check_new(out: Path) -> None:
    """Refuse to write over something.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there is something at `out` already.
    """
    if out.exists():
        raise invalid("out", f"{out} exists; remove it or choose another name")


def export_tuned(
    model: Any, measured: dict[str, Any], trainer: str, folder: Path, dtype: torch.dtype, out: Path
) -> dict[str, Any]:
    """Write a Hugging Face folder with the tokenizer of `folder`, whole or not at all.

    Args:
        model: as transformers has it.
        measured: of it, in plain values.
        trainer: module that tuned it; its name is that of the report in the folder, `NAME.json`.
        folder: of the checkpoint that it was.
        dtype: of the weights there.
        out: where to.

    Returns:
        The report.

    Raises:
        TurnoutError: INVALID_ARGUMENT: there is something at `out` already.
        OSError: it cannot be written.
    """
    check_new(out)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        model.to(dtype).save_pretrained(part)
        for pattern in TEXT_FILES:
            for file in sorted(folder.glob(pattern)):
                if file.is_file() and not (part / file.name).exists():
                    shutil.copyfile(file, part / file.name)
        report = {"format": 1, "trainer": trainer, "model": folder.name, **measured}
        write_whole(part / f"{trainer.rpartition('.')[2]}.json", (json.dumps(report, indent=2) + "\n").encode())
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return report
