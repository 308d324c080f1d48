"""What codecs know of a model before they see a chunk: statistics of its keys and values, read from artifacts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.artifacts import SUFFIX, Artifact
from kvstore.base import ChunkShape
from turnout.errors import Code, TurnoutError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

COMMAND = "turnout train kv-codecs"
FAMILIES = ("adaquant", "cachegen")  # of codecs; each one's artifact has its name, and is of the kind `kv-` with it
VERSION_BYTES = 6


@dataclass(frozen=True, slots=True)
class Profile:
    """Statistics of one model's keys and values.

    Attributes:
        version: 6 bytes that name the content: what was encoded with one profile is not decoded with another.
        settings: what was written down besides the tensors.
        tensors: by name; the first dimension of each is the model's layers.
    """

    version: bytes
    settings: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def layers(self) -> int:
        """Of the model."""
        return min(len(tensor) for tensor in self.tensors.values())


def read_profiles(folder: Path | None, digest: str) -> dict[str, Profile]:
    """Return the profiles of one model that lie in a folder of artifacts, by codec family.

    Args:
        folder: of the pool's artifacts; None: there are none.
        digest: of the model.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a file is unreadable.
    """
    found = {}
    for family in FAMILIES if folder is not None else ():
        assert folder is not None
        path = folder / f"{family}{SUFFIX}"
        if path.is_file():
            artifact = Artifact.load(path, f"kvstore.codecs: {family}")
            profile = profile_of(artifact, family, digest)
            if profile is not None:
                found[family] = profile
    return found


def profile_of(artifact: Artifact, family: str, digest: str) -> Profile | None:
    """Return a model's part of an artifact; None where it has none."""
    if artifact.kind != f"kv-{family}":
        return None
    role = next((role for role, each in artifact.models.items() if each == digest), None)
    if role is None:
        return None
    start = f"{role}."
    tensors = {name.removeprefix(start): each for name, each in artifact.tensors.items() if name.startswith(start)}
    return Profile(bytes.fromhex(artifact.version)[:VERSION_BYTES], artifact.settings, tensors)


def refuse_missing(codec: str) -> TurnoutError:
    """Raise for a codec that cannot work without the model's profile, and say how to make one."""
    message = (
        f"kvstore.codecs: {codec!r} needs a profile made for this model; make one with:"
        f" {COMMAND} --out FOLDER, where FOLDER is the pool's folder of artifacts"
    )
    return TurnoutError(Code.INVALID_ARGUMENT, message, "kvstore.codecs")


def check_fits(profile: Profile, shape: ChunkShape, names: Iterable[str]) -> None:
    """Refuse a chunk of layers or channels that the profile does not have.

    Raises:
        ValueError: it does not fit.
    """
    channels = shape.kv_heads * shape.head_dim
    for name in names:
        layers, _, width = profile.tensors[name].shape[:3]
        if shape.first_layer + shape.layers > layers or width != channels:
            raise ValueError(f"profile of {layers} layers and {width} channels, chunk {shape.size}")


def cell_bytes(counts: NDArray[np.float64]) -> Bytes:
    """Encode histograms [..., cells], a byte a cell: four bits of exponent and of mantissa, with the largest cell.

    Args:
        counts: how often each cell was met; where all are 0, every cell is taken to be alike.
    """
    most = counts.max(axis=-1, keepdims=True)
    scaled = np.where(most > 0, counts / np.maximum(most, 1e-300), 1.0) * (31 << 15)
    exponent = np.clip(np.floor(np.log2(np.maximum(scaled, 16.0) / 16.0)), 0, 15)
    mantissa = np.clip(np.rint(scaled / 2.0**exponent) - 16, 0, 15)
    found: Bytes = (exponent * 16 + mantissa).astype(np.uint8)
    return found


def cell_weights(cells: Bytes) -> Ints:
    """Decode the bytes of `cell_bytes`, to 16 to 31 * 2**15."""
    wide = cells.astype(np.int64)
    return (16 + (wide & 15)) << (wide >> 4)
