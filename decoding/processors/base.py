"""The slot of logits processors: pure functions from rows of logits to rows of logits, for all rows of a step at once.

A module here assigns its class to `PART`; a request chooses it by file name. What it computes for a row depends on the
sequence's tokens, the hypothetical tokens after them and the row alone, so drafts, forks and replays need nothing more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from decoding.parts import Part
from decoding.read_spec import ReadSpec
from decoding.row_context import RowContext
from decoding.step_states import LAST, StepStates

if TYPE_CHECKING:
    from decoding.model import ModelPool

PACKAGE = "decoding.processors"
NEG_INF = float("-inf")
NOTHING = ReadSpec(draw=None)
HUGE = 3e38  # above all logits
LEAST = 2.0**-126  # less than what matters differs by; nothing smaller, which some libraries make 0


class Stage(IntEnum):
    """When a processor acts. Structures and banned tokens act between `MIX` and `TEMPERATURE`.

    What acts before them excludes no token: it could be the only one that they allow.

    bias: adds to logits, whatever was written. penalty: by the tokens before. mix: other distributions mixed in.
    temperature: the row as a whole made flatter or sharper. truncate: improbable tokens left out. reshape: the rest.
    """

    BIAS = 0
    PENALTY = 1
    MIX = 2
    TEMPERATURE = 3
    TRUNCATE = 4
    RESHAPE = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that a processor is applied to.

    Attributes:
        contexts: of each row, the sequence and the hypothetical tokens after it.
        all_raw: float32 [all, vocab], the raw logits of the step's rows.
        places: int64 [rows], which of them these rows are; None: they are all.
        states: hidden states of the step's rows; None: there are none.
    """

    contexts: Rows[RowContext]
    all_raw: torch.Tensor
    places: torch.Tensor | None = None
    states: StepStates | None = None

    def of(self, rows: Rows[int]) -> Batch:
        """Return the batch of some of these rows."""
        places = torch.tensor(rows, device=self.all_raw.device)
        where = places if self.places is None else self.places[places]
        return replace(self, contexts=[self.contexts[row] for row in rows], places=where)

    @property
    def raw(self) -> torch.Tensor:
        """float32 [rows, vocab], the logits before any processor; not to be modified."""
        return self.all_raw if self.places is None else self.all_raw[self.places]

    def hidden(self, layer: int) -> torch.Tensor | None:
        """Hidden states after a layer: [rows, width]; see `ReadSpec.hidden`. None: they were not computed.

        Rows that only draft may run through some layers, or belong to another model: processors then leave them.
        """
        found = None if self.states is None else self.states.rows.get(layer)
        return found if found is None or self.places is None else found[self.places]

    def head(self, layer: int, normed: bool = True) -> torch.Tensor | None:
        """Logits that the head reads from the states after a layer: float32 [rows, vocab]; None as in `hidden`.

        Args:
            layer: which one.
            normed: whether the last norm comes between them, as it does after the last layer.
        """
        found = self.hidden(layer)
        if found is None or self.states is None:
            return None
        return self.states.head(found, normed and layer != LAST)

    def path(self, row: int) -> tuple[int, ...]:
        """Places in `states.fed` of a row's hypothetical tokens, in their order; -1: not in this forward."""
        if self.states is None or not self.states.paths:
            return (-1,) * len(self.contexts[row].path)
        return self.states.paths[row if self.places is None else int(self.places[row])]

    def tensor(self, values: Rows[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A value a row, where the logits are: [rows, 1]."""
        return torch.tensor(values, dtype=dtype, device=self.all_raw.device)[:, None]


class LogitsProcessor(Part):
    """A logits processor. Parameters that ask for nothing must leave a row as it is.

    Attributes:
        stage: when it acts; within a stage the request's own processors act in the order in which it lists them.
        keeps_best: whether the most probable token stays the most probable one: it is then not applied to greedy rows.
        greedy_only: whether it scores candidates for a search, so that a request must have temperature 0.
        prefix_pure: whether a row follows from tokens alone. If not, it also depends on what was recorded with them
            (`Token.surprise_bits`): no draft can be judged by it, and an answer is made again, not gone on with.
        reads_values: whether it goes by the values of a row alone, not by which tokens they are of, and leaves excluded
            tokens so: where few are left, it is shown these only.
        off: parameters with which it changes nothing.
    """

    where = "processors"
    stage: ClassVar[Stage]
    keeps_best: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False
    prefix_pure: ClassVar[bool] = True
    reads_values: ClassVar[bool] = False
    off: ClassVar[Mapping[str, Any]]

    @classmethod
    def encoded(cls, params: Any, tokens_with: Callable[[str], tuple[int, ...]]) -> Any:
        """Parameters in which texts are also given as ids; called once a request, where there is a tokenizer.

        Args:
            params: of this class.
            tokens_with: ids of the tokens with a text in theirs.
        """
        return params

    @classmethod
    def token_ids(cls, params: Any) -> Iterable[int]:
        """Ids that parameters of this class name; a request must not name any that the vocabulary lacks."""
        return ()

    def network(self, models: ModelPool) -> torch.nn.Module | None:
        """Open the network that it asks, before the first token; None: it asks none.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT, naming `where`: there is none, or it does not fit the models.
        """
        return None

    def use(self, network: Any) -> None:
        """Take the network that `network` opened; next to the model, wherever that is."""

    def reads(self, num_layers: int) -> ReadSpec:
        """What it needs of a row besides the logits, with its parameters.

        Args:
            num_layers: of the model that computes the row.

        Returns:
            `hidden`: layers for `Batch.hidden` and `Batch.head`; `before`: layers of which states of all tokens before
            the row are kept, in `Chain.past`; `surprise`: recorded with each token. All else is not looked at.
        """
        return NOTHING

    @classmethod
    @abstractmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """Process rows of different requests.

        Args:
            logits: float32 [rows, vocab], as earlier processors left them; excluded tokens are -inf. Not to be
                modified.
            parts: each row's own processor, of this class.
            batch: what rows these are.

        Returns:
            float32 [rows, vocab]; at least one token of each row is finite.
        """


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of rows, [rows, vocab] -> [rows, 1], bit for bit the same in every batch.

    `torch.sum` adds in an order that depends on the number of rows and of threads; halves are added element by element.
    """
    while (size := values.shape[-1]) > 1:
        half = size // 2
        added = values[:, :half] + values[:, size - half :]
        values = torch.cat([added, values[:, half : half + 1]], -1) if size % 2 else added
    return values


def row_entropy(probs: torch.Tensor) -> torch.Tensor:
    """Entropies of rows in nats, [rows, vocab] -> [rows, 1]; `torch.special.entr` takes several times as long."""
    surprise = probs.clamp_min(torch.finfo(probs.dtype).tiny).log_().neg_()
    return row_sums(surprise.mul_(probs))


def remaining(logits: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each row are not excluded: float32 [rows, 1]."""
    if bool((logits.amin(-1) > NEG_INF).all()):
        return logits.new_full((len(logits), 1), logits.shape[-1])
    return (logits > NEG_INF).sum(-1, keepdim=True).float()


def keep_from(logits: torch.Tensor, scores: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Exclude the tokens whose scores are below their rows' floors; those with a row's best score always stay.

    Args:
        logits: float32 [rows, vocab].
        scores: float32 [rows, vocab]; they grow with the logits.
        floor: float32 [rows, 1]; -inf keeps all.
    """
    floor = torch.minimum(floor, scores.amax(-1, keepdim=True)).clamp_min(-HUGE)
    return exclude(logits, floor - scores)


def exclude(logits: torch.Tensor, excess: torch.Tensor) -> torch.Tensor:
    """Exclude the tokens whose excess, float32 [rows, vocab], is above 0; it is overwritten.

    By a bound for each, huge or -inf: on a CPU `masked_fill` and `where` take several times as long.
    """
    bound = torch.threshold_(excess.neg_(), -LEAST, NEG_INF)
    return torch.minimum(bound.add_(HUGE), logits)
