"""A fresh Llama-shaped model from a recipe, and its loss on a packed batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

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
