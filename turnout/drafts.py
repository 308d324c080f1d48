"""Draft models that `turnout train draft` made: which model each belongs to, and where it is found."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

from turnout.checkpoint_files import CONFIG, has_weights, weight_files
from turnout.errors import TurnoutError, invalid

ABOUT = "draft.json"  # in the draft's folder: for which target it was trained, and how
BLOCKS, BLOCK_BYTES = 64, 4096  # read of each weight file
# Settings that change when a checkpoint is saved again, and say nothing about what it computes.
_INCIDENTAL = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})


def target_identity(folder: Path, field: str = "model") -> str:
    """Return a digest of a checkpoint's configuration and weight files: 32 hexadecimal digits.

    Of each weight file its size and `BLOCKS` evenly spaced blocks count, the first and the last among them: it tells
    checkpoints apart within milliseconds, and is no proof against a change of single weights. A checkpoint saved in
    another precision is another one.

    Args:
        folder: of the checkpoint, or a file that holds all of it.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: it has no weights here, or they cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        if folder.is_dir():
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            kept = {key: value for key, value in settings.items() if key not in _INCIDENTAL}
            digest.update(json.dumps(kept, sort_keys=True).encode())
        for path in weight_files(folder, field) if folder.is_dir() else [folder]:
            _add(digest, path)
    except (OSError, ValueError) as error:
        raise invalid(field, f"cannot read {folder}: {error}") from None
    return digest.hexdigest()


def _add(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(f"{size} ".encode())
        last = max(0, size - BLOCK_BYTES)
        for start in sorted({last * index // (BLOCKS - 1) for index in range(BLOCKS)}):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))


def draft_place(identity: str) -> Path:
    """Return where the draft of a target is put and looked for: in `drafts_folder`, by the target's identity."""
    return drafts_folder() / identity


def drafts_folder() -> Path:
    """Return the folder of all drafts, in this user's cache.

    Raises:
        TurnoutError: INVALID_ARGUMENT: this user has no folder for caches.
    """
    with suppress(RuntimeError):
        folder = platformdirs.user_cache_path("turnout") / "drafts"
        if folder.is_absolute():
            return folder
    raise invalid("draft", "there is no folder for drafts: this user has no home; name the draft as the small model")


def register(folder: Path, identity: str) -> str:
    """Let `draft: auto` find a draft that lies elsewhere: a link in the place where it is looked for.

    Returns:
        Why it will not be found; empty: it will be.
    """
    place = draft_place(identity)
    if place == folder.absolute():
        return ""
    if place.exists() and not place.is_symlink():
        return f"draft: auto finds the draft in {place}, not this one; remove that folder to change it"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        link = place.with_name(f".{identity}.{os.getpid()}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(folder.absolute(), target_is_directory=True)
        link.replace(place)
    except OSError as error:
        return f"draft: auto will not find it: cannot write {place}: {error.strerror or error}"
    return ""


def find_draft(target: Path, field: str) -> tuple[Path | None, str]:
    """Look for the draft that was trained for a target.

    Args:
        target: the target's folder.
        field: where the configuration names it, for messages.

    Returns:
        The draft's folder; if there is none, None and the reason, with the remedy.
    """
    try:
        identity = target_identity(target, field)
        place = draft_place(identity)
    except TurnoutError as error:
        return None, f"no draft model is used: {error.message}"
    make = f"make one: turnout train draft --model {target}"
    if not (place / CONFIG).is_file() or not has_weights(place):
        return None, f"no draft model is used: none was trained for {field} ({place}); {make}"
    trained_for = target_of(place)
    if trained_for != identity:
        other = f"was trained for another model, {trained_for}" if trained_for else "does not say for which model"
        return None, f"no draft model is used: the draft in {place} {other}; {make}"
    return place.resolve(), ""


def layer_share(draft: Path, target: Path) -> float:
    """Return the draft's number of layers over the target's; 1 where their configurations name none."""
    try:
        found = [json.loads((folder / CONFIG).read_text(encoding="utf-8")) for folder in (draft, target)]
        # A model of text and images has the settings of its text side by themselves.
        ours, theirs = (values.get("text_config", values)["num_hidden_layers"] for values in found)
        return float(ours) / float(theirs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return 1.0


def target_of(folder: Path) -> str | None:
    """Return the identity of the target that a draft was trained for; None: the folder names none."""
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["target"]["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
