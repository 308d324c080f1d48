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
        prompt, cached, completion, reasoning = _tokens(usage)
        # endpoints whose models only read compute what no meter counts
        cost = usage["turnout"]["cost"] if completion is not None else None
        return cls(
            answered=1,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion or 0,
            reasoning_tokens=reasoning,
            flops=cost["spent"]["flops"] if cost is not None else 0.0,
            flops_large_only=cost["large_only"]["flops"] if cost is not None else 0.0,
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


def _tokens(usage: dict[str, Any]) -> tuple[int, int, int | None, int]:
    """Tokens of the prompt, of those cached, of the answer (None: nothing is written), of those thought.

    In the members' names that the answer's endpoint has for them.
    """
    if "output_tokens" in usage:
        thought = usage.get("output_tokens_details") or {}
        if "cache_read_input_tokens" in usage:  # of /v1/messages: what was cached is not in its input_tokens
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached, cached, usage["output_tokens"], thought.get("thinking_tokens") or 0
        cached, reasoning = usage["input_tokens_details"]["cached_tokens"], thought.get("reasoning_tokens") or 0
        return usage["input_tokens"], cached, usage["output_tokens"], reasoning
    if "completion_tokens" not in usage:
        return usage["prompt_tokens"], 0, None, 0
    # absent: written by a version, or a server, that does not count them
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage["completion_tokens"], reasoning
