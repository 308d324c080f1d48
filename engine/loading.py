"""From a checkpoint folder to a model that can be run: load, refuse what is unsupported, check one forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decoding.artifacts import weights_digest
from decoding.vocabulary import SubVocabulary
from engine.architectures import architecture_named
from engine.attention.step import NAME
from engine.backends.base import Kernels, choose_backend
from engine.cache.kv_formats import KVDtype
from engine.checkpoints import read_config, read_model, reading
from engine.costs.limits import available_memory
from engine.forward_check import (
    CHECK_CHUNKS,
    CHECK_TOLERANCE,
    EXPERT_CHUNKS,
    INTEGER_TOLERANCE,
    ROUNDED_KV_TOLERANCE,
    difference,
    our_logits,
    plain_logits,
    typical_difference,
)
from engine.integer_weights import Integers, Weights
from engine.loaded_model import LoadedModel, check_supported
from engine.rope import context_length, depends_on_length
from engine.twin import check_twin
from engine.unlisted import refuse
from turnout.errors import Code, TurnoutError, invalid

# Of glibc's `mallopt`, by number, and in bytes: what is taken from the heap at most, and how much of that stays.
MMAP_THRESHOLD, MOST_ON_HEAP = -3, 32 << 20
TRIM_THRESHOLD, MOST_KEPT_FREE = -1, 256 << 20
EXACT_MARGIN = 1.5  # of the memory that the weights take in float32, for what is read on the way


@dataclass(slots=True)
class Checkpoint:
    """A loaded causal language model.

    Attributes:
        plan: how to run it layer by layer.
        num_parameters: every weight counted once (tied ones once).
        max_length: tokens its positions allow.
        digest: names configuration and weights.
        notes: findings of loading, for the operator.
        draft_vocabulary: the ids that it drafts, if its folder names any; None: all.
    """

    plan: LoadedModel
    architecture: str
    dtype: torch.dtype
    num_parameters: int
    vocab_size: int
    max_length: int
    digest: str
    notes: list[str] = field(default_factory=list)
    draft_vocabulary: SubVocabulary | None = None


def load_checkpoint(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels = "auto",
    shared_attention: bool = True,
    field: str = "model",
    weights: Weights = "dense",
    kv_dtype: KVDtype = "auto",
) -> Checkpoint:
    """Load a Hugging Face checkpoint folder; see `prepare`.

    Args:
        path: the folder.
        dtype: of the weights from now on.
        device: where they are to lie.
        kernels: see `prepare`.
        shared_attention: see `prepare`.
        field: the model's place in the configuration, for messages.
        weights: how linear weights are kept: as numbers of `dtype`, as the checkpoint stores them, or as integers.
        kv_dtype: how keys and values are kept.

    Raises:
        TurnoutError: as `prepare`; INVALID_ARGUMENT for `field`: the files cannot be read, or weights are missing.
    """
    read_config(path, field)
    with reading(path, field):
        model, notes = read_model(path, dtype, field)
    place = f"{field.removesuffix('.path')}.weights"
    integers = None if weights == "dense" else Integers(weights, path, dtype, place)
    needed = int(4 * EXACT_MARGIN * sum(weight.numel() for weight in model.parameters()))

    def exact() -> Any | None:
        fits = needed < available_memory(str(device))
        if not fits:
            return None
        same = read_model(path, torch.float32, field)[0].to(device).eval()
        return same if integers is None else integers.replace(same)

    checkpoint = prepare(model.to(device), kernels, shared_attention, exact, integers)
    checkpoint.notes[:0] = notes
    round_kv(checkpoint, kv_dtype, f"{field.removesuffix('.path')}.kv_dtype")
    checkpoint.draft_vocabulary = SubVocabulary.load(path, checkpoint.vocab_size, field)
    _settle_memory()
    return checkpoint


def _settle_memory() -> None:
    """Give back what loading freed, which may be as much as the weights; keep what steps free from now on.

    Rows of logits are megabytes. glibc maps such memory anew each time, and each of its pages costs a fault: a chain of
    logits processors takes half as long again.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        libc.mallopt(MMAP_THRESHOLD, MOST_ON_HEAP)
        libc.mallopt(TRIM_THRESHOLD, MOST_KEPT_FREE)


