"""A causal language model of transformers: what Hugging Face's own ways of generating run on."""

from __future__ import annotations

from typing import Any


def load(folder: str, dtype: str) -> Any:
    """Load a causal language model as transformers does; `dtype` names one of torch's."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
