"""The target's first layers and an attention-only adapter draft, and stop where they are unsure."""

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import Annotated

from pydantic import Field

from decoding.artifacts import ArtifactName
from decoding.drafters._exits import ExitDrafter, ExitParams
from decoding.exit_heads import ExitHead
from decoding.lengths._readings import top_probability
from decoding.lengths.base import Step
from decoding.parts import Example, ModelShape


class KangarooParams(ExitParams):
    """Parameters of `kangaroo`."""

    artifact: ArtifactName = "kangaroo"
    threshold: Annotated[
        float, Field(ge=0.0, le=1.01, description="a draft ends below a token whose distribution has none so probable")
    ] = 0.6


class KangarooDrafter(ExitDrafter):
    """Double early exit (paper #157, Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting).

    The first exit leaves the target after a few layers, for an adapter of one attention layer; the second ends the
    draft once the adapter's best token is not probable enough. The unsure token itself is verified.
    """

    Params = KangarooParams
    papers = (157,)
    depth = 6
    params: KangarooParams

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        head = ExitHead(shape.width, 4, 2, shape.width // 4)
        return Example(kind=cls.name, head=head, settings={"exit_layer": shape.layers // 2})

    def continues(self, path: Path[Step]) -> bool:
        """Return whether the adapter was sure of the last token."""
        return top_probability(path[-1].row) >= self.params.threshold


PART = KangarooDrafter
