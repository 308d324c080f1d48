"""What a request cost, by model, and what the large model alone would have cost: four meters side by side.

The paper's cost charges parameters per token that a model wrote and nothing for catch-up (paper #2, Entropy Adaptive
Decoding). Tokens that were written and thrown away, which the paper has none of, are charged as those that stayed;
speculative drafts are not. FLOPs are 2 x parameters x tokens processed, catch-up and discarded work included. Wall
clock is measured. Money is tokens by the configured prices of their models. They answer different questions and are
never mixed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class ModelMeter:
    """Work one model did for one sequence. All counts are tokens, except `forwards` (forward passes).

    A token fed to the model is counted in exactly one of prompt, catchup, decode and draft:
    `catchup` are generated tokens another model wrote that this one had to read before it could go on,
    `draft` are tokens of proposals, fed hypothetically. `spared` is what of all these was not computed, where tokens
    went through some of the layers only: in tokens, a token that went through half of them counting one half. `fetched`
    are those of the cached tokens that came from the prefix store, and not from the model's own blocks. `usd` is what
    all of it costs by the model's configured price, in US dollars.
    """

    num_parameters: int
    forwards: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    catchup_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    spared_tokens: float = 0.0
    fetched_tokens: int = 0
    usd: float = 0.0

    @property
    def processed_tokens(self) -> int:
        """Tokens that went through a forward pass."""
        return self.prompt_tokens + self.catchup_tokens + self.decode_tokens + self.draft_tokens

    @property
    def written_tokens(self) -> int:
        """Tokens the model wrote: those that stayed and those that a switch dropped or that were thrown away."""
        return self.generated_tokens + self.discarded_tokens

    @property
    def paid(self) -> float:
        """Parameters x tokens written, those thrown away included."""
        return float(self.num_parameters * self.written_tokens)

    @property
    def flops(self) -> float:
        """2 x parameters x processed tokens, those spared left out."""
        return 2.0 * self.num_parameters * (self.processed_tokens - self.spared_tokens)


@dataclass(slots=True)
class SpeculationMeter:
    """What drafting brought. Lists are by depth in the draft, the root's children first.

    Attributes:
        rounds: verifications by the target, those without a draft included.
        emitted_tokens: tokens of these rounds, the target's own included.
        draft_tokens: tokens proposed.
        accepted_tokens: proposed tokens that stayed.
        drafted_at: rounds whose draft reached so deep.
        accepted_at: rounds that accepted so deep.
        draft_s: wall time of drafting, in seconds.
        verify_s: wall time of verifying, in seconds.
    """

    rounds: int = 0
    emitted_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add_round(
        self,
        *,
        depths: list[int],
        num_accepted: int,
        num_emitted: int,
        draft_s: float,
        verify_s: float,
        accepted_depths: list[int] | None = None,
    ) -> None:
        """Count a round.

        Args:
            depths: of the nodes drafted in it, from 0.
            num_accepted: nodes that stay.
            num_emitted: tokens.
            draft_s: wall time of drafting, in seconds.
            verify_s: wall time of verifying, in seconds.
            accepted_depths: of the nodes that stay, where some of them were drafted in the round before; None: these
                are 0, 1, 2 and so on.
        """
        self.rounds += 1
        self.emitted_tokens += num_emitted
        self.draft_tokens += len(depths)
        self.accepted_tokens += num_accepted
        _count(self.drafted_at, [1] * (max(depths) + 1 if depths else 0))
        if accepted_depths is None:
            _count(self.accepted_at, [1] * num_accepted)
        for depth in accepted_depths or ():
            _count(self.accepted_at, [0] * depth + [1])
        self.draft_s += draft_s
        self.verify_s += verify_s

    def add_plain(self, rounds: int, draft_s: float, verify_s: float) -> None:
        """Count rounds without a draft, each of one token; the times are those of all of them together, in seconds."""
        self.rounds += rounds
        self.emitted_tokens += rounds
        self.draft_s += draft_s
        self.verify_s += verify_s

    def merge(self, other: SpeculationMeter) -> None:
        """Add another sequence's counters to these."""
        for name in ("rounds", "emitted_tokens", "draft_tokens", "accepted_tokens", "draft_s", "verify_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        _count(self.drafted_at, other.drafted_at)
        _count(self.accepted_at, other.accepted_at)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens of a round, the target's own included; 0.0 before the first."""
        return self.emitted_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the rounds that drafted so deep in which so much was accepted, by depth."""
        accepted = [*self.accepted_at, *[0] * (len(self.drafted_at) - len(self.accepted_at))]
        return [a / d for a, d in zip(accepted, self.drafted_at, strict=False)]

    @property
    def draft_time_share(self) -> float:
        """Drafting's share of the wall time of drafting and verifying."""
        whole = self.draft_s + self.verify_s
        return self.draft_s / whole if whole else 0.0


def _count(counts: list[int], more: list[int]) -> None:
    counts.extend([0] * (len(more) - len(counts)))
    for index, count in enumerate(more):
        counts[index] += count


@dataclass(slots=True)
class Meter:
    """The counters of one request: one `ModelMeter` per model name, and speculation's."""

    models: dict[str, ModelMeter] = field(default_factory=dict)
    speculation: SpeculationMeter = field(default_factory=SpeculationMeter)
    switches: int = 0

    def of(self, name: str, num_parameters: int) -> ModelMeter:
        """The meter of a model, made on first use."""
        meter = self.models.get(name)
        if meter is None:
            meter = self.models[name] = ModelMeter(num_parameters)
        return meter

    def merge(self, other: Meter) -> None:
        """Add another sequence's counters to these."""
        for name, theirs in other.models.items():
            mine = self.of(name, theirs.num_parameters)
            for count in ModelMeter.__dataclass_fields__:
                if count != "num_parameters":
                    setattr(mine, count, getattr(mine, count) + getattr(theirs, count))
        self.speculation.merge(other.speculation)
        self.switches += other.switches

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for wires and logs."""
        return asdict(self)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer: all that stayed, whichever model wrote them."""
        return sum(model.generated_tokens for model in self.models.values())

    def written_by(self, name: str) -> int:
        """Tokens a model wrote, see `ModelMeter.written_tokens`; 0 where it did no work."""
        return self.models[name].written_tokens if name in self.models else 0

    def large_share(self, large: str) -> float:
        """Tokens the large model wrote, dropped ones included, per token of the answer; 0.0 for an empty answer.

        This is the share that calibrations, benchmarks and usage speak of. The large model alone has 1. A switch that
        drops a token of the large model does not lower it, and above 1 more was dropped than the small model wrote.

        Args:
            large: name of the large model.
        """
        return self.written_by(large) / self.answer_tokens if self.answer_tokens else 0.0

    def large_kept_share(self, large: str) -> float:
        """Share of the answer's tokens that the large model wrote, dropped ones left out; 0.0 for an empty answer."""
        kept = self.models[large].generated_tokens if large in self.models else 0
        return kept / self.answer_tokens if self.answer_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One way of answering a request, on the four meters.

    `paper` is relative to the large model alone writing as many tokens as the answer has: above 1 where much was thrown
    away; 0 where the number of parameters is not known, as `flops`. `usd` are US dollars by configured prices.
    """

    paper: float
    flops: float
    wall_s: float
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class CostReport:
    """Cost of an answer, and what the large model alone would have cost (its wall clock is an estimate).

    Attributes:
        large_share: see `Meter.large_share`.
        large_kept_share: see `Meter.large_kept_share`.
    """

    spent: Cost
    large_only: Cost
    large_share: float
    large_kept_share: float = 0.0


def paper_cost(large_share: float, small_parameters: float, large_parameters: float) -> float:
    """Relative cost C = f + (1 - f) * N_small / N_large, f the share of tokens the large model wrote, none in vain."""
    return large_share + (1.0 - large_share) * small_parameters / large_parameters


class Price(Protocol):
    """Price of a model's tokens."""

    def of(self, prompt: float, cached: float, written: float) -> float:
        """Price in US dollars of tokens that were read, found in a cache and written."""
        ...


def report(
    meter: Meter, large: str, num_large_parameters: int, num_prompt_tokens: int, wall_s: float, large_step_s: float
) -> CostReport:
    """Compare a finished request with the large model alone.

    Args:
        meter: the request's counters.
        large: name of the model that would have answered alone.
        num_large_parameters: its parameters.
        num_prompt_tokens: prompt length, in tokens.
        wall_s: measured time of this request, in seconds.
        large_step_s: measured time of one decode step of the large model under the present load, in seconds.
    """
    generated = meter.answer_tokens
    paid = sum(m.paid for m in meter.models.values())
    large_tokens = num_prompt_tokens + max(generated - 1, 0)
    return CostReport(
        spent=Cost(
            paper=paid / (generated * num_large_parameters) if generated and num_large_parameters else 0.0,
            flops=sum(m.flops for m in meter.models.values()),
            wall_s=wall_s,
        ),
        large_only=Cost(paper=1.0, flops=2.0 * num_large_parameters * large_tokens, wall_s=large_step_s * generated),
        large_share=meter.large_share(large),
        large_kept_share=meter.large_kept_share(large),
    )
