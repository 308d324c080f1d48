"""Comparison of a method's answers with those of plain decoding in the same run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from experiments.replay import Verdict, compare
from experiments.speculation.sides import OurSide, Turn
from experiments.speculation.tasks import Prompt
from pool.exactness import TIES
from pool.local_pool import LocalPool


@dataclass(slots=True)
class Equality:
    """Comparison of answers with plain decoding's, prompt by prompt.

    Attributes:
        equal: the same tokens.
        ties: the first difference is between tokens that rounding may exchange.
        wrong: it is not.
        unlike: different answers of a method that need not write the same.
    """

    equal: int = 0
    ties: int = 0
    wrong: int = 0
    unlike: int = 0

    def add(self, other: Equality) -> None:
        """Count another turn's prompts as well."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """Plain data."""
        return asdict(self)


async def check(
    pool: LocalPool, side: OurSide, prompts: dict[int, Prompt], turns: tuple[Turn, Turn], dtype: str
) -> Equality:
    """Compare a turn with the same prompts' plain one. Greedy and seeded answers must be equal up to ties.

    Args:
        pool: idle.
        side: whose turn is judged.
        prompts: of the turn.
        turns: plain decoding's and the side's.
        dtype: of the models; says what rounding may do.
    """
    found = Equality()
    contender = side.contender
    binding = contender.lossless and (contender.seeded or side.temperature == 0.0)
    for (number, prompt), expected, got in zip(prompts.items(), turns[0].answers, turns[1].answers, strict=True):
        if expected.tokens == got.tokens:
            found.equal += 1
        elif not binding:
            found.unlike += 1
        else:
            call = side.call(number, prompt)
            verdict = await compare(pool, call, list(got.given), list(expected.given), TIES[dtype])
            found.ties += verdict is Verdict.TIE
            found.wrong += verdict is Verdict.WRONG
    return found
