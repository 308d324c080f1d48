"""The trained parts that an answer rests on, named in it."""

from __future__ import annotations

from dataclasses import replace

from decoding.artifacts import Artifact
from decoding.calibration import KIND as CALIBRATION
from decoding.model import ModelPool, Request


def naming(models: ModelPool, request: Request) -> ModelPool:
    """The pool as a request sees it: each artifact it opens is noted with its version, so that a swap shows.

    Calibrations are not: they say more of themselves, see `decoding.calibrated_params`.
    """

    def opened(name: str, artifact: Artifact, version: str) -> None:
        note = f"artifact {name}, version {version}"
        if artifact.kind != CALIBRATION and note not in request.notes:
            request.notes.append(note)

    return replace(models, artifacts=models.artifacts.telling(opened))
