"""The logits processors of a request, checked before the first token, and what they need of the tokenizer."""

from __future__ import annotations

from functools import lru_cache

from decoding.processor_chain import own_processors
from pool.text import TextTokenizer
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams


def with_processors(sampling: SamplingParams, tokenizer: TextTokenizer) -> SamplingParams:
    """The same sampling parameters, with processors that know the ids of the texts they name.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT, naming the processor by its place in the list.
    """
    made = []
    for place, part in enumerate(own_processors(sampling)):
        if part.greedy_only and not sampling.greedy:
            why = f"scores candidates for a search: it needs temperature 0 (got {sampling.temperature:g})"
            raise invalid(f"processors.{place}", f"{part.name!r} {why}")
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
