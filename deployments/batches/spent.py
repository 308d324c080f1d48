"""What the answers of a batch used, by their usage or by the lines that are written for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from turnout.calls import Usage


@dataclass(slots=True)
class Spent:
    """What answers used; FLOPs also of the large model alone, seconds are of the actor's clock."""

    rows: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    flops: float = 0.0
    flops_large_only: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of_usage(cls, usage: Usage) -> Self:
        """What an answer used."""
        return cls(
            answered=1,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            flops=usage.cost.spent.flops,
            flops_large_only=usage.cost.large_only.flops,
        )

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Self:
        """What an answer used, by the line that is written for it.

        Raises:
            KeyError: it does not say.
        """
        usage = record["response"]["body"]["usage"]
        cost = usage["turnout"]["cost"]
        return cls(
            answered=1,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            # absent: written by a version, or a server, that does not count them
            reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
            flops=cost["spent"]["flops"],
            flops_large_only=cost["large_only"]["flops"],
        )

    def add(self, other: Spent) -> None:
        """Take over what others used."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that were cached."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def cost_of_large(self) -> float | None:
        """FLOPs relative to those of the large model alone; None: nothing was computed yet."""
        return self.flops / self.flops_large_only if self.flops_large_only else None
