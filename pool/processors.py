"""The logits processors of a request, checked before the first token, and what they need of the tokenizer."""

from __future__ import annotations

from functools import lru_cache

from decoding.processor_chain import own_processors
from decoding.processors.base import PACKAGE
from pool.text import TextTokenizer
from turnout.errors import invalid, out_of_range
from turnout.part_choice import PartChoice
from turnout.registry import MethodInfo, all_methods
from turnout.types import SamplingParams

SOME_LAYERS = 2  # whether a processor reads any does not depend on how many there are


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


def check_use(sampling: SamplingParams, method: MethodInfo | None, contrasts: bool) -> None:
    """Refuse processors that cannot act in what the request asks for besides them.

    Args:
        sampling: of the request.
        method: that answers it; None while a router has to choose.
        contrasts: whether its rows are combined from several streams.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the processor by its place in the list.
    """
    for place, part in enumerate(own_processors(sampling)):
        reads = part.reads(SOME_LAYERS)
        if contrasts and (reads.hidden or reads.before):
            raise invalid(f"processors.{place}", f"{part.name!r} reads hidden states: not allowed with contrast")
        if not part.prefix_pure and (method is None or method.drafts):
            able = ", ".join(each.name for each in all_methods() if not each.drafts)
            why = "needs a named method where the router chooses" if method is None else f"{method.name!r} drafts"
            raise invalid(
                f"processors.{place}", f"{part.name!r} depends on each token before: {why}; allowed methods: {able}"
            )


def are_prefix_pure(sampling: SamplingParams) -> bool:
    """Whether rows follow from tokens alone under the request's processors: see `LogitsProcessor.prefix_pure`."""
    return all(choice.find(PACKAGE, "processors").prefix_pure for choice in sampling.processors)


@lru_cache(maxsize=256)
def _tokens_with(text: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Ids of the tokens with a text in theirs."""
    sought = text.encode()
    return tuple(token for token, known in enumerate(_all_bytes(tokenizer)) if sought in known)


@lru_cache(maxsize=8)
def _all_bytes(tokenizer: TextTokenizer) -> tuple[bytes, ...]:
    return tuple(map(tokenizer.token_bytes, range(len(tokenizer))))
