"""Granite 3 and 4 without experts: Llama with factors on embeddings, residuals, scores and logits."""

from engine.architectures.base import Architecture, Halves, embedding_scale, logit_scale

FACTORS = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.4}

ARCHITECTURE = Architecture(
    title="Granite",
    halves=Halves(factor="residual_multiplier"),
    embedding_scale=embedding_scale,
    logit_scale=logit_scale,
    tiny={"": FACTORS},
)
