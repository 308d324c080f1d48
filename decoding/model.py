"""The `Model` base class: operations that methods use, whichever process the model runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from decoding.artifacts import Artifacts
from decoding.drafter_state import Stores
from decoding.operations import (
    Choose,
    Decode,
    Expand,
    Extend,
    Operation,
    PartialForward,
    PrefillAhead,
    Propose,
    Read,
    ScoreContinuations,
    Verify,
)
from decoding.partial_forward import Sketch
from decoding.read_spec import Decision, NoiseKind, Readout, ReadSpec, Score, StopCondition, StopRule, token_of
from decoding.sequence import Sequence
from decoding.translation import Vocabularies
from decoding.tree import DraftTree
from turnout.cost import Meter
from turnout.errors import invalid
from turnout.types import Segment

if TYPE_CHECKING:
    from decoding.code_execution import CodeExecutor
    from decoding.contrast.base import RequestContrast
    from decoding.drafters.base import DraftBudget, Drafter
    from decoding.lengths.base import LengthPolicy
    from decoding.verifiers.base import Verifier, VerifyResult

__all__ = [
    "Busy", "Decision", "NoiseKind", "Model", "ModelPool", "Request", "Readout", "Score", "StopRule", "TokenText",
    "StopCondition", "ReadSpec", "WrappedModel", "token_of",
]  # fmt: skip

R = TypeVar("R")
MEASURES = "measures"  # of `Request.extra`: what a method measured of its answers, by name, for the usage to show


@dataclass(frozen=True, slots=True)
class Busy:
    """Current work of a model: sequences it holds a cache for, and the tokens of these caches."""

    sequences: int
    cached_tokens: int
    capacity: int = 0  # tokens that all caches together may hold; 0: unknown
    block_size: int = 1  # tokens by which a cache grows


class Model(ABC):
    """Causal language model with a KV cache per sequence.

    The sequence is the truth: every operation first computes whatever the cache lacks of it (catch-up), in the
    same forward pass as its own work. Cached positions that no longer agree with the sequence are dropped.
    Operations are values, see `decoding.operations`; a model carries them out in `do`, and the methods named after
    them only make them. What takes no time is a plain call: it is no operation, and never waits.

    Attributes:
        digest: names configuration and weights, whatever the model is called; see `decoding.artifacts`.
    """

    name: str
    num_parameters: int
    vocab_size: int
    max_length: int
    num_layers: int
    digest: str
    by_length: bool  # whether keys depend on the greatest length that a sequence may have
    stores: Stores

    @abstractmethod
    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """Carry out an operation on a sequence."""

    async def extend(
        self, seq: Sequence, tokens: tuple[int, ...] = (), want: ReadSpec = ReadSpec(), every: bool = False
    ) -> list[Readout]:
        """Feed what is missing of `seq`, then `tokens` (hypothetical, not appended); read the next position.

        Returns:
            One row, for the last position; with `every`, one for the last of `seq` and one for each of `tokens`.
        """
        return await self.do(seq, Extend(tokens, want, every))

    async def decode(self, seq: Sequence, until: StopCondition = StopCondition()) -> Segment:
        """Generate and append tokens until `until` or the end of the sequence.

        Returns:
            The appended tokens; `stopped_by` is the rule's name, "max_tokens" or "finish". The rules have seen them.
        """
        op = Decode(until)
        decoded = await self.do(seq, op)
        op.settle(decoded)
        return decoded.segment

    async def expand(self, seq: Sequence, tree: DraftTree, start: int, want: ReadSpec) -> list[Readout]:
        """Feed nodes of a draft that grows, after the sequence's last token: nothing of it is kept.

        Args:
            seq: the sequence; the reading at its end is `extend`'s.
            tree: all nodes so far; those before `start` are as in the call before, whose cache is used again.
            start: first node to read.
            want: what to read.

        Returns:
            One row per node from `start` on.
        """
        return await self.do(seq, Expand(tree, start, want))

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        """Run hypothetical tokens through some of the layers; nothing of it is kept but for `verify`.

        A draft in a row after the sequence's last token that was run with it through the first layers, and through no
        others, is verified from the next layer on.

        Args:
            seq: the sequence.
            sketch: the tokens and the layers; the last norm and the head follow for what is read. For a model
                elsewhere, its exit must be picklable.
            want: what to read; hidden states of layers that run.

        Returns:
            One row per token from `sketch.start` on.
        """
        return await self.do(seq, PartialForward(sketch, want))

    async def read(
        self, seq: Sequence, states: torch.Tensor, paths: Items[tuple[int, ...]], want: ReadSpec, normed: bool = False
    ) -> list[Readout]:
        """Read hidden states through the last norm and the head; no forward.

        Args:
            seq: whose they are.
            states: [R, hidden].
            paths: [R] the hypothetical tokens each stands after.
            want: what to read.
            normed: whether the last norm has been applied.
        """
        return await self.do(seq, Read(states, paths, want, normed))

    async def choose(
        self, seq: Sequence, logits: torch.Tensor, paths: Items[tuple[int, ...]], want: ReadSpec
    ) -> list[Readout]:
        """Read given logits as if the model had computed them; no forward.

        Tokens are drawn under the sequence's sampling parameters, with its noise; "raw" means the given logits.

        Args:
            seq: whose next tokens they are.
            logits: float [R, vocab_size], on any device.
            paths: [R] the hypothetical tokens each row stands after.
            want: what to read; no hidden states.

        Returns:
            One row per row of logits.

        Raises:
            ValueError: the logits are of another shape.
        """
        return await self.do(seq, Choose(logits, paths, want))

    @abstractmethod
    def embed(self, tokens: list[int]) -> torch.Tensor:
        """Return the input embeddings of tokens: float32 [n, hidden], on the CPU.

        Raises:
            TurnoutError: INTERNAL: the weights are elsewhere; only components that run next to them may ask.
        """

    async def propose(self, seq: Sequence, drafter: Drafter, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """Run a drafter next to this model."""
        op = Propose(drafter, room, length)
        proposed = await self.do(seq, op)
        op.settle(proposed)
        return proposed.draft

    async def verify(
        self, seq: Sequence, draft: DraftTree, verifier: Verifier, want: ReadSpec = ReadSpec(draw=None)
    ) -> VerifyResult:
        """Feed the draft in one forward, judge it, keep the accepted path's KV. Appends nothing.

        Args:
            seq: what the draft continues.
            draft: the tree.
            verifier: judges it.
            want: what else to read at the root, every node and every extra row: `VerifyResult.rows`. Tensors that only
                the verifier wanted may be missing there.
        """
        op = Verify(draft, verifier, want)
        verdict = await self.do(seq, op)
        op.settle(verdict)
        return verdict

    @abstractmethod
    def observe(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: VerifyResult) -> None:
        """Let a drafter that runs next to this model learn from a round.

        Not an operation: no caller waits for it. A fault in it may be raised by the next operation on the sequence.
        """

    async def score(self, seq: Sequence, continuations: Items[tuple[int, ...]], top: int = 0) -> list[Score]:
        """Score each continuation of `seq`: log-likelihoods under the raw logits, with `top` alternatives per token."""
        return await self.do(seq, ScoreContinuations(continuations, top))

    async def prefill_ahead(self, seq: Sequence) -> None:
        """Compute what the cache lacks of `seq`, except its last token, when the batch has room (shadow catch-up)."""
        await self.do(seq, PrefillAhead())

    @abstractmethod
    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """Fork `seq`: the twin shares its cached blocks until one of them writes."""

    def fork_many(self, seqs: Items[Sequence]) -> list[Sequence]:
        """Fork each of `seqs`, in their order; one that is listed several times gets one twin for each."""
        return [self.fork(seq) for seq in seqs]

    @abstractmethod
    def release(self, seq: Sequence) -> None:
        """Forget `seq`, and its companion of this model; its full blocks stay reusable as a prefix."""

    @abstractmethod
    def step_seconds(self) -> float:
        """Return the recent wall-clock time of one decode step, in seconds (0.0 before the first)."""

    @abstractmethod
    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        """Return the predicted wall time of a forward, in seconds; 0.0 if it is unknown.

        Args:
            fed: tokens in it.
            attended: positions each attends to, its own included, summed over them.
            sequences: sequences in it.
        """

    @abstractmethod
    def busy(self) -> Busy:
        """Return its current work."""


class WrappedModel(Model):
    """Wrapper of another model, which overrides some of its behaviour and passes on all else.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Model) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `Model.do`."""
        return await self.inner.do(seq, op)

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """See `Model.embed`."""
        return self.inner.embed(tokens)

    def observe(self, seq: Sequence, drafter: Drafter, draft: DraftTree, verdict: VerifyResult) -> None:
        """See `Model.observe`."""
        self.inner.observe(seq, drafter, draft, verdict)

    def fork(self, seq: Sequence, seed: int | None = None) -> Sequence:
        """See `Model.fork`."""
        return self.inner.fork(seq, seed)

    def release(self, seq: Sequence) -> None:
        """See `Model.release`."""
        self.inner.release(seq)

    def step_seconds(self) -> float:
        """See `Model.step_seconds`."""
        return self.inner.step_seconds()

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        """See `Model.forward_seconds`."""
        return self.inner.forward_seconds(fed, attended, sequences)

    def busy(self) -> Busy:
        """See `Model.busy`."""
        return self.inner.busy()


class TokenText(Protocol):
    """Tokenizer interface of methods: the text of tokens."""

    def __hash__(self) -> int:
        """Hash by identity: results computed from a tokenizer are cached by it."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens: the text that methods compare and count."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text: joined, the text's UTF-8; a special token's name."""


@dataclass(slots=True)
class ModelPool:
    """Models that a method may use, by role: any number of them, small and large being the usual ones.

    Attributes:
        models: every name's model.
        roles: the name of the model that fills each role; one model may fill several.
        tokenizer: theirs.
        artifacts: trained for them.
        vocabularies: of models whose tokens are not the large one's.
        code_executor: runs programs that models wrote; None: none are run here.
        clock: seconds; what learns from times reads it, for it stands still while a request has to wait for others.
    """

    models: dict[str, Model]
    roles: dict[str, str]
    tokenizer: TokenText
    artifacts: Artifacts = field(default_factory=Artifacts)
    vocabularies: Vocabularies = field(default_factory=Vocabularies)
    clock: Callable[[], float] = perf_counter
    code_executor: CodeExecutor | None = None

    def by_role(self, role: str) -> Model:
        """Return the model that fills a role, such as "judge".

        Raises:
            TurnoutError: INVALID_ARGUMENT: the pool has none for it.
        """
        if role not in self.roles:
            known = ", ".join(sorted(self.roles))
            raise invalid("method", f"no model has the role {role!r}; the pool's roles: {known}")
        return self.models[self.roles[role]]

    def digest_of(self, role: str) -> str:
        """Return what tells a role's model from others."""
        return self.by_role(role).digest

    def token_cost(self, role: str) -> float:
        """Return what a token of a role's model costs: its parameters, or whatever the pool counts in."""
        return self.by_role(role).num_parameters

    @property
    def small(self) -> Model:
        """The cheap model: draft, or first to answer."""
        return self.by_role("small")

    @property
    def large(self) -> Model:
        """The strong model: target, or called when the small one is unsure."""
        return self.by_role("large")

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters by model name."""
        return {name: model.num_parameters for name, model in self.models.items()}


@dataclass(slots=True)
class Request:
    """Request to a method: the answers to produce. Wire types never get here.

    Attributes:
        id: of the call.
        sequence: holds the prompt; what is generated is appended.
        answers: for a joint method, the sequences of all answers, each with a seed of its own; else `sequence` alone.
            What is appended to one is sent to its reader; what may be discarded is written on forks.
        tenant: whose request it is.
        extra: what a method leaves for the answer's usage; with `candidates` also what answers were chosen from.
        notes: for the person who reads the answer.
        delivered: of an answer made again, the tokens that its reader has: what no seed decides is repeated from them.
        streams: whether segments are only passed on: when they come, the sequence may be longer than they say.
        contrast: streams that the answering model's rows are combined with; their work is in `stream_meter`.
    """

    id: str
    sequence: Sequence
    tenant: str = "default"
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    delivered: tuple[int, ...] = ()
    answers: tuple[Sequence, ...] = ()
    streams: bool = False
    contrast: RequestContrast | None = None
    stream_meter: Meter = field(default_factory=Meter)
    candidates: bool = False

    def __post_init__(self) -> None:
        self.answers = self.answers or (self.sequence,)
