"""The tokens that end a text, found in a checkpoint as Hugging Face `generate` finds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from turnout.calls import EndToken

GENERATION, MODEL, TOKENIZER = "generation_config.json", "config.json", "tokenizer"


@dataclass(frozen=True, slots=True)
class EndOfText:
    """Tokens that end a text.

    Attributes:
        ids: of the tokens; may be empty.
        source: what names them: generation_config.json, config.json or tokenizer; empty where nothing does.
    """

    ids: frozenset[int] = frozenset()
    source: str = ""

    def described(self, text: Callable[[int], str]) -> dict[str, Any]:
        """The fields of a `ModelDescription`; `text` gives a token's text."""
        return {"ends": tuple(EndToken(each, text(each)) for each in sorted(self.ids)), "ends_source": self.source}


def end_of_text(folder: Path, tokenizer: Any) -> EndOfText:
    """The ends that the first source with any names; no two sources are joined.

    The order is that of transformers 5.23's `generate`: generation_config.json, or config.json where there is no such
    file (with its `text_config`, see `GenerationConfig.from_model_config`). Where `generate` would never stop, as
    generation_config.json names no token of the model, config.json is asked all the same, and the tokenizer last.

    Args:
        folder: of a checkpoint that `turnout.checkpoint_files.check_checkpoint` accepts.
        tokenizer: the Hugging Face tokenizer in it.
    """
    values = _values(folder / MODEL)
    vocab_size = values.get("text_config", values).get("vocab_size", 0)  # of a wrapper, its text side's
    known = max(len(tokenizer), vocab_size)
    for source, declared in _declared(folder, tokenizer):
        listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
        # The model has no other tokens, so that `generate` never meets them.
        if ids := frozenset(each for each in listed if 0 <= each < known):
            return EndOfText(ids, source)
    return EndOfText()


def _declared(folder: Path, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    """Sources in their order, and what each says: an id, a list of ids or nothing."""
    yield GENERATION, _values(folder / GENERATION).get("eos_token_id")
    if values := _values(folder / MODEL):
        yield MODEL, GenerationConfig.from_model_config(values).eos_token_id
    yield TOKENIZER, tokenizer.eos_token_id


def _values(file: Path) -> dict[str, Any]:
    """A file's JSON object, empty where there is no such file."""
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return values
