"""Checkpoint folders that the checks of a configuration accept; their weights are not all there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from training.random_models import byte_tokenizer, llama_config


def write_checkpoint(folder: Path, **fields: Any) -> Path:
    """A Llama's configuration and tokenizer, and a weight file of no tensors.

    Args:
        folder: made where it is missing.
        fields: of config.json, in place of the usual ones; None: left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save_pretrained(folder)
    llama_config().save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    file = folder / "config.json"
    values = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder
