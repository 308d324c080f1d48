"""Datastores of contrasts: hidden states of a model as keys, with exact search for the nearest ones."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from decoding.artifacts import ArtifactName
from decoding.contrast.base import Contrast, Stream, StreamRows
from decoding.length_heads import Head
from decoding.model import Model, ModelPool, ReadSpec
from decoding.read_spec import FEED_FORWARD
from turnout.errors import invalid
from turnout.registry import MethodParams

ROLE = "large"  # of the model that stores are made for
LAST = -1
SPARE = 16  # entries behind the nearest ones whose distances are computed exactly too
EXAMPLE_ENTRIES = 48
CHUNK = 4096  # entries whose squares are in memory at a time
LEAST_TEMPERATURE = 1e-30  # in float32, what is smaller divides by 0

# A search reads all keys, and a file may have gigabytes. Both are done one at a time, and apart from each other.
_searches = ThreadPoolExecutor(1, thread_name_prefix="datastore searches")
_files = ThreadPoolExecutor(1, thread_name_prefix="datastore files")


class Datastore(Head):
    """Keys of a datastore: what a search finds entries by.

    Args:
        count: entries.
        width: of the model's hidden states.
        layer: of which a key is the output; -1: after the last norm; -2: see `ReadSpec.hidden`.

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
        self._is_checked = False

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
        rough = torch.addmv(self._squared(), self.keys, key, alpha=-2.0)
        found = rough.topk(min(count + SPARE, len(self)), largest=False).indices
        exact = [(self.keys[part] - key).square().sum(-1) for part in torch.split(found, CHUNK)]
        distances, order = torch.cat(exact).sort()
        return found[order[:count]], distances[:count]

    def _squared(self) -> torch.Tensor:
        if self._squares is None:
            self._squares = torch.cat([part.square().sum(-1) for part in torch.split(self.keys, CHUNK)])
        return self._squares

    def check(self, vocab_size: int) -> None:
        """Refuse contents that cannot be searched, or values that are not of a vocabulary.

        Raises:
            ValueError: what does not fit.
        """
        if not self._is_checked:
            if not len(self):
                raise ValueError("it is empty")
            if type(self.layer) is not int:
                raise ValueError(f"its layer is {self.layer!r}, and must be a number")
            for name, tensor in (("keys", self.keys), ("centre", self.centre)):
                check_dtype(name, tensor, torch.float32)
            if not (self.centre.isfinite().all() and self._squared().isfinite().all()):
                raise ValueError("its keys are not finite, or too large")
            self.check_values()
            self._is_checked = True
        self.check_vocabulary(vocab_size)

    @abstractmethod
    def check_values(self) -> None:
        """Refuse values of another type, or that are not finite; asked once.

        Raises:
            ValueError: what does not fit.
        """

    @abstractmethod
    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a vocabulary that the values are not of.

        Raises:
            ValueError: what does not fit.
        """


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Refuse a tensor of a datastore that has another type.

    Raises:
        ValueError: it has.
    """
    if tensor.dtype not in allowed:
        raise ValueError(f"its {name} are {tensor.dtype}, and must be {' or '.join(map(str, allowed))}")


def weights_of(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return softmax(scores / temperature), float32 [k], however small the temperature is."""
    return ((scores - scores.amax()) / max(temperature, LEAST_TEMPERATURE)).softmax(-1)


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

    async def load(self, models: ModelPool, model: Model) -> None:
        """Open the datastore, in a thread; see `Contrast.load`.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        await asyncio.get_running_loop().run_in_executor(_files, self._open, models, model)

    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """Open the datastore unless it was loaded; see `Contrast.streams`.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        if "store" not in vars(self):
            self._open(models, model)
        return ()

    def _open(self, models: ModelPool, model: Model) -> None:
        where, name = f"{self.where}.artifact", self.params.artifact
        artifact = models.artifacts.open(name, self.name, models, where)
        if artifact.models.get(ROLE) != model.digest:
            raise invalid(where, f"{name!r} was made for another model than {model.name!r}, which answers")
        try:
            store = self.network.of(artifact)
            store.check(model.vocab_size)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise invalid(where, f"{name!r} holds no usable datastore: {error}") from None
        if not FEED_FORWARD <= store.layer <= model.num_layers:
            raise invalid(where, f"has states of layer {store.layer}; {model.name!r} has {model.num_layers}")
        # Answers of one request share this part: of a file that is replaced meanwhile, all read what was there first.
        if "store" not in vars(self):
            self.store = store  # type: ignore[assignment]

    @abstractmethod
    def look_up(self, key: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return what the datastore says of the token after a context: key float32 [width] -> float32 [vocab_size]."""

    @abstractmethod
    def mix(self, main: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Combine logits with what was looked up: float32 [rows, vocab] both -> float32 [rows, vocab]."""

    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """See `Contrast.combine`."""
        main = logits[:, 0]
        found = [self.look_up(key, main.shape[-1]) for key in self.keys(rows)]
        return self.mix(main, torch.stack(found).to(main.device))

    async def combined(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """Search in a thread, where requests take turns row by row; see `Contrast.combined`."""
        in_thread, main = asyncio.get_running_loop().run_in_executor, logits[:, 0]
        keys = await in_thread(_searches, self.keys, rows)
        found = [await in_thread(_searches, self.look_up, key, main.shape[-1]) for key in keys]
        return self.mix(main, torch.stack(found).to(main.device))

    def reads(self) -> ReadSpec:
        """See `Contrast.reads`."""
        return ReadSpec(draw=None, hidden=frozenset({self.store.layer}))

    def keys(self, rows: StreamRows) -> list[torch.Tensor]:
        """Keys of rows, float32 [width] each.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the model's hidden states have another width than the datastore's, or those
                of its layer cannot be read.
        """
        states = rows.hidden.get(self.store.layer)
        if states is None:
            unread = f"has keys of layer {self.store.layer}, which cannot be read of this model"
            raise invalid(f"{self.where}.artifact", f"{self.params.artifact!r} {unread}")
        if states.shape[1] != self.store.width:
            widths = f"has keys of width {self.store.width}; the model's are {states.shape[1]}"
            raise invalid(f"{self.where}.artifact", f"{self.params.artifact!r} {widths}")
        return [self.store.key_of(state) for state in states.to("cpu")]
