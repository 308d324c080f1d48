"""Models of text and images, of which the text side is run as a causal language model of its own."""

from __future__ import annotations

import re
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from turnout.errors import invalid

# Shown to answer text as the whole model does (tests/engine/test_text_side.py). Others may attend otherwise: PaliGemma
# sees a prompt in both directions, and Qwen-VL counts positions in three dimensions.
WRAPPERS = ("gemma3", "llama4", "llava", "mistral3")
# Names of weights of the text side, in checkpoints of transformers before and since version 5 -> in its own model.
RENAMED = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}
OF_TEXT = re.compile("|".join([*RENAMED, r"^lm_head\."]))


def is_wrapper(values: dict[str, Any]) -> bool:
    """Whether a config.json is that of a model with a text side among others."""
    kind = values.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    return known and "text_config" in CONFIG_MAPPING[kind].sub_configs


def text_side(config: Any) -> Any:
    """Return the configuration of the text side of a wrapper, as its checkpoint stores that side's weights.

    Args:
        config: the wrapper's Hugging Face configuration.
    """
    text = config.text_config
    for name in ("tie_word_embeddings", "quantization_config"):
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text


def check_wrapper(kind: Any, field: str) -> None:
    """Refuse a wrapper whose text side is not known to be a causal language model by itself.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, naming those that are.
    """
    if kind not in WRAPPERS:
        raise invalid(field, f"the text side of {kind!r} is not supported; supported: that of {', '.join(WRAPPERS)}")


def note_of(kind: str, unused: list[str]) -> str:
    """Say what the operator should know of a wrapper that was loaded.

    Args:
        kind: its `model_type`.
        unused: names of weights that were not loaded.
    """
    return f"text side of {kind!r} only: {len(unused)} weights of its other parts are not loaded; images are refused"
