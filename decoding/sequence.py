"""The token sequence: append-only, shared by every model of a request. A model's KV is only a cache of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from decoding.drafter_state import learner_of
from turnout.cost import Meter
from turnout.types import FinishReason, SamplingParams, Sharing, Token

if TYPE_CHECKING:
    from decoding.constraints.base import Constraint
    from decoding.processor_chain import Chain
    from decoding.thinking import Thinking

DEFAULT_SHARING = Sharing()
plain_token = lru_cache(maxsize=1 << 16)(Token)  # of an id and a source: of a model's plain tokens there are few


class TextStop(Protocol):
    """Detector of stop strings in the generated text; one per sequence, fed every token once, in order.

    Attributes:
        watches: whether there is a string that it looks for.
    """

    @property
    def watches(self) -> bool:
        """See the class."""
        ...

    def feed(self, token_id: int) -> bool:
        """Take the next token; True when the text now contains a stop string."""
        ...

    def clone(self) -> TextStop:
        """Return an independent copy in the same state."""
        ...


class Sequence:
    """Tokens of one answer in the making.

    Args:
        prompt: token ids, at least one.
        sampling: how tokens are chosen; `max_tokens` bounds the answer.
        seed: of the keyed noise.
        eos_ids: ids that end the answer (unless `sampling.ignore_eos`).
        stop: watches for stop strings, when there are any.
        sharing: scope in which other sequences may reuse its cache.
        lossy: whether its cache may come from KV that was stored or reused with a loss.
        tenant: the tenant it is billed to; a model's time is shared equally between tenants.
        low_priority: whether it yields, at every step, to sequences that are not low-priority.

    Attributes:
        owner: whose request it is: not the `tenant` of what the pool asks on an account of its own.
        tokens: prompt and answer; only `append` and `extend` add to it, nothing ever shortens it.
        chain: its logits processors, made of `sampling` when a row is read; forks have their own, but share
            the hidden states of the tokens that both have.
        networks: that its own logits processors ask, by their places in `sampling.processors`; set by the creator.
        constraint: structure of the answer's text; None: free. Set by the creator; forks have their own.
        thinking: how its thinking is found; None: it is not. Set by the creator.
        generated: the answer's tokens, with provenance.
        finish_reason: set when the answer ends; only `reopen` takes it back.
        renderings: the prompt as models with another vocabulary were taught to read it, in their tokens, by model.
        companions: by model, a sequence that this model reads in its place; it is released with this one.
        meter: the work done for it.
    """

    __slots__ = (
        "_ends",
        "chain",
        "companions",
        "constraint",
        "finish_reason",
        "generated",
        "lossy",
        "low_priority",
        "meter",
        "networks",
        "num_prompt_tokens",
        "output_counts",
        "owner",
        "prompt_set",
        "renderings",
        "sampling",
        "seed",
        "sharing",
        "stop",
        "tenant",
        "thinking",
        "tokens",
    )

    def __init__(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams,
        seed: int,
        eos_ids: Iterable[int] = (),
        stop: TextStop | None = None,
        sharing: Sharing = DEFAULT_SHARING,
        tenant: str = "default",
        lossy: bool = False,
        low_priority: bool = False,
    ) -> None:
        self.tokens: list[int] = list(prompt)
        if not self.tokens:
            raise ValueError("a sequence needs at least one prompt token")
        self.num_prompt_tokens = len(self.tokens)
        self.sampling = sampling
        self.seed = seed
        self.stop = stop
        self.sharing = sharing
        self.lossy = lossy
        self.tenant = self.owner = tenant
        self.low_priority = low_priority
        self.chain: Chain | None = None
        self.networks: Mapping[int, Any] = {}
        self.constraint: Constraint | None = None
        self.thinking: Thinking | None = None
        self.renderings: dict[str, tuple[int, ...]] = {}
        self.companions: dict[str, Sequence] = {}
        self.generated: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self.meter = Meter()
        self.prompt_set = frozenset(self.tokens)
        self.output_counts: dict[int, int] = {}
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(eos_ids)
        self._ends = frozenset(ends)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def finished(self) -> bool:
        """True if the answer has ended."""
        return self.finish_reason is not None

    @property
    def learner(self) -> str:
        """Owner of the stores that drafters and monitors use for it: see `decoding.drafter_state.learner_of`."""
        return learner_of(self.owner, self.tenant)

    @property
    def greatest_length(self) -> int:
        """Most of its tokens that a model ever has to read: the last one of the longest answer is not read."""
        return self.num_prompt_tokens + self.sampling.max_tokens - 1

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        return self._ends

    @property
    def num_remaining(self) -> int:
        """Tokens the answer may still take."""
        return 0 if self.finished else self.sampling.max_tokens - len(self.generated)

    def append(self, token: Token, num_parameters: int = 0) -> bool:
        """Add a token; `num_parameters` belongs to the model in `token.source`, for the meter.

        Returns:
            False, and adds nothing, when the answer has already ended.
        """
        if self.finish_reason is not None:
            return False
        self.tokens.append(token.id)
        self.generated.append(token)
        self.output_counts[token.id] = self.output_counts.get(token.id, 0) + 1
        self.meter.of(token.source, num_parameters).generated_tokens += 1
        if token.id in self._ends or (self.stop is not None and self.stop.feed(token.id)):
            self.finish_reason = FinishReason.STOP
        elif len(self.generated) >= self.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return True

    def append_plain(self, ids: list[int], source: str, num_parameters: int) -> int:
        """Add decoded tokens of which nothing but the id is known, until the answer ends, as `append` does one by one.

        Returns:
            How many were added.
        """
        if self.finish_reason is not None:
            return 0
        ids = ids[: self.sampling.max_tokens - len(self.generated)]
        if self.stop is not None or not self._ends.isdisjoint(ids):
            for place, token in enumerate(ids):
                if token in self._ends or (self.stop is not None and self.stop.feed(token)):
                    self.finish_reason = FinishReason.STOP
                    del ids[place + 1 :]
                    break
        counts = self.output_counts
        for token in ids:
            counts[token] = counts.get(token, 0) + 1
        self.tokens.extend(ids)
        self.generated.extend([plain_token(token, source) for token in ids])
        self.meter.of(source, num_parameters).generated_tokens += len(ids)
        if self.finish_reason is None and len(self.generated) >= self.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return len(ids)

    def extend(self, tokens: Iterable[Token], num_parameters: dict[str, int]) -> tuple[Token, ...]:
        """Add tokens until the answer ends; returns those that were added (an end inside cuts the rest)."""
        return tuple(token for token in tokens if self.append(token, num_parameters[token.source]))

    @property
    def can_reopen(self) -> bool:
        """True if it ended with an end token and has room for more."""
        stopped = self.finish_reason is FinishReason.STOP and self.tokens[-1] in self._ends
        return stopped and len(self.generated) < self.sampling.max_tokens

    def reopen(self) -> None:
        """Reopen the answer after the end token, which stays.

        Raises:
            ValueError: it has not ended, or its length or a stop string ended it.
        """
        if not self.can_reopen:
            raise ValueError("only an answer that ended with an end token, with room for more, can be reopened")
        self.finish_reason = None

    def fork(self, seed: int | None = None) -> Sequence:
        """Return an independent continuation of the same tokens, with counters of its own."""
        seed = self.seed if seed is None else seed
        twin = Sequence(
            self.tokens, self.sampling, seed, (), None, self.sharing, self.tenant, self.lossy, self.low_priority
        )
        twin.owner = self.owner
        twin.renderings = self.renderings
        twin.networks = self.networks
        if self.chain is not None and self.chain.past:
            twin.chain = self.chain.fork()
        twin.num_prompt_tokens = self.num_prompt_tokens
        twin.prompt_set = self.prompt_set
        twin.generated = list(self.generated)
        twin.output_counts = dict(self.output_counts)
        twin.finish_reason = self.finish_reason
        twin.stop = self.stop.clone() if self.stop is not None else None
        twin.constraint = self.constraint.clone() if self.constraint is not None else None
        twin.thinking = self.thinking
        twin._ends = self._ends
        return twin
