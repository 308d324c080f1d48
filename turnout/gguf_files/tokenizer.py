"""The tokenizer.json and tokenizer_config.json that a GGUF file's metadata amounts to.

Byte-level BPE (`tokenizer.ggml.model` gpt2), whose way to cut text into words is named by `tokenizer.ggml.pre`, and
SentencePiece BPE (llama). The patterns are those of the models' own tokenizer.json, which llama.cpp's follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnout.gguf_files.settings import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}|{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}|\p{{N}}{{1,3}}{_REST}"
# `tokenizer.ggml.pre` -> patterns that split a text one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (DIGIT, GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (QWEN2,)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT4O,)),
}
# A word that is a token is that token, whatever the merges say; and a text begins with the begin-of-text token.
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
COMPOSING = frozenset({"qwen2", "deepseek-r1-qwen"})  # these models' own tokenizers bring a text into NFC


def tokenizer_of(data: Metadata) -> dict[str, Any]:
    """The tokenizer.json of a model.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the file holds no tokenizer, or one that is not supported.
    """
    kind = data.need("tokenizer.ggml.model")
    if kind not in KINDS:
        raise data.refusal(f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join(KINDS)}")
    tokens = _tokens(data)
    if len(set(tokens)) != len(tokens):
        raise data.refusal("tokenizer.ggml.tokens names a token twice, which is not supported")
    made: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    made |= KINDS[kind](data, tokens)
    made["added_tokens"] = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind_of_token != USER_DEFINED,
        }
        for token_id, kind_of_token in enumerate(_types(data, tokens))
        if kind_of_token in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    made["post_processor"] = _begins(data, tokens) if _adds_bos(data) else None
    return made


def tokenizer_config_of(data: Metadata) -> dict[str, Any]:
    """The tokenizer_config.json of a model."""
    tokens = _tokens(data)
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{name}_token": data.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
    special = {name: token for name, token_id in named.items() if (token := _token(token_id, tokens)) is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}


def _tokens(data: Metadata) -> list[str]:
    tokens = data.need("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(each, str) for each in tokens):
        raise data.refusal("tokenizer.ggml.tokens must be a list of texts")
    if data.architecture.startswith("gemma"):  # its tokens of several spaces are stored with spaces
        return [SPACE * len(each) if each.isspace() and set(each) == {" "} else each for each in tokens]
    return tokens


def _types(data: Metadata, tokens: list[str]) -> list[int]:
    types: list[int] = data.values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise data.refusal(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return types


def _token(token_id: Any, tokens: list[str]) -> str | None:
    return tokens[token_id] if type(token_id) is int and 0 <= token_id < len(tokens) else None


def _byte_level(data: Metadata, tokens: list[str]) -> dict[str, Any]:
    named = data.need("tokenizer.ggml.pre")
    if named not in SPLITS:
        raise data.refusal(f"tokenizer.ggml.pre {named!r} is not supported; supported: {', '.join(sorted(SPLITS))}")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in SPLITS[named]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    joined = any(kind == NORMAL and len(token) > 1 for token, kind in zip(tokens, _types(data, tokens), strict=True))
    merges = [merge.split(" ") for merge in data.need("tokenizer.ggml.merges")] if joined else []
    if not all(len(merge) == 2 for merge in merges):
        raise data.refusal("tokenizer.ggml.merges must be pairs of tokens")
    return {
        "normalizer": {"type": "NFC"} if named in COMPOSING else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": level,
        "model": _bpe(tokens, merges) | {"ignore_merges": named in WHOLE_WORDS},
    }


def _sentencepiece(data: Metadata, tokens: list[str]) -> dict[str, Any]:
    merges = [list(pair) for pair in _merges(data, tokens)]
    prefix = data.values.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    plain = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = data.values.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [plain, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
        "model": _bpe(tokens, merges)
        | {
            "unk_token": _token(unknown, tokens),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(tokens: list[str], merges: list[list[str]]) -> dict[str, Any]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    switches = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **switches, "vocab": vocab, "merges": merges}


def _merges(data: Metadata, tokens: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs that SentencePiece joins, best first: those whose joined token has the highest score."""
    scores = data.need("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise data.refusal(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    if data.architecture.startswith("gemma"):  # its merges follow the order of its tokens
        scores = [-place for place in range(len(tokens))]
    types = _types(data, tokens)
    joined = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] in (NORMAL, USER_DEFINED)}
    ranked = sorted((token for token in joined if len(token) > 1), key=lambda token: -scores[joined[token]])
    for token in ranked:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in joined and pair[1] in joined]
        yield from sorted(known, key=lambda pair: (joined[pair[0]], joined[pair[1]]))


def _adds_bos(data: Metadata) -> bool:
    kind, named = data.values["tokenizer.ggml.model"], data.values.get("tokenizer.ggml.pre")
    adds = data.values.get("tokenizer.ggml.add_bos_token", kind == "llama" or named in WHOLE_WORDS)
    return bool(adds) and _token(data.values.get("tokenizer.ggml.bos_token_id"), _tokens(data)) is not None


def _begins(data: Metadata, tokens: list[str]) -> dict[str, Any]:
    """A post-processor that puts the begin-of-text token first."""
    token_id = data.values["tokenizer.ggml.bos_token_id"]
    token = tokens[token_id]
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [first, text, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [first, text], "pair": pair, "special_tokens": special}


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
