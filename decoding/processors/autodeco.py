"""AutoDeco: trained heads say with which temperature and top-p each token is drawn (paper #22)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from pydantic import Field

from decoding.artifacts import ArtifactName
from decoding.parts import Example, ModelShape
from decoding.processors.base import NOTHING, Batch, LogitsProcessor, Stage
from decoding.processors.top_p import nucleus
from decoding.read_spec import ReadSpec
from decoding.sampling_heads import LEAST_TEMPERATURE, SamplingHeads
from decoding.step_states import LAST
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import ModelPool

# Heads in float64, so that what they say of a row does not depend on its batch; by device.
_placed: WeakKeyDictionary[SamplingHeads, dict[torch.device, SamplingHeads]] = WeakKeyDictionary()


class AutoDecoParams(MethodParams):
    """Parameters."""

    artifact: Annotated[ArtifactName, Field(description="heads, of the kind autodeco; `turnout train autodeco`")] = (
        "autodeco"
    )
    temperature: Annotated[bool, Field(description="whether the temperature is the heads'")] = True
    top_p: Annotated[bool, Field(description="whether top-p is the heads'")] = True


class AutoDeco(LogitsProcessor):
    """AutoDeco (paper #22): each row divided by the heads' temperature, then cut to the heads' top-p.

    The heads read the last hidden state and the raw logits of the model that they were trained for. Rows of others are
    left as they are: those only draft.
    """

    Params = AutoDecoParams
    params: AutoDecoParams
    papers = (22,)
    stage = Stage.TEMPERATURE
    keeps_best = True
    off: ClassVar = {"temperature": False, "top_p": False}
    _heads: SamplingHeads | None = None

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=SamplingHeads(shape.width, 16))

    def reads(self, num_layers: int) -> ReadSpec:
        """See `LogitsProcessor.reads`."""
        asked = self.params.temperature or self.params.top_p
        return ReadSpec(draw=None, hidden=frozenset({LAST})) if asked else NOTHING

    def network(self, models: ModelPool) -> SamplingHeads:
        """See `LogitsProcessor.network`."""
        artifact = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact")
        heads = SamplingHeads.of(artifact)
        [heads.model] = artifact.models.values()
        return heads

    def use(self, network: Any) -> None:
        """See `LogitsProcessor.use`."""
        self._heads = network

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        states = batch.hidden(LAST)
        if states is None or batch.states is None:
            return logits
        rows: dict[SamplingHeads, list[int]] = {}
        for row, part in enumerate(parts):
            if part._heads is not None and part._heads.model == batch.states.model:
                rows.setdefault(part._heads, []).append(row)
        for heads, own in rows.items():
            if len(own) == len(parts):
                return cls._divided(logits, parts, heads, states, batch.raw)
            places = torch.tensor(own, device=logits.device)
            those = [parts[row] for row in own]
            made = cls._divided(logits[places], those, heads, states[places], batch.raw[places])
            logits = logits.index_copy(0, places, made)
        return logits

    @classmethod
    def _divided(
        cls, logits: torch.Tensor, parts: Rows[Self], heads: SamplingHeads, states: torch.Tensor, raw: torch.Tensor
    ) -> torch.Tensor:
        """Rows of the same heads, [rows, vocab], with their states, [rows, width]."""
        temperature, top_p = _placed_at(heads, states.device)(states.double(), raw)
        warms = torch.tensor([part.params.temperature for part in parts], device=logits.device)[:, None]
        cuts = torch.tensor([part.params.top_p for part in parts], device=logits.device)[:, None]
        divisor = torch.where(warms, temperature.clamp(min=LEAST_TEMPERATURE), torch.ones_like(temperature)).float()
        logits = logits / divisor
        return torch.where(cuts, nucleus(logits, top_p.float()), logits)


def _placed_at(heads: SamplingHeads, device: torch.device) -> SamplingHeads:
    placed = _placed.setdefault(heads, {})
    if device not in placed:
        placed[device] = deepcopy(heads).to(device, torch.float64)
    return placed[device]


PART = AutoDeco
