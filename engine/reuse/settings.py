"""How spans of other prompts are taken over, and how much of them is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """Parameters of span reuse (paper #222, KVShare).

    Attributes:
        recompute: largest share of the tokens taken over that a prefill computes again (rho); 0: none, and nothing is
            checked; 1: all.
        threshold: smallest deviation that is worth it, in means of ||K|| + ||V|| over the tokens checked.
        check_layers: number of first layers that compute all tokens; deviations are those of the last of them. The keys
            of the first layer depend on nothing but token and position, so 1 finds none.
        decode_tokens: tokens computed again along with each new token; 0: none.
        min_similarity: share of a prompt, in n-grams, that a source must have.
        min_run: shortest run taken over, in tokens; None: one block.
        max_prompts: prompts remembered for each namespace.
        max_sources: prompts that one sequence takes spans from.
        select: which tokens are computed again; "random" is the control at equal cost.
    """

    recompute: float = 0.15
    threshold: float = 0.02
    check_layers: int = 2
    decode_tokens: int = 2
    min_similarity: float = 0.1
    min_run: int | None = None
    max_prompts: int = 256
    max_sources: int = 4
    select: Literal["deviation", "random"] = "deviation"

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1 or self.check_layers < 1 or self.decode_tokens < 0:
            raise ValueError("recompute is a share, check_layers is at least 1, decode_tokens at least 0")


# What is moved after an edit stays as it was (paper #230).
MOVED_ONLY = ReuseSettings(recompute=0.0, decode_tokens=0)
