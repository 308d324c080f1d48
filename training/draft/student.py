"""A student cut from its target: some of the target's layers between its own embedding, last norm and head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from turnout.errors import invalid

LAYER_NUMBERS = ("moe_layers", "mlp_only_layers")  # settings that list layers by their numbers


def layer_list(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the decoder layers of a Hugging Face causal language model, with the name they have in it.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it has no list of as many modules as its configuration has layers.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return name, module
    count = model.config.num_hidden_layers
    raise invalid("model", f"{model.config.model_type}: no list of its {count} layers is found")


def cut(model: Any, layers: Sequence[int]) -> Any:
    """Copy a model with some of its layers; embedding, last norm and head are copied as they are.

    With all layers the copy equals the model.

    Args:
        model: a Hugging Face causal language model; stays as it is.
        layers: which, rising.

    Returns:
        A model of the same class in the same precision, in evaluation mode.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a layer that the model does not have, or no layers.
    """
    count = model.config.num_hidden_layers
    if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
        raise invalid("layers", f"must be rising numbers from 0 to {count - 1}; got {list(layers)}")
    prefix, _ = layer_list(model)
    student = AutoModelForCausalLM.from_config(cut_config(model.config, layers)).to(model.dtype)
    number = {layer: index for index, layer in enumerate(layers)}
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(f"{prefix}."):
            layer, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            if int(layer) in number:
                weights[f"{prefix}.{number[int(layer)]}.{rest}"] = tensor
        else:
            weights[name] = tensor
    student.load_state_dict(weights)
    return student.eval()


def cut_config(config: Any, layers: Sequence[int]) -> Any:
    """Copy a configuration for some of the layers: settings that say something of a layer say it of its place."""
    count, made = config.num_hidden_layers, copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == count and key != "eos_token_id":
            setattr(made, key, [value[layer] for layer in layers])
    for key in LAYER_NUMBERS:
        if listed := getattr(config, key, None):
            setattr(made, key, [place for place, layer in enumerate(layers) if layer in listed])
    if dense := getattr(config, "first_k_dense_replace", None):
        made.first_k_dense_replace = sum(layer < dense for layer in layers)
    made.num_hidden_layers = len(layers)
    return made


class Student:
    """A student with the trimmed head that it is trained and used with.

    Args:
        model: what `cut` made, in float32.
        kept: int64 [k], rising, the ids of its head.
        autocast: whether its matrices are multiplied in bfloat16.

    Attributes:
        trained: the modules that learn: layers and last norm. Embedding and head stay the target's.
    """

    def __init__(self, model: Any, kept: torch.Tensor, autocast: bool = False) -> None:
        self.model, self.kept, self.autocast = model, kept, autocast
        self._body = model.base_model
        model.requires_grad_(False)
        _, layers = layer_list(model)
        norms = [module for name, module in self._body.named_children() if "norm" in name]
        self.trained = nn.ModuleList([layers, *norms]).requires_grad_(True)
        output = model.get_output_embeddings()
        self._head = output.weight.detach()[kept].clone()
        self._bias = output.bias.detach()[kept].clone() if getattr(output, "bias", None) is not None else None
        config = model.config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = _logit_scale(config)

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        """Token ids [b, n], padded behind -> states after the last norm, [b, n, width]."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            states: torch.Tensor = self._body(input_ids=rows, use_cache=False).last_hidden_state
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """States [m, width] -> float32 logits of the kept ids, [m, k]."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = nn.functional.linear(states, self._head, self._bias)
        logits = logits.float() * self._scale
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def _logit_scale(config: Any) -> float:
    """Factor on the logits, by the two names that it has in configurations."""
    if getattr(config, "logits_scaling", None):  # a divisor
        return 1.0 / float(config.logits_scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)
