"""The processors of a request in the order in which they act, applied to the rows of a step by class, not by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from decoding.few_left import shortened
from decoding.processors.base import NOTHING, PACKAGE, Batch, LogitsProcessor, Stage
from decoding.processors.count_penalties import CountPenalties
from decoding.processors.logit_bias import LogitBias
from decoding.processors.min_p import MinP
from decoding.processors.repetition_penalty import RepetitionPenalty
from decoding.processors.temperature import Temperature
from decoding.processors.top_k import TopK
from decoding.processors.top_p import TopP
from decoding.read_spec import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.step_states import PastStates, StepStates
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from decoding.model import ModelPool

NO_NETWORKS: Mapping[int, Any] = MappingProxyType({})
# Of `SamplingParams`: all that a chain depends on.
FIELDS = (
    *("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("temperature", "top_k", "top_p", "min_p", "processors"),
)
OWN = 100  # ranks of the request's own processors in a stage; those of the API's flat fields are before


@dataclass(frozen=True, slots=True)
class Link:
    """A processor at its place; rows whose links are alike but for the parameters are processed together."""

    stage: Stage
    rank: int
    part: LogitsProcessor

    @property
    def place(self) -> tuple[int, int, str]:
        """What rows are ordered and grouped by: within a row each place occurs once, in ascending order."""
        return self.stage, self.rank, self.part.name


class Chain:
    """Processors of one sequence.

    Args:
        sampling: parameters of the request.
        networks: of its own processors, by their places in `sampling.processors`.

    Attributes:
        sampling: the parameters, or others that ask for the same processors.
        before: those that act before structures and banned tokens.
        after: those that act after them, on rows that a token is drawn from.
        after_greedy: those of them that act on rows of which the best token is taken.
        past: hidden states of the sequence's tokens, where a processor reads them.
    """

    __slots__ = ("_asked", "_networks", "_reads", "after", "after_greedy", "before", "past", "sampling")

    def __init__(self, sampling: SamplingParams, networks: Mapping[int, Any] = NO_NETWORKS) -> None:
        self.sampling, self._asked, self._networks = sampling, _asked(sampling), networks
        links = [Link(part.stage, rank, part) for rank, part in _flat(sampling)]
        links += [Link(part.stage, OWN + rank, part) for rank, part in enumerate(own_processors(sampling, networks))]
        links.sort(key=lambda link: link.place)
        self.before = tuple(link for link in links if link.stage < Stage.TEMPERATURE)
        self.after = tuple(link for link in links if link.stage >= Stage.TEMPERATURE)
        self.after_greedy = tuple(link for link in self.after if not link.part.keeps_best)
        self.past = PastStates()
        self._reads: dict[int, ReadSpec] = {}

    def reads(self, num_layers: int) -> ReadSpec:
        """What its processors read of each row: see `LogitsProcessor.reads`."""
        found = self._reads.get(num_layers)
        if found is None:
            found = NOTHING
            for link in (*self.before, *(self.after_greedy if self.sampling.greedy else self.after)):
                found = found | link.part.reads(num_layers)
            self._reads[num_layers] = found
        return found

    def fork(self) -> Chain:
        """Return the chain of a fork: processors of its own, and the same states."""
        twin = Chain(self.sampling, self._networks)
        twin.past = self.past.fork()
        return twin

    def fits(self, sampling: SamplingParams) -> bool:
        """Whether other parameters ask for the same processors; they are then its own."""
        if fits := _asked(sampling) == self._asked:
            self.sampling = sampling
        return fits


def own_processors(sampling: SamplingParams, networks: Mapping[int, Any] = NO_NETWORKS) -> list[LogitsProcessor]:
    """The processors that a request lists.

    Args:
        sampling: parameters of the request.
        networks: that they ask, by their places in the list; a processor without its own leaves rows as they are.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT, naming the processor by its place in the list.
    """
    made = [choice.make(PACKAGE, f"processors.{place}") for place, choice in enumerate(sampling.processors)]
    for place, network in networks.items():
        if place < len(made):
            made[place].use(network)
    return made


def open_networks(sampling: SamplingParams, models: ModelPool) -> dict[int, Any]:
    """Open what the processors of a request ask: see `Sequence.networks` and `LogitsProcessor.network`."""
    opened = ((place, part.network(models)) for place, part in enumerate(own_processors(sampling)))
    return {place: network for place, network in opened if network is not None}


def _asked(sampling: SamplingParams) -> tuple[Any, ...]:
    return tuple(getattr(sampling, name) for name in FIELDS)


def _flat(sampling: SamplingParams) -> Iterator[tuple[int, LogitsProcessor]]:
    """Processors that the API's flat fields ask for, each with its rank, in their documented order.

    A field's rank is the same whatever else is asked for, so that rows of different requests are processed together.
    """
    if sampling.logit_bias:
        yield 0, LogitBias(LogitBias.Params(bias=sampling.logit_bias))
    if sampling.repetition_penalty != 1.0:
        yield 1, RepetitionPenalty(RepetitionPenalty.Params(penalty=sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        yield 2, CountPenalties(CountPenalties.Params(presence=presence, frequency=frequency))
    if sampling.temperature not in (0.0, 1.0):
        yield 3, Temperature(Temperature.Params(temperature=sampling.temperature))
    if sampling.top_k:
        yield 4, TopK(TopK.Params(k=sampling.top_k))
    if sampling.top_p < 1.0:
        yield 5, TopP(TopP.Params(p=sampling.top_p))
    if sampling.min_p:
        yield 6, MinP(MinP.Params(p=sampling.min_p))


def chain_of(seq: Sequence) -> Chain:
    """The sequence's chain; made once, and again where other processors are asked for since."""
    chain = seq.chain
    if chain is None or (chain.sampling is not seq.sampling and not chain.fits(seq.sampling)):
        chain = seq.chain = Chain(seq.sampling, seq.networks)
    return chain