def prepare(
    model: Any,
    kernels: Kernels = "auto",
    shared_attention: bool = True,
    exact: Callable[[], Any | None] | None = None,
    integers: Integers | None = None,
) -> Checkpoint:
    """Turn a Hugging Face model into a runnable checkpoint; checks one forward against the plain one.

    Args:
        model: a causal language model in evaluation dtype, on its device. Taken over: its attention is replaced.
        kernels: how to compute; see `choose_backend`. The results stay the same.
        shared_attention: read prefixes that sequences of a batch share once; see `choose_backend`.
        exact: makes the same model in float32; called where a difference in 16 bits may be the model's own rounding.
        integers: how linear weights are kept; None: as numbers.

    Raises:
        TurnoutError: INVALID_ARGUMENT for what is not supported, by its name: the architecture, a variant of it, or
            the dtype of the weights; and an architecture without a file whose forward over our attention disagrees
            with the plain one. INTERNAL when that of an architecture with a file does.
    """
    check_supported(model.config)
    check_twin(model.config)
    if model.dtype not in CHECK_TOLERANCE:  # the kernels compute in no other, and none was ever checked
        supported = ", ".join(str(each).removeprefix("torch.") for each in CHECK_TOLERANCE)
        message = f"weights in {str(model.dtype).removeprefix('torch.')} are not supported; supported: {supported}"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, "dtype")
    model.eval().requires_grad_(False)
    notes: list[str] = []
    backend = choose_backend(kernels, model.device, shared_attention, notes, model.dtype)
    num_parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    settings = model.config.to_dict()
    if integers is not None:
        if backend.name != "native":
            needs = "needs the compiled CPU kernels (engine.kernels auto or native)"
            raise TurnoutError(Code.INVALID_ARGUMENT, f"{integers.weights!r} {needs}", integers.field)
        notes.append(integers.attach(model))
        settings |= {"turnout_weights": integers.weights}  # inputs are rounded as well: its keys and values are others
    expected = plain_logits(model)
    model.config._attn_implementation = NAME
    digest = weights_digest(settings, model.state_dict())  # before the plan packs weights anew
    dtype, vocab_size = model.dtype, model.config.vocab_size
    if depends_on_length(model.config) and architecture_named(model.config.model_type).fused:
        notes.append("decoding will be slower than it could be: rotary scaling by length runs the model's own modules")
    plan = LoadedModel(model, backend)
    checkpoint = Checkpoint(
        plan=plan,
        architecture=model.config.model_type,
        dtype=dtype,
        num_parameters=num_parameters,
        vocab_size=vocab_size,
        max_length=context_length(model.config),
        digest=digest,
        notes=notes,
    )
    check_forward(checkpoint, expected, exact, CHECK_TOLERANCE[dtype] if integers is None else INTEGER_TOLERANCE)
    return checkpoint


def round_kv(checkpoint: Checkpoint, kv_dtype: KVDtype, field: str = "kv_dtype") -> None:
    """Keep keys and values otherwise than as the model's numbers; checks a forward against the one that did not.

    Args:
        checkpoint: of `prepare`, not in use yet.
        kv_dtype: how.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, the backend has no kernels for it. INTERNAL, the forwards differ
            by more than such rounding.
    """
    plan = checkpoint.plan
    if kv_dtype == plan.kv_dtype:
        return
    backend = plan.backend
    if kv_dtype not in backend.kv_dtypes:
        allowed = f"allowed with the {backend.name} kernels: {', '.join(backend.kv_dtypes)}"
        raise invalid(field, f"{kv_dtype!r} needs engine.kernels native, torch or plain; {allowed}")
    expected = our_logits(plan, CHECK_CHUNKS, checkpoint.vocab_size, plan.device)
    plan.kv_dtype = kv_dtype
    got = our_logits(plan, CHECK_CHUNKS, checkpoint.vocab_size, plan.device)
    apart = typical_difference(got, expected, CHECK_CHUNKS)
    if not apart <= ROUNDED_KV_TOLERANCE:
        what = f"a forward over keys and values in {kv_dtype} differs by {apart:.3g} of the logits' spread"
        raise TurnoutError(Code.INTERNAL, f"{checkpoint.architecture}: {what}", field)


def check_forward(
    checkpoint: Checkpoint,
    expected: torch.Tensor,
    exact: Callable[[], Any | None] | None = None,
    tolerance: float | None = None,
) -> None:
    """Run the same tokens through our path, in two chunks and a single step; several where experts are rounded.

    Args:
        checkpoint: not in use yet.
        expected: of `plain_logits`.
        exact: see `prepare`.
        tolerance: of the difference; None: that of the dtype.

    Raises:
        TurnoutError: they differ by more than rounding. INVALID_ARGUMENT for an architecture without a file, else
            INTERNAL.
    """
    plan, device = checkpoint.plan, expected.device
    if checkpoint.dtype == torch.float16 and not torch.isfinite(expected).all():
        message = "float16: the model's own numbers exceed its range; allowed for this model: bfloat16, float32"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, "dtype")
    if plan.has_experts and checkpoint.dtype != torch.float32:
        got = our_logits(plan, EXPERT_CHUNKS, checkpoint.vocab_size, device)
        error = typical_difference(got, expected, EXPERT_CHUNKS)
    else:
        got = our_logits(plan, CHECK_CHUNKS, checkpoint.vocab_size, device)
        error = difference(got, expected)
    tolerance = CHECK_TOLERANCE[checkpoint.dtype] if tolerance is None else tolerance
    if not error <= tolerance and not _rounds_so(checkpoint, got, expected, exact):
        what = f"our forward differs from the plain one by {error:.3g} of the logits' spread"
        if not architecture_named(checkpoint.architecture).listed:
            refuse(checkpoint.architecture, what)
        raise TurnoutError(Code.INTERNAL, f"{checkpoint.architecture}: {what}", "model")


def _rounds_so(
    checkpoint: Checkpoint, got: torch.Tensor, expected: torch.Tensor, exact: Callable[[], Any | None] | None
) -> bool:
    """Whether the plain forward is further from float32 than ours: the difference is its rounding, not our fault.

    Few layers of a model whose states are large, as a draft model cut from it has, round more than `CHECK_TOLERANCE`.
    """
    if exact is None or checkpoint.dtype == torch.float32 or checkpoint.plan.has_experts:
        return False
    model = exact()
    if model is None:
        return False
    true = plain_logits(model)
    return difference(got, true) <= difference(expected, true)
