"""A small model with another vocabulary than its large one, and the same weights but for the order of its tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from training.random_models import BYTE_VOCAB, byte_tokenizer

NAMES = ("<s>", "</s>", "[system]", "[user]", "[assistant]")
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
LETTERS = 94  # ids of printable ASCII in `byte_tokenizer`
PAIRS = 8  # tokens of two bytes that the large model does not have


def foreign_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes in the reverse order, eight pairs of letters, and special tokens by other names at other places."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocab = {char: place for place, char in enumerate([*NAMES, *alphabet])}
    merges = [(char, "e") for char in "hrtnmdsl"]
    vocab |= {left + right: BYTE_VOCAB + place for place, (left, right) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=NAMES[0],
        eos_token=NAMES[1],
        additional_special_tokens=list(NAMES[2:]),
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def save_foreign_pair(source: Path, folder: Path) -> Path:
    """`large` and `small` of a folder, whose tokens are bytes: `large` as it is, `small` in another vocabulary.

    Both write mostly letters, as text needs that is to be carried over: other bytes hardly weigh. `small` thinks as it
    did where it reads the same bytes; a token of two has no weight.
    """
    for name in ("large", "small"):
        model = AutoModelForCausalLM.from_pretrained(source / name, dtype=torch.float32)
        rows = model.get_input_embeddings().weight.detach().clone()
        rows[LETTERS:256] *= 0.02
        if name == "small":
            # There: bytes, then special tokens at 256. Here: special tokens, bytes reversed, pairs.
            rows = torch.cat([rows[[257, 256, 258, 259, 260]], rows[:256].flip(0), torch.zeros(PAIRS, rows.shape[1])])
            model.resize_token_embeddings(len(rows), mean_resizing=False)
            for config in (model.config, model.generation_config):
                config.eos_token_id, config.bos_token_id, config.pad_token_id = 1, 0, 0
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(rows)
        model.save_pretrained(folder / name)
        (foreign_tokenizer() if name == "small" else byte_tokenizer()).save_pretrained(folder / name)
    return folder
