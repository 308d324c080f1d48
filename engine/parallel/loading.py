"""Every rank's share of a checkpoint: loaded as transformers' plan says, the same files everywhere, checked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import modeling_utils
from transformers.distributed import DistributedConfig

from decoding.artifacts import weights_digest
from engine.attention.step import NAME
from engine.backends.base import Kernels, choose_backend
from engine.checkpoints import read_config, read_model
from engine.fingerprint import WEIGHTS
from engine.forward_check import plain_logits
from engine.loading import Checkpoint, check_forward
from engine.parallel.barrier import agree, watched
from engine.parallel.connections import LinkClosedError
from engine.parallel.driver import LeadingPlan
from engine.parallel.group import Group
from engine.parallel.sharding import check_heads, localise
from engine.rope import context_length
from turnout.errors import Code, Interrupted, TurnoutError

SAMPLES = 64  # places of a weight file that are compared between ranks
SAMPLE_BYTES = 4096


@dataclass(slots=True)
class Share:
    """A rank's share of a model.

    Attributes:
        model: split; its modules are our own over local weights.
        num_parameters: of the whole model.
        digest: of the whole model.
        expected: what a forward is checked against; see `engine.forward_check.plain_logits`.
        notes: findings of loading, for the operator.
    """

    model: Any
    num_parameters: int
    digest: str
    expected: torch.Tensor
    notes: list[str]


def check_split(name: str, path: Path, ranks: int) -> None:
    """Refuse a model that cannot be split over `ranks` processes, before anything is started.

    Args:
        name: the model's, for the message.
        path: its checkpoint folder.
        ranks: `models.<name>.tensor_parallel`.

    Raises:
        TurnoutError: INVALID_ARGUMENT, for models.<name>.tensor_parallel, with what is allowed.
    """
    config = read_config(path, f"models.{name}.path")
    if ranks > 1:
        check_heads(name, config, ranks)


def load_sharded(
    group: Group,
    name: str,
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels = "auto",
    shared_attention: bool = True,
    timeout_s: float = 300.0,
) -> Checkpoint:
    """Load the leader's share of a model; all others have called `follow`. Blocks.

    Args:
        group: of `join`, with rank 0; closed when this fails.
        name: the model's, for messages.
        path: its checkpoint folder.
        dtype: of its weights.
        kernels: see `engine.backends.base.choose_backend`; the layers run in torch operations whatever is chosen.
        shared_attention: likewise.
        timeout_s: longest time to wait for all ranks to have loaded.

    Returns:
        A checkpoint like any other, whose plan has the others follow; `plan.kv_heads` are those of one rank.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be split so, or is not supported; UNAVAILABLE: a rank could not load
            it, or has other files, and is named; INTERNAL: our forward disagrees with the plain one.
        Interrupted: a rank is lost.
    """
    try:
        share = load_share(group, name, path, dtype, timeout_s)
        notes = share.notes
        plan = LeadingPlan(share.model, choose_backend(kernels, group.device, shared_attention, notes, dtype), group)
        config = share.model.config
        checkpoint = Checkpoint(
            plan=plan,
            architecture=config.model_type,
            dtype=share.model.dtype,
            num_parameters=share.num_parameters,
            vocab_size=config.vocab_size,
            max_length=context_length(config),
            digest=share.digest,
            notes=notes,
        )
        check_forward(checkpoint, share.expected)
        group.watch()
    except LinkClosedError as error:
        group.close()
        raise Interrupted(f"a process that {name!r} is split over has ended: {error}") from error
    except BaseException:
        group.close()
        raise
    return checkpoint


def load_share(group: Group, name: str, path: Path, dtype: torch.dtype, timeout_s: float) -> Share:
    """Load this rank's share, in step with all others; see `load_sharded`.

    Raises:
        TurnoutError: as `load_sharded`.
        LinkClosedError: another rank has ended.
    """
    deadline = time.monotonic() + timeout_s
    config = read_config(path, f"models.{name}.path")
    check_heads(name, config, group.world)
    _check_device(group, name)
    agree(group, f"find {name!r} in {path}", mark_of(path), deadline)
    model, notes = watched(group, f"load {name!r}", partial(_read, group, path, dtype, f"models.{name}.path"), deadline)
    agree(group, f"load {name!r}", "", deadline)
    return watched(group, f"check {name!r}", partial(_finish, group, model, notes), deadline)


def _check_device(group: Group, name: str) -> None:
    """transformers puts shares on the kind of device it finds."""
    visible = torch.accelerator.current_accelerator(check_available=True)
    kind = visible.type if visible is not None else "cpu"
    if kind != group.device.type:
        field = f"models.{name}.device"
        message = (
            f"{field}: is {group.device.type!r}, but the process sees a device of kind {kind!r}, which would be used"
        )
        raise TurnoutError(Code.INVALID_ARGUMENT, message, field)


def _read(group: Group, path: Path, dtype: torch.dtype, field: str) -> tuple[Any, list[str]]:
    """The model with this rank's share of the weights, whose modules are transformers' own, and notes on loading it."""
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    split = DistributedConfig(tp_size=group.world)
    with _without_accelerate():
        model, notes = read_model(path, dtype, field, distributed_config=split)
    return model.eval().requires_grad_(False), notes


@contextmanager
def _without_accelerate() -> Iterator[None]:
    """Bypass the accelerate package: transformers requires it for any device, but does not use it for a single one."""
    check = modeling_utils.check_and_set_device_map
    modeling_utils.check_and_set_device_map = lambda device: {"": device}
    try:
        yield
    finally:
        modeling_utils.check_and_set_device_map = check


def _finish(group: Group, model: Any, notes: list[str]) -> Share:
    """What all ranks compute together with transformers' modules; then our own stand in their place."""
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    num_parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    expected = plain_logits(model)
    config = {key: value for key, value in model.config.to_dict().items() if key != "distributed_config"}
    digest = weights_digest(config, _Whole(model.state_dict()))
    model.config._attn_implementation = NAME
    localise(model, group)
    return Share(model, num_parameters, digest, expected, notes)


def mark_of(path: Path) -> str:
    """A name for the files of a checkpoint: their names and sizes, and samples of what they hold."""
    whole = hashlib.blake2b(digest_size=16)
    for file in sorted({file for pattern in WEIGHTS for file in path.glob(pattern) if file.is_file()}):
        size = file.stat().st_size
        whole.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for place in range(0, size, max(size // SAMPLES, 1)):
                stream.seek(place)
                whole.update(stream.read(SAMPLE_BYTES))
    return whole.hexdigest()


class _Whole(Mapping[str, torch.Tensor]):
    """Weights by name, put together of all ranks' shares as they are asked for; all ranks ask in the same order."""

    def __init__(self, shares: Mapping[str, torch.Tensor]) -> None:
        self._shares = shares
        self._last: tuple[str, torch.Tensor] | None = None

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            share = self._shares[name]
            self._last = (name, share.full_tensor() if isinstance(share, DTensor) else share)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)
