"""A vocabulary of any size made of random words: what masks cost depends on its size, not on what it means."""

from __future__ import annotations

import random
import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from decoding.constraints.base import Vocabulary

END = 1
BLANK = "\u0120"  # how byte-level vocabularies write one
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
COMMON = [12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1.5, 2, 0.8, 0.2, 0.1, 0.2, 0.1]
SIGNS = '{}[]":,.;/\\-_()<>=+*&%$#@!' + BLANK


def random_vocabulary(size: int, seed: int = 3) -> Vocabulary:
    """Ids 0 (padding) and 1 (the end), every byte, then words, numbers and runs of signs, as in real vocabularies."""
    draw = random.Random(seed)
    ids = {"<pad>": 0, "<end>": END}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids[char] = len(ids)
    while len(ids) < size:
        ids.setdefault(_word(draw), len(ids))
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer.to_str(), frozenset({END}))


def _word(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.8:
        word = "".join(draw.choices(LETTERS, COMMON, k=draw.randint(2, 9)))
        return BLANK + word if kind < 0.4 else word.capitalize() if kind < 0.5 else word
    if kind < 0.9:
        return "".join(draw.choices(string.digits, k=draw.randint(2, 3)))
    return "".join(draw.choices(SIGNS, k=draw.randint(2, 5)))