def reads_of(seq: Sequence, num_layers: int) -> ReadSpec:
    """Return what the sequence's processors read of each row: see `LogitsProcessor.reads`."""
    return chain_of(seq).reads(num_layers) if seq.sampling.processors else NOTHING


def apply(
    logits: torch.Tensor,
    raw: torch.Tensor,
    contexts: Rows[RowContext],
    links: Rows[tuple[Link, ...]],
    states: StepStates | None = None,
) -> torch.Tensor:
    """Apply to each row its links, in their order.

    Args:
        logits: float32 [rows, vocab]; modified, unless they are `raw` itself.
        raw: float32 [rows, vocab], before any processor.
        contexts: of the rows.
        links: of the rows.
        states: of the rows.

    Returns:
        float32 [rows, vocab]; `logits` itself where no row has a link.
    """
    batch = Batch(contexts, raw, None, states)
    if logits.device.type != "cpu":
        return _applied(logits, batch, links)
    parted = [_parted(chain) for chain in links]
    made = _applied(logits, batch, [whole for whole, _ in parted])
    after = [rest for _, rest in parted]
    if not any(after):
        return made
    made = made.clone() if made is raw else made.contiguous()
    for few in shortened(made, [row for row, rest in enumerate(after) if rest]):
        values = _applied(few.values, batch.of(few.rows), [after[row] for row in few.rows])
        few.put_back(values, made)
        for row in few.rows:
            after[row] = ()
    return _applied(made, batch, after)


def _parted(chain: tuple[Link, ...]) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Part a row's links into those up to its first truncation, and those after it that can do with what is left."""
    if len(chain) < 2:
        return chain, ()
    cut = next((place + 1 for place, link in enumerate(chain) if link.stage >= Stage.TRUNCATE), len(chain))
    return (chain[:cut], chain[cut:]) if all(link.part.reads_values for link in chain[cut:]) else (chain, ())


def _applied(logits: torch.Tensor, batch: Batch, links: Rows[tuple[Link, ...]]) -> torch.Tensor:
    """Return what each row's links make of it, [rows, any]; not modified, but itself where there are none."""
    groups: dict[tuple[int, int, str], tuple[list[int], list[LogitsProcessor]]] = {}
    for row, chain in enumerate(links):
        for link in chain:
            rows, parts = groups.setdefault(link.place, ([], []))
            rows.append(row)
            parts.append(link.part)
    given = logits
    for _, (rows, parts) in sorted(groups.items()):
        cls = type(parts[0])
        if len(rows) == len(links):
            logits = cls.apply(logits, parts, batch)
        else:
            places = torch.tensor(rows, device=logits.device)
            made = cls.apply(logits[places], parts, batch.of(rows))
            logits = logits.index_copy(0, places, made) if logits is given else logits.index_copy_(0, places, made)
    return logits
