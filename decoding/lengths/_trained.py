"""Length policies that ask a trained head."""

from __future__ import annotations

from abc import abstractmethod

from decoding.artifacts import Artifact, ArtifactName
from decoding.lengths.base import Depth, LengthParams, LengthPolicy
from decoding.model import Model, ModelPool
from turnout.errors import invalid


class TrainedParams(LengthParams):
    """Parameters of every trained policy."""

    most: Depth = 20
    artifact: ArtifactName


class TrainedLength(LengthPolicy):
    """Opens the artifact that bears its name as kind, for exactly the models it was trained with."""

    params: TrainedParams
    stepwise = True

    @abstractmethod
    def use(self, artifact: Artifact) -> None:
        """Take the head from an artifact that fits the models."""

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        self._draft_digest = artifact.models["small"]
        self.use(artifact)

    def check_draft(self, model: Model) -> None:
        """The head says something about the drafts it was trained on only.

        Raises:
            TurnoutError: INVALID_ARGUMENT: another model drafts.
        """
        if model.digest != self._draft_digest:
            raise invalid(
                f"{self.where}.artifact",
                f"was made for drafts by the small model with digest {self._draft_digest};"
                f" {model.name!r} drafts, with {model.digest}",
            )
