"""Datastores of contrasts: hidden states of a model as keys, with exact search for the nearest ones."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from decoding.artifacts import ArtifactName
from decoding.contrast.base import Contrast, Stream, StreamRows
from decoding.length_heads import Head
from decoding.model import Model, ModelPool, ReadSpec
from turnout.errors import invalid
from turnout.registry import MethodParams

ROLE = "large"  # of the model that stores are made for
LAST = -1
SPARE = 16  # entries behind the nearest ones whose distances are computed exactly too
EXAMPLE_ENTRIES = 48


class Datastore(Head):
    """Keys of a datastore: what a search finds entries by.

    Args:
        count: entries.
        width: of the model's hidden states.
        layer: of which a key is the output; -1: after the last norm.

    Attributes:
        keys: float32 [count, width], less `centre`.
        centre: float32 [width].
    """

    centre: torch.Tensor

    def __init__(self, count: int, width: int, layer: int = LAST) -> None:
        super().__init__()
        self.layer = layer
        self.keys = nn.Parameter(torch.zeros(count, width), requires_grad=False)
        self.register_buffer("centre", torch.zeros(width))
        self._squares: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.keys.shape[0]

    @property
    def width(self) -> int:
        """Width of the hidden states that can be looked up."""
        return self.keys.shape[1]

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return {"count": len(self), "width": self.width, "layer": self.layer}

    def key_of(self, state: torch.Tensor) -> torch.Tensor:
        """Make the key of a hidden state, [width] on any device: float32 [width] on the CPU."""
        return state.detach().to("cpu", torch.float32) - self.centre

    @torch.inference_mode()
    def nearest(self, key: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the entries nearest to a key, by an exact search.

        Keys are compared with one row at a time: a product of matrices depends on how many rows it has.

        Args:
            key: float32 [width].
            count: most entries.

        Returns:
            int64 [k], the entries, nearest first, and float32 [k], their squared Euclidean distances.
        """
        if self._squares is None:
            self._squares = self.keys.square().sum(-1)
        rough = torch.addmv(self._squares, self.keys, key, alpha=-2.0)
        found = rough.topk(min(count + SPARE, len(self)), largest=False).indices
        distances, order = (self.keys[found] - key).square().sum(-1).sort()
        return found[order[:count]], distances[:count]

    @abstractmethod
    def check(self, vocab_size: int) -> None:
        """Refuse a vocabulary that the values are not of.

        Raises:
            ValueError: what does not fit.
        """


StoreT = TypeVar("StoreT", bound=Datastore)


class StoreParams(MethodParams):
    """Base of their parameters."""

    artifact: ArtifactName


class StoreContrast(Contrast, Generic[StoreT]):
    """Contrast that looks the main stream's hidden states up in a datastore.

    The datastore is an artifact of the contrast's name as kind, made for the pool's large model: the request's tenant
    may have its own of that name, which no other tenant can open.
    """

    network: ClassVar[type[Datastore]]
    params: StoreParams
    store: StoreT

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """Open the datastore; see `Contrast.streams`.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        where, name = f"{self.where}.artifact", self.params.artifact
        artifact = models.artifacts.open(name, self.name, models, where)
        if artifact.models.get(ROLE) != model.digest:
            raise invalid(where, f"{name!r} was made for another model than {model.name!r}, which answers")
        try:
            store = self.network.of(artifact)
            if not len(store):
                raise ValueError("it is empty")
            if store.keys.dtype != torch.float32:
                raise ValueError(f"its keys are {store.keys.dtype}, and must be {torch.float32}")
            store.check(model.vocab_size)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise invalid(where, f"{name!r} holds no usable datastore: {error}") from None
        if not LAST <= store.layer <= model.num_layers:
            raise invalid(where, f"has states of layer {store.layer}; {model.name!r} has {model.num_layers}")
        # Answers of one request share this part: of a file that is replaced meanwhile, all read what was there first.
        if "store" not in vars(self):
            self.store = store  # type: ignore[assignment]
        return ()

    def reads(self) -> ReadSpec:
        """See `Contrast.reads`."""
        return ReadSpec(draw=None, hidden=frozenset({self.store.layer}))

    def keys(self, rows: StreamRows) -> list[torch.Tensor]:
        """Keys of rows, float32 [width] each.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the model's hidden states have another width than the datastore's.
        """
        states = rows.hidden[self.store.layer]
        if states.shape[1] != self.store.width:
            widths = f"has keys of width {self.store.width}; the model's are {states.shape[1]}"
            raise invalid(f"{self.where}.artifact", f"{self.params.artifact!r} {widths}")
        return [self.store.key_of(state) for state in states]
