"""The logits processors of a request, checked before the first token, and what they need of the tokenizer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from decoding.model import ModelPool, Request
from decoding.processor_chain import open_networks, own_processors
from decoding.processors.base import PACKAGE
from pool.text import TextTokenizer
from turnout.errors import invalid, out_of_range
from turnout.part_choice import PartChoice
from turnout.registry import MethodInfo, all_methods
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from pool.validation import ResolvedMethod

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
        if method is not None and method.draws and (reads.hidden or reads.before or reads.surprise):
            why = f"reads more than logits, and {method.name!r} draws tokens from those itself: not allowed together"
            raise invalid(f"processors.{place}", f"{part.name!r} {why}")
        if not part.prefix_pure and (method is None or method.drafts):
            able = ", ".join(each.name for each in all_methods() if not each.drafts and not each.draws)
            why = "needs a named method where the router chooses"
            if method is not None:
                why = f"{method.name!r} drafts or searches"
            raise invalid(
                f"processors.{place}", f"{part.name!r} depends on each token before: {why}; allowed methods: {able}"
            )


def read_logits_only(sampling: SamplingParams) -> bool:
    """Whether logits and tokens are all that the request's processors need: no states, networks or surprises."""
    reads = (part.reads(SOME_LAYERS) for part in own_processors(sampling))
    return not any(each.hidden or each.before or each.surprise for each in reads)


def open_processors(request: Request, plan: ResolvedMethod, models: ModelPool) -> None:
    """Open the networks of a request's processors for its answers; note whose tokens they leave as they are.

    Raises:
        TurnoutError: see `LogitsProcessor.network`.
    """
    sampling, method, params = request.sequence.sampling, plan.method, plan.params
    networks = open_networks(sampling, models)
    writing = {getattr(params, "model", "large")}
    if not method.keeps_law(params):
        writing |= method.needs | getattr(params, "needs", frozenset())
    for place, network in networks.items():
        others = sorted({each.name for each in map(models.by_role, writing) if each.digest != network.model})
        if others:
            name = sampling.processors[place].name
            request.notes.append(f"processors.{place}: {name} leaves tokens of {', '.join(others)} as they are")
    for sequence in {request.sequence, *request.answers}:
        sequence.networks, sequence.chain = networks, None


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
