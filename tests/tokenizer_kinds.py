"""Small tokenizers of every kind that people bring, and texts that are hard for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from training.random_models import CHAT_TEMPLATE, SPECIAL

WORDS = (
    "Hello",
    "World",
    "the",
    "cat",
    "a",
    "b",
    "1",
    "2",
    "3",
    ".",
    ",",
    "\n",
    "<",
    "|",
    ">",
    "end",
    "user",
    "é",
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = [
    *"abcHelorWdthe 123.,\n<|>",
    "é",
    "日",
    "本",
    "東",
    "京",
    "。",
    "\u3000",
    "😀",
    "👍",
    "🇩",
    "🇪",
    "👩\u200d🚀",
    "👍🏽",
    "𠀋",
    "\u0301",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.lists(
    st.sampled_from([*CHARACTERS, *WORDS, "Hello World the cat", "\ufffd"]), max_size=12
).map("".join)


def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3, Qwen: bytes, some of them joined across characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: place for place, char in enumerate(alphabet)}
    merges = []
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The first two bytes of an emoji; a space and the first byte of a character; a word with its space.
    for text, parts in (("😀", 2), (" é", 2), (" c", 2), ("日", 2), ("本。", 4)):
        written = shown.pre_tokenize_str(text)[0][0][:parts]
        for end in range(1, len(written)):
            left, right = written[:end], written[end]
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = shown
    core.decoder = decoders.ByteLevel()
    return core


def byte_fallback(strips: bool) -> Tokenizer:
    """As of Llama 2, Mistral, Phi-3 (which strip the first space) and Gemma: pieces with ▁, bytes for all else."""
    pieces = ["<unk>", *BYTES, "▁", *(f"▁{word}" for word in WORDS), *WORDS, *dict.fromkeys("HelloWorldthecatendusr")]
    vocab = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    merges = []
    for word in [*(f"▁{word}" for word in WORDS if len(word) > 1), *(word for word in WORDS if len(word) > 1)]:
        for end in range(1, len(word)):
            left, right = word[:end], word[end]
            for piece in (left, right, left + right):
                vocab.setdefault(piece, len(vocab))
            if (left, right) not in merges:
                merges.append((left, right))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if strips:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return core


def unigram() -> Tokenizer:
    """As of T5 and XLM-R, with bytes for what it has no piece for."""
    pieces = [("<unk>", 0.0), *((byte, -20.0) for byte in BYTES), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS] + [(char, -8.0) for char in dict.fromkeys("".join(WORDS))]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return core


def word_piece() -> Tokenizer:
    """As of BERT: words, and their parts with ##."""
    letters = dict.fromkeys("".join(WORDS).replace("\n", "") + "日本東京é")
    pieces = ["[UNK]", *WORDS, *letters, *(f"##{char}" for char in letters)]
    core = Tokenizer(
        models.WordPiece({piece: place for place, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]")
    )
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(cleanup=True)
    return core


def suffixed() -> Tokenizer:
    """As of the first GPT and CLIP: a word's last token says so, and the space comes with the next."""
    letters = dict.fromkeys("".join(WORDS).replace("\n", ""))
    pieces = [*letters, *(f"{char}</w>" for char in letters)]
    core = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.BPEDecoder("</w>")
    return core


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": lambda: byte_fallback(strips=False),
    "byte_fallback_strip": lambda: byte_fallback(strips=True),
    "unigram": unigram,
    "word_piece": word_piece,
    "suffixed": suffixed,
}


def save_kind(kind: str, folder: Path) -> Path:
    """A tokenizer of a kind in a folder, with the special tokens and the chat template of the random models."""
    core = KINDS[kind]()
    core.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(folder)
    return folder
