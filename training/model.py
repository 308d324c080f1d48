"""A fresh Llama-shaped model from a recipe, and its loss on a packed batch, at its end or where it is left early."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from training.packing import IGNORED, Batch
from training.recipe import Recipe


def build_model(recipe: Recipe, pad_id: int, end_id: int) -> LlamaForCausalLM:
    """The model with weights drawn from the recipe's seed, in float32."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocabulary_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).float()


def batch_loss(
    model: LlamaForCausalLM, batch: Batch, autocast: bool, backbone: Callable[..., Any] | None = None
) -> torch.Tensor:
    """Mean cross entropy (nats) over the taught tokens; the logits of other positions are never computed.

    `backbone` is `model.model` or its compiled form.
    """
    forward = model.model if backbone is None else backbone
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden = forward(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask(),
            use_cache=False,
        ).last_hidden_state
        taught = batch.targets != IGNORED
        logits = model.lm_head(hidden[taught])
    return F.cross_entropy(logits.float(), batch.targets[taught])


def layer_states(
    backbone: LlamaModel, token_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor
) -> list[torch.Tensor]:
    """States behind every layer, before the last norm: [rows, row_len, width] each.

    Args:
        backbone: the model without its head.
        token_ids: [rows, row_len].
        position_ids: [rows, row_len].
        mask: as `Batch.attention_mask`.
        kept: bool [layers, rows]; a layer leaves the states of other rows as they are. It computes them all the
            same: shapes do not change from step to step, so that one compiled form does.
    """
    states = backbone.embed_tokens(token_ids)
    angles = backbone.rotary_emb(states, position_ids=position_ids)
    behind = []
    for layer, rows in zip(backbone.layers, kept, strict=True):
        changed = layer(
            states, attention_mask=mask, position_ids=position_ids, use_cache=False, position_embeddings=angles
        )
        states = torch.where(rows[:, None, None], changed, states)
        behind.append(states)
    return behind


def exit_losses(
    model: LlamaForCausalLM,
    batch: Batch,
    autocast: bool,
    layers: Iterable[int],
    kept: torch.Tensor | None = None,
    run: Callable[..., list[torch.Tensor]] = layer_states,
) -> dict[int, torch.Tensor]:
    """Mean cross entropy (nats) over the taught tokens, for each number of layers the model is left behind.

    Args:
        model: its own norm and head read the states.
        batch: what it is judged on.
        autocast: whether to compute in bfloat16.
        layers: where it is left; the number of all its layers is no early exit.
        kept: see `layer_states`; None: all.
        run: `layer_states` or its compiled form.
    """
    if kept is None:
        kept = torch.ones(len(model.model.layers), len(batch.token_ids), dtype=torch.bool)
    taught = batch.targets != IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        behind = run(model.model, batch.token_ids, batch.position_ids, batch.attention_mask(), kept)
        logits = {layer: model.lm_head(model.model.norm(behind[layer - 1][taught])) for layer in layers}
    return {layer: F.cross_entropy(each.float(), batch.targets[taught]) for layer, each in logits.items()}
