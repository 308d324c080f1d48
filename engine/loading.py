"""From a checkpoint folder to a model that can be run: load, refuse what is unsupported, check one forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from decoding.artifacts import weights_digest
from decoding.logits import History
from decoding.model import Want
from decoding.sequence import Sequence
from engine.attention.step import NAME, paged_attention
from engine.backend import Kernels, choose_backend
from engine.cache.blocks import BlockPool
from engine.cache.table import BlockTable
from engine.checkpoints import read_config, read_model, reading
from engine.plan import LayerPlan, check_supported
from engine.runner import Feed, Runner
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

AttentionInterface.register(NAME, paged_attention)

CHECK_TOKENS = 24
# What rounding explains of `difference`. In bfloat16 the plain forward is itself 0.043 off in float32's terms after 28
# layers of random weights 3,072 wide (0.009 after 4 of 512); ours over CUDA kernels was 0.047 from it.
CHECK_TOLERANCE = {torch.float32: 1.25e-4, torch.bfloat16: 0.12}
# The largest of a million rounding errors is some five times their root mean square; one of more is another fault's.
LONE = 8


@dataclass(slots=True)
class Checkpoint:
    """A loaded causal language model.

    Attributes:
        plan: how to run it layer by layer.
        num_parameters: every weight counted once (tied ones once).
        max_length: tokens its positions allow.
        digest: names configuration and weights.
        notes: what whoever runs the model should know of how it was loaded.
    """

    plan: LayerPlan
    architecture: str
    dtype: torch.dtype
    num_parameters: int
    vocab_size: int
    max_length: int
    digest: str
    notes: list[str] = field(default_factory=list)


def load_checkpoint(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels = "auto",
    shared_attention: bool = True,
    field: str = "model",
) -> Checkpoint:
    """Load a Hugging Face checkpoint folder; see `prepare`.

    Args:
        path: the folder.
        dtype: of the weights from now on.
        device: where they are to lie.
        kernels: see `prepare`.
        shared_attention: see `prepare`.
        field: the model's place in the configuration, for messages.

    Raises:
        TurnoutError: as `prepare`; INVALID_ARGUMENT for `field`: the files cannot be read, or weights are missing.
    """
    read_config(path, field)
    with reading(path, field):
        model, notes = read_model(path, dtype, field)
    checkpoint = prepare(model.to(device), kernels, shared_attention)
    checkpoint.notes[:0] = notes
    return checkpoint


def prepare(model: Any, kernels: Kernels = "auto", shared_attention: bool = True) -> Checkpoint:
    """Turn a Hugging Face model into a runnable checkpoint; checks one forward against the plain one.

    Args:
        model: a causal language model in evaluation dtype, on its device. Taken over: its attention is replaced.
        kernels: how to compute; see `choose_backend`. The results stay the same.
        shared_attention: read prefixes that sequences of a batch share once; see `choose_backend`.

    Raises:
        TurnoutError: INVALID_ARGUMENT for what is not supported, by its name: the architecture, a variant of it, or
            the dtype of the weights. INTERNAL when our forward disagrees with the plain one.
    """
    check_supported(model.config)
    if model.dtype not in CHECK_TOLERANCE:  # the kernels compute in no other, and none was ever checked
        supported = ", ".join(str(each).removeprefix("torch.") for each in CHECK_TOLERANCE)
        message = f"weights in {str(model.dtype).removeprefix('torch.')} are not supported; supported: {supported}"
        raise TurnoutError(Code.INVALID_ARGUMENT, message, "dtype")
    model.eval().requires_grad_(False)
    notes: list[str] = []
    backend = choose_backend(kernels, model.device, shared_attention, notes)
    expected = plain_logits(model)
    num_parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    model.config._attn_implementation = NAME
    digest = weights_digest(model.config.to_dict(), model.state_dict())  # before the plan packs weights anew
    dtype, vocab_size = model.dtype, model.config.vocab_size
    plan = LayerPlan(model, backend)
    checkpoint = Checkpoint(
        plan=plan,
        architecture=model.config.model_type,
        dtype=dtype,
        num_parameters=num_parameters,
        vocab_size=vocab_size,
        max_length=model.config.max_position_embeddings,
        digest=digest,
        notes=notes,
    )
    check_forward(checkpoint, expected)
    return checkpoint


def _check_ids(vocab_size: int) -> torch.Tensor:
    return torch.arange(1, CHECK_TOKENS + 1) * 7919 % vocab_size


@torch.inference_mode()
def plain_logits(model: Any) -> torch.Tensor:
    """float32 [CHECK_TOKENS, vocab]: what the model itself computes for some tokens, by which ours is checked."""
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"  # transformers 5.17's sdpa leaves the soft cap out
    ids = _check_ids(model.config.vocab_size).to(model.device)
    logits: torch.Tensor = model(ids[None], use_cache=False).logits[0].float()
    return logits


def _check_feed(table: BlockTable, start: int, end: int) -> Feed:
    reads = [(i, History(table.seq), Want(draw=None, logits=True)) for i in range(end - start)]
    return Feed(table, table.seq.tokens[start:end], reads=reads)


def check_forward(checkpoint: Checkpoint, expected: torch.Tensor) -> None:
    """Run the same tokens through our path, in two chunks and a single step.

    Args:
        checkpoint: not in use yet.
        expected: of `plain_logits`.

    Raises:
        TurnoutError: INTERNAL: they differ by more than rounding.
    """
    device = expected.device
    plan, size = checkpoint.plan, 8
    seq = Sequence(_check_ids(checkpoint.vocab_size).tolist(), SamplingParams(), seed=0)
    num_blocks = -(-CHECK_TOKENS // size)
    store = plan.cache(num_blocks * size, device)
    table = BlockTable(seq, BlockPool(num_blocks, size), store)
    table.reserve(CHECK_TOKENS)
    runner = Runner(plan, store, size, device)
    rows = []
    for start, end in ((0, 9), (9, CHECK_TOKENS - 1), (CHECK_TOKENS - 1, CHECK_TOKENS)):
        rows += runner.run([_check_feed(table, start, end)])[0]
        table.filled(seq.tokens[start:end])
    got = torch.stack([row.logits for row in rows if row.logits is not None])
    error = difference(got, expected)
    if not error <= CHECK_TOLERANCE[checkpoint.dtype]:
        message = (
            f"{checkpoint.architecture}: our forward differs from the plain one by {error:.3g} of the logits' spread"
        )
        raise TurnoutError(Code.INTERNAL, message, "model")


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two forwards are apart: the root mean square over a row's logits, in the row where it is largest.

    The largest single difference would not do, since of rounding alone it grows with the vocabulary; it counts where
    it is more than `LONE` times as large, as that of one wrong row of the head is.

    Args:
        got: float32 [rows, vocab].
        expected: float32 [rows, vocab].

    Returns:
        In standard deviations of `expected`; NaN where a number is none.
    """
    off = got - expected
    largest = torch.maximum(off.square().mean(dim=-1).sqrt().max(), off.abs().max() / LONE)
    return (largest / expected.std().clamp_min(1e-6)).item()
