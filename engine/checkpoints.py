"""What transformers reads from a checkpoint folder, each fault as one line that names the model's field."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from engine.architectures import listed
from engine.loaded_model import check_supported
from engine.quantized import format_of
from engine.quantized.loading import made_weights
from engine.text_side import RENAMED, check_wrapper, is_wrapper, note_of, text_side
from engine.twin import check_twin
from engine.unlisted import check_kind
from turnout.checkpoint_files import QUANTIZED_FIELDS, read_config_file
from turnout.errors import TurnoutError, invalid

LONGEST = 300  # characters of a library's message
GENERATION = "generation_config.json"
SHOWN = 3  # names of tensors in a message


@contextmanager
def reading(folder: Path, field: str) -> Iterator[None]:
    """Say in one line what a library raises while it reads a checkpoint.

    Args:
        folder: the checkpoint.
        field: its place in the configuration.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, in place of any other error but a lack of memory.
    """
    try:
        yield
    except (TurnoutError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:LONGEST]
        raise invalid(field, f"{folder} cannot be read: {type(error).__name__}: {said}") from None


def read_config(folder: Path, field: str = "model") -> Any:
    """The Hugging Face configuration of a checkpoint that can be run; of a wrapper, its text side's.

    Args:
        folder: the checkpoint.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: config.json cannot be read, or says what is not supported.
    """
    values = read_config_file(folder, field)
    kind = values.get("model_type")
    wrapper = is_wrapper(values)
    _check_code(folder, kind, values.get("auto_map"), field)
    if not wrapper:
        check_kind(kind, field)
    format_of(folder, field)
    with reading(folder, field):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = text_side(config) if wrapper else config
    for key in QUANTIZED_FIELDS:  # from here on it is a model of plain weights
        if hasattr(config, key):
            delattr(config, key)
    check_supported(config, field)
    if wrapper:
        check_wrapper(kind, field)
    check_twin(config, field)
    return config


def _check_code(folder: Path, kind: Any, auto_map: Any, field: str) -> None:
    """Refuse a model whose code comes with it, unless it is named as transformers' own, as Phi-3's is."""
    code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if code is not None and str(code).rpartition(".")[2] != known:
        supported = f"{known} for {kind!r}" if known else ", ".join(listed())
        message = f"config.json: auto_map: code of a checkpoint ({code}) is never run; supported: {supported}"
        raise invalid(field, f"{folder}: {message}")


def read_model(folder: Path, dtype: torch.dtype, field: str = "model", **options: Any) -> tuple[Any, list[str]]:
    """The model of a checkpoint, and what the person who runs it should know of how it was loaded.

    Args:
        folder: of a configuration that `read_config` accepts.
        dtype: of its weights from now on.
        field: its place in the configuration, for messages.
        options: further arguments of `from_pretrained`.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a weight is missing or has another shape.
        Exception: transformers cannot read the files; see `reading`. Where ranks load together it may be a lost rank.
    """
    transformers_logging.disable_progress_bar()
    values = read_config_file(folder, field)
    options |= {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # what follows names them
    if is_wrapper(values):
        options |= {"config": read_config(folder, field), "key_mapping": dict(RENAMED)}
    with _without_report(), made_weights(folder, dtype, field) as weights:
        if weights is None:
            model, found = AutoModelForCausalLM.from_pretrained(folder, **options)
        else:
            options.setdefault("config", read_config(folder, field))
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
            model, found = kind.from_pretrained(None, state_dict=weights, **options)
            if (folder / GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    # transformers would fill these with random numbers.
    if missing := sorted(found["missing_keys"]):
        raise invalid(field, f"{folder}: its weight files lack {_some(missing)}")
    if other := sorted(f"{name} {list(got)} (not {list(needed)})" for name, got, needed in found["mismatched_keys"]):
        raise invalid(field, f"{folder}: weights of shapes that config.json does not give: {_some(other)}")
    kind = format_of(folder, field)
    notes = [f"{folder}: {note}" for note in (kind.notes if kind is not None else ())]
    unused = sorted(found["unexpected_keys"])
    if is_wrapper(values):
        notes.insert(0, f"{folder}: {note_of(values['model_type'], unused)}")
    elif unused:
        notes.append(f"{folder}: unknown to this architecture and not used: {_some(unused)}")
    return model, notes


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep back the table that transformers logs of what did not fit, which the refusal says in one line.

    Only the caller's own records are held back: several loads may overlap.
    """
    before = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(before)


_quiet: ContextVar[bool] = ContextVar("_quiet", default=False)


def _may_pass(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not _quiet.get()


# On the logger that writes the table, so that it holds for any handler.
transformers_logging.get_logger("transformers.modeling_utils").addFilter(_may_pass)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
    return ", ".join(names[:SHOWN]) + more
