"""A model that transformers has split over ranks, made runnable by our own stacks: plain modules over local weights.

transformers decides what is split and loads only a rank's share of it; its hooks around every module, which wrap
tensors in each call, are then replaced by modules that do the same: a column-wise linear is an ordinary one with fewer
outputs, a row-wise one adds up over the ranks, and of the output matrix only the leader gathers what all compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from engine.architectures import architecture_named, architecture_of, listed
from engine.backends.weight_packing import packed
from engine.parallel.group import Group
from turnout.errors import TurnoutError, invalid

# Styles of a plan that leave every rank with whole heads of its own; others would have to keep all heads everywhere.
STYLES = frozenset({"colwise", "rowwise", "packed_colwise", "moe_tp_experts", "replicated_with_grad_allreduce"})


def check_heads(name: str, config: Any, ranks: int) -> None:
    """Refuse a model that cannot be split so.

    Args:
        name: the model's, for the message.
        config: its Hugging Face configuration.
        ranks: how many processes are to hold it together.

    Raises:
        TurnoutError: INVALID_ARGUMENT, for models.<name>.tensor_parallel, with what is allowed.
    """
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not architecture_of(config).splits or not plan or set(plan.values()) - STYLES:
        allowed = ", ".join(kind for kind in listed() if architecture_named(kind).splits)
        raise _refusal(name, f"must be 1: {config.model_type!r} cannot be split; architectures that can: {allowed}")
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    common = gcd(heads, kv_heads)
    what = f"{kv_heads} key/value heads"
    if "packed_colwise" in plan.values():
        width: int = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        common = gcd(common, width)
        what += f" and experts of width {width}"
    if common % ranks:
        allowed = ", ".join(str(count) for count in range(1, common + 1) if common % count == 0)
        raise _refusal(name, f"{ranks} does not divide its {what}; allowed: {allowed}")


def _refusal(name: str, message: str) -> TurnoutError:
    return invalid(f"models.{name}.tensor_parallel", message)


class SummedLinear(nn.Module):
    """A linear layer whose input is split: every rank multiplies its part, the results add up, then comes the bias.

    Implements `engine.backends.parallel_attention.Summed`.
    """

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self.bias = linear.bias
        linear.bias = None  # type: ignore[assignment]
        self.local = packed(linear)
        self.partial = False
        self._group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., this rank's part of the input] -> [..., out_features], the same on every rank unless `partial`."""
        out: torch.Tensor = self.local(hidden)
        return out if self.partial else self.whole(self.sum(out))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.parallel_attention.Summed.sum`."""
        return self._group.all_reduce(partial)

    def whole(self, summed: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.parallel_attention.Summed.whole`."""
        return summed if self.bias is None else summed + self.bias


class SummedExperts(nn.Module):
    """Experts of which every rank has a part of each: their outputs add up."""

    def __init__(self, experts: nn.Module, group: Group) -> None:
        super().__init__()
        self.local = experts
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the experts, with the same result on every rank."""
        return self._group.all_reduce(self.local(*args, **kwargs))


class SplitEmbedding(nn.Module):
    """Embeddings of which every rank has those of a part of the vocabulary."""

    def __init__(self, embedding: nn.Embedding, vocab_size: int, group: Group) -> None:
        super().__init__()
        embedding.padding_idx = None  # a place in the whole vocabulary; it only matters for training
        self.local = embedding
        self._first = group.rank * -(-vocab_size // group.world)
        self._group = group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> [..., hidden], the same on every rank."""
        places = ids - self._first
        mine = (places >= 0) & (places < len(self.local.weight))
        states: torch.Tensor = self.local(places.where(mine, 0)) * mine[..., None]
        return self._group.all_reduce(states)


class GatheredHead(nn.Module):
    """The output matrix, of which every rank has a part of the rows; the leader gets all logits.

    Args:
        linear: this rank's part, of the same size on all ranks but for the last ones, which may have less.
        out_features: rows of the whole.
        group: the ranks.
    """

    def __init__(self, linear: nn.Linear, out_features: int, group: Group) -> None:
        super().__init__()
        self._missing = -(-out_features // group.world) - linear.out_features
        self.local = packed(linear)
        self.out_features = out_features
        self._group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, out_features] on the leader, [R, 0] elsewhere."""
        logits: torch.Tensor = F.pad(self.local(hidden), (0, self._missing)).contiguous()
        parts = self._group.gather(logits)
        return torch.cat(parts, dim=-1)[..., : self.out_features] if parts else logits[..., :0]


@torch.no_grad()
def localise(model: Any, group: Group) -> None:
    """Replace transformers' hooks and distributed weights by modules over this rank's weights, in place.

    Args:
        model: loaded with a `DistributedConfig` of this group.
        group: the ranks.
    """
    plan: Mapping[str, str] = model.tp_plan
    config = model.config
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter.data, DTensor) or isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.to_local(), requires_grad=False)
                module.register_parameter(name, local)
        module.__dict__.pop("forward", None)  # the hook: the class has the module's own
    for name, module in list(model.named_modules()):
        replacement = _replacement(module, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)), config.vocab_size, group)
        if replacement is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)


def _replacement(module: nn.Module, style: str | None, vocab_size: int, group: Group) -> nn.Module:
    """What stands in the place of a module of this style."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
        if style == "rowwise":
            return SummedLinear(module, group)
        if style == "colwise_gather_output":
            return GatheredHead(module, vocab_size, group)
    elif style == "embedding_rowwise" and isinstance(module, nn.Embedding):
        return SplitEmbedding(module, vocab_size, group)
    elif style == "moe_tp_experts":
        return SummedExperts(module, group)
    return module
