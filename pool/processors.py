"""The logits processors of a request, checked before the first token, and what they need of the tokenizer."""

from __future__ import annotations

from functools import lru_cache

from decoding.processor_chain import own_processors
from pool.text import TextTokenizer
from turnout.errors import invalid, out_of_range
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams


def with_processors(sampling: SamplingParams, tokenizer: TextTokenizer, vocab_size: int) -> SamplingParams:
    """The same sampling parameters, with processors that know the ids of the texts they name.

    Raises:
        TurnoutError: NOT_FOUND, INVALID_ARGUMENT or OUT_OF_RANGE, naming the processor by its place in the list.
    """
    made = []
    for place, part in enumerate(own_processors(sampling)):
        if part.greedy_only and not sampling.greedy:
            why = f"scores candidates for a search: it needs temperature 0 (got {sampling.temperature:g})"
            raise invalid(f"processors.{place}", f"{part.name!r} {why}")
        for token in part.token_ids(part.params):
            if not 0 <= token < vocab_size:
                raise out_of_range(f"processors.{place}", f"token id {token}; allowed: 0 to {vocab_size - 1}")
        params = part.encoded(part.params, lambda text: _tokens_with(text, tokenizer))
        made.append(PartChoice(name=part.name, params=params.model_dump(exclude_defaults=True)))
    return sampling.model_copy(update={"processors": tuple(made)})


@lru_cache(maxsize=256)
def _tokens_with(text: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Ids of the tokens with a text in theirs."""
    sought = text.encode()
    return tuple(token for token, known in enumerate(_all_bytes(tokenizer)) if sought in known)


@lru_cache(maxsize=8)
def _all_bytes(tokenizer: TextTokenizer) -> tuple[bytes, ...]:
    return tuple(map(tokenizer.token_bytes, range(len(tokenizer))))
